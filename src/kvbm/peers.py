"""Who is at the other end of a Unix socket, by the kernel's word, and who may be.

A path says nothing about who listens there, and a connection nothing about who made it: both ends ask the kernel
before the first message is believed.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable

_CREDENTIALS = struct.Struct("3i")
ROOT = 0


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end (SO_PEERCRED): who connected, or who began to listen."""
    _, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(uid) & 0xFFFFFFFF  # the kernel's ids are unsigned


def is_trusted(uid: int, listed: Iterable[int]) -> bool:
    """Whether this user may be at the other end: ourselves, root, or one that the settings list."""
    return uid in (os.geteuid(), ROOT, *listed)


def accepted_users(listed: Iterable[int]) -> str:
    """Those that `is_trusted` accepts, for a line to the user."""
    return ", ".join(map(str, dict.fromkeys((os.geteuid(), ROOT, *listed))))

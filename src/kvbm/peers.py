"""Which user is at the other end of a Unix socket, as the kernel reports it, and which users are accepted there.

A path does not show which user listens there, nor a connection which user made it: both ends ask the kernel before
they believe the first message.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable

_CREDENTIALS = struct.Struct("3i")
ROOT = 0
OVERFLOW_UID = "65534"
ALL_USERS = ["0", "0", "4294967295"]
"""The map of a user namespace in which every user has his own number: that of the machine itself."""


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end (SO_PEERCRED), the one that connected or began to listen."""
    _, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(uid) & 0xFFFFFFFF  # the kernel's ids are unsigned


def nameless_as() -> str:
    """The user id that we share with every user outside our user namespace, in words; empty when there is none.

    Users without a number in a namespace (rootless containers) are all called by one, the overflow uid. Where that is
    ours as well, it does not tell one user from another.
    """
    ours = str(os.geteuid())
    if ours != (_read("/proc/sys/kernel/overflowuid") or OVERFLOW_UID):
        return ""
    if _read("/proc/self/uid_map").split() == ALL_USERS:
        return ""
    return f"{ours}, as the kernel calls every user outside this user namespace too: run as another user"


def is_ourselves(uid: int) -> bool:
    """Whether this id, as the kernel reports it, is ours and no other user's."""
    return uid == os.geteuid() and not nameless_as()


def is_trusted(uid: int, listed: Iterable[int]) -> bool:
    """Whether this user may be at the other end: ourselves, root, or one that the settings list."""
    return uid == ROOT or uid in listed or is_ourselves(uid)


def accepted_users(listed: Iterable[int]) -> str:
    """Those that `is_trusted` accepts, for a line to the user."""
    nameless = nameless_as()
    ours = () if nameless else (os.geteuid(),)
    accepted = ", ".join(map(str, dict.fromkeys((*ours, ROOT, *listed))))
    return f"{accepted} (we are user {nameless})" if nameless else accepted


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""

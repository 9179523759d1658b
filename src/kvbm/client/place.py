"""A name for the place of a socket, the same for all processes that find one manager there, on whatever machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def name_of_place(socket_path: str) -> str:
    """The running kernel, and the directory by its number: containers of one machine may know it under several paths,
    and other directories under the same. The socket itself need not be there yet."""
    directory, name = os.path.split(os.path.abspath(socket_path))
    try:
        found = os.stat(directory)
        place = f"{found.st_dev}:{found.st_ino}"
    except OSError:  # nobody has made it
        place = f"{socket.gethostname()}:{directory}"
    return f"{_machine()} {place} {name}"


def _machine() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()

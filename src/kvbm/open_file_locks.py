"""Locks on bytes of an open file (`F_OFD_SETLK`, fcntl(2)). The bytes need not exist.

A lock is the open file's: whoever has the same one, as a forked child has, has its locks too.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock`: type, whence, first byte, bytes, and a process, which locks of open files leave 0."""


def set_lock(fd: int, kind: int, place: int) -> bool:
    """Set the lock of one byte to `fcntl.F_WRLCK` or `F_UNLCK`; False where another open file has it.

    Raises OSError where the file can have no locks.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
    except BlockingIOError:
        return False
    return True

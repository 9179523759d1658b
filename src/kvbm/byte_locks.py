"""Locks with names, all in one file: each name is a byte of it, which needs not exist.

These are locks of open files (`open_file_locks`), so two threads of one process exclude each other too. The kernel
frees the lock of a holder that is killed once no process has its open file: a child that the holder forked meanwhile
keeps the lock until it ends or runs another program. Two names on one byte only wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvbm.clock import Clock
from kvbm.open_file_locks import set_lock
from kvbm.runtime_dir import make_own_dir, open_lock, refuse_foreign

POLL_S = 0.02
_LAST_BYTE = (1 << 62) - 1


class LockBusy(Exception):
    """Somebody else holds the lock, and kept it for as long as we were ready to wait."""


class ByteLocks:
    """The locks in the file at `path`, which is made when it is not there, in a directory of ours."""

    def __init__(
        self, path: Path, clock: Clock = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._path = path
        self._clock = clock
        self._sleep = sleep

    @contextlib.contextmanager
    def held(self, name: str, until_s: float) -> Iterator[None]:
        """Hold the lock of this name, waiting for it until the clock shows `until_s`.

        Raises LockBusy, and OSError or SettingsError where there can be no lock, as in a directory of another user's.
        """
        make_own_dir(str(self._path.parent), "the directory")
        fd = open_lock(str(self._path))
        try:
            refuse_foreign(os.fstat(fd))
            place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") & _LAST_BYTE
            while not set_lock(fd, fcntl.F_WRLCK, place):
                if self._clock() >= until_s:
                    raise LockBusy(name)
                self._sleep(POLL_S)
            try:
                yield
            finally:
                # A child that was forked meanwhile has the same open file: closing ours would not free the lock.
                set_lock(fd, fcntl.F_UNLCK, place)
        finally:
            os.close(fd)

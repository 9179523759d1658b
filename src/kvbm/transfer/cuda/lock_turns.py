"""One process of a node at a time page-locks memory.

The NVIDIA driver locks pages under locks that all its processes on a node share: ranks and engines that lock at once
only stand in one another's way, and in the way of steps that launch kernels. So they take turns, whatever memory they
lock, and a turn includes the pause after a piece.

A process that ends its turn asks for the next one microseconds later, and the waiting ones look every few milliseconds:
with a single lock its holder would always win. So there are two locks, on two bytes of one file. The process that is
next holds the second lock while it waits for the first, and all others wait for the second.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvbm.clock import Clock
from kvbm.errors import SettingsError
from kvbm.open_file_locks import set_lock

_log = logging.getLogger(__name__)

FILE_NAME = "page-locks.lock"
TURN_S_MAX = 30.0
"""Others lock a piece each meanwhile. Where that takes longer one of them was stopped, and turns are set aside."""
POLL_S = 0.01

TURN, NEXT = 0, 1
"""The bytes whose locks are the turn, and the place of the process that is next."""


class LockTurns:
    """The turns of the processes that use this runtime directory. Not shared between threads; close it once done.

    Where the file of the locks cannot be had there are no turns, and `turn` does not wait.
    """

    def __init__(self, runtime_dir: str, clock: Clock = time.monotonic) -> None:
        # Here, because copies are measured where only torch is installed.
        from kvbm.runtime_dir import make_runtime_dir, open_lock, refuse_foreign

        self._clock = clock
        self._fd = -1
        try:
            make_runtime_dir(runtime_dir)
            self._fd = open_lock(os.path.join(runtime_dir, FILE_NAME))
            refuse_foreign(os.fstat(self._fd))
        except (OSError, SettingsError) as error:
            self._set_aside(error)

    @contextmanager
    def turn(self, closing: threading.Event) -> Iterator[None]:
        """Waits for the turn, until `closing` is set or for `TURN_S_MAX`, and has it, or goes on without.

        A process that has waited that long once does not wait for later turns.
        """
        mine = self._wait(closing)
        try:
            yield
        finally:
            if mine:
                self._unlock(TURN)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _wait(self, closing: threading.Event) -> bool:
        """Whether this process has the turn now."""
        deadline_s = self._clock() + TURN_S_MAX
        for place in (NEXT, TURN):
            while self._fd >= 0 and not self.take(place):
                if closing.wait(POLL_S):
                    self._unlock(NEXT)
                    return False
                if self._clock() >= deadline_s:
                    _log.warning(
                        "another process of this node has page-locked memory for over %g s: pages are locked "
                        "without taking turns from now on",
                        TURN_S_MAX,
                    )
                    self.close()
        if self._fd < 0:
            return False
        self._unlock(NEXT)
        return True

    def take(self, place: int) -> bool:
        """Take the lock of TURN or of NEXT, if no other process has it."""
        try:
            return set_lock(self._fd, fcntl.F_WRLCK, place)
        except OSError as error:
            self._set_aside(error)
            return False

    def _set_aside(self, error: Exception) -> None:
        _log.debug("pages are locked without taking turns: %s", error)
        self.close()

    def _unlock(self, place: int) -> None:
        set_lock(self._fd, fcntl.F_UNLCK, place)

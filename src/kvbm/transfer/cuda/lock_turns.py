"""One process at a time locks pages of memory that several map.

Ranks whose KV is alike, and engines that share a manager, map the same memory and lock all of it. The kernel takes
each page for each of them in turn: at once they only stand in one another's way, each inside its driver's own locks.

A process that ends its turn asks for the next one microseconds later, and the waiting ones look every few milliseconds:
with a single lock its holder would always win. So there are two locks, on two bytes of the memory. The process that is
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
from kvbm.open_file_locks import set_lock

_log = logging.getLogger(__name__)

TURN_S_MAX = 30.0
"""Others lock a piece each meanwhile. Where that takes longer one of them was stopped, and turns are set aside."""
POLL_S = 0.01

TURN, NEXT = 0, 1
"""The bytes whose locks are the turn, and the place of the process that is next."""


class LockTurns:
    """Turns at the memory behind `fd`, which stays the caller's. Not shared between threads; close it once done.

    Where the memory cannot be opened again (no /proc) there are no turns, and nobody waits.
    """

    def __init__(self, fd: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._fd = -1
        try:
            # These locks are of open files. All processes were sent the same one: each must open its own.
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            _log.debug("pages are locked without taking turns: %s", error)

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
                        "another process locks pages of the host arena for over %g s: it is not waited for any more",
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
            _log.debug("pages are locked without taking turns: %s", error)
            self.close()
            return False

    def _unlock(self, place: int) -> None:
        set_lock(self._fd, fcntl.F_UNLCK, place)

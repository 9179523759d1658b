"""One process at a time locks pages of memory that several map.

Ranks whose KV is alike, and engines that share a manager, map the same memory and lock all of it. The kernel takes
each page for each of them in turn: at once they only stand in one another's way, each inside its driver's own locks.
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

_log = logging.getLogger(__name__)

TURN_S_MAX = 30.0
"""Who has the turn locks one piece meanwhile. One that takes longer was stopped, and nobody waits for it any more."""
POLL_S = 0.01


class LockTurns:
    """Turns at the memory behind `fd`, which stays the caller's. Not shared between threads; close it once done.

    Where the memory cannot be opened again (no /proc) there are no turns, and nobody waits.
    """

    def __init__(self, fd: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._fd = -1
        try:
            # File locks are of open files. All processes were sent the same one: each must open its own.
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            _log.debug("pages are locked without taking turns: %s", error)

    @contextmanager
    def turn(self, closing: threading.Event) -> Iterator[None]:
        """Waits for the turn, until `closing` is set or for `TURN_S_MAX`, and has it, or goes on without."""
        deadline_s = self._clock() + TURN_S_MAX
        mine = False
        while self._fd >= 0 and not (mine := self._take()):
            if closing.wait(POLL_S):
                break
            if self._clock() >= deadline_s:
                _log.warning("another process locks pages of the host arena for over %g s", TURN_S_MAX)
                break
        try:
            yield
        finally:
            if mine:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _take(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

"""The control thread of a disk tier: it does what touches the medium and moves no block."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvbm.clock import Clock
from kvbm.errors import TierError

OPERATIONS_MAX = 8
"""A tier has at most two operations of each kind in the queue."""


class ControlThread:
    """Runs operations, which must not raise, in a daemon thread: one at a time, in the order of `run`.

    Raises TierError where the process can have no more threads.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._queued = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        # Guarded by the lock:
        self._operations: deque[Callable[[], None]] = deque()
        self._begun_s: float | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="kvbm-disk-control", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise TierError(f"disk tier: a thread cannot be started: {error}") from error

    def run(self, operation: Callable[[], None]) -> None:
        """Queue an operation; any thread. It is dropped where `stop` was called."""
        with self._lock:
            if not self._stopping:
                assert len(self._operations) < OPERATIONS_MAX
                self._operations.append(operation)
                self._queued.notify()

    def begin_step(self) -> None:
        """In an operation: its next step begins."""
        with self._lock:
            self._begun_s = self._clock()

    @property
    def busy_s(self) -> float:
        """How long the operation that runs now, or its step, has been running, in seconds; 0 without one."""
        with self._lock:
            return 0.0 if self._begun_s is None else self._clock() - self._begun_s

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until every operation has ended; False when `deadline_s` seconds were not enough."""
        with self._lock:
            return self._idle.wait_for(self._is_idle, timeout=max(0.0, deadline_s))

    def stop(self, deadline_s: float) -> bool:
        """End after the queued operations. False when `deadline_s` seconds were not enough: they go on without us."""
        with self._lock:
            self._stopping = True
            self._queued.notify()
        self._thread.join(max(0.0, deadline_s))
        return not self._thread.is_alive()

    def _is_idle(self) -> bool:
        return not self._operations and self._begun_s is None

    def _serve(self) -> None:
        while (operation := self._next()) is not None:
            operation()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._begun_s = None
            while not self._operations:
                self._idle.notify_all()
                if self._stopping:
                    return None
                self._queued.wait()
            self._begun_s = self._clock()
            return self._operations.popleft()

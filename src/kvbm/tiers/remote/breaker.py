"""A circuit breaker: after errors in a row, or answers that come too late, nothing is asked for a while.

Pure: the clock and the random source come in. Thread-safe. It closes by itself: after a wait one *probe* is due, and
what comes of it decides. The waits grow while it fails, up to a bound, each with jitter, so that many nodes do not
come back at once.
"""

from __future__ import annotations

import random
import threading
from enum import Enum

from kvbm.clock import Clock
from kvbm.tiers.remote.blobs import StoreTrouble


class BreakerState(Enum):
    """Where a breaker stands."""

    CLOSED = "closed"
    """All is well, or not bad enough."""
    OPEN = "open"
    """Nothing is asked before the next probe is due."""
    HALF_OPEN = "half-open"
    """A probe is under way."""


class Breaker:
    """Opens after `errors_max` errors in a row, a late answer counting twice, and at once where the store refuses.

    The waits are `wait_s`, then twice the last one, at most `wait_max_s`; each is shortened by up to half of it. They
    begin anew when it has been closed for longer than the last one.
    """

    def __init__(
        self,
        clock: Clock,
        jitter: random.Random,
        *,
        errors_max: int = 4,
        wait_s: float = 1.0,
        wait_max_s: float = 60.0,
    ) -> None:
        assert errors_max > 0 and 0.0 < wait_s <= wait_max_s
        self._clock = clock
        self._jitter = jitter
        self._errors_max = errors_max
        self._wait_s = wait_s
        self._wait_max_s = wait_max_s
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._errors = 0
        self._last_wait_s = 0.0
        self._closed_s = clock()
        self._due_s = 0.0
        self.trouble: StoreTrouble | None = None
        """What kind of trouble opened it; None while it is closed."""
        self.line = ""
        """What opened it, for people; empty while it is closed."""
        self.openings = 0
        """How often it opened."""

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def closed(self) -> bool:
        return self._state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """The store did what it was asked. While it is open this says nothing: it may be an old answer."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                self._errors = 0

    def failed(self, trouble: StoreTrouble, line: str) -> None:
        """The store failed. `line` says so to people."""
        self._count(self._errors_max if trouble in ("refused", "full") else 1, trouble, line)

    def late(self, line: str) -> None:
        """An answer did not come within its deadline."""
        self._count(2, "slow", line)

    def probe_due(self) -> bool:
        """Whether a probe shall be made now: then the caller makes one, and says how it went (`probed`)."""
        with self._lock:
            if self._state is not BreakerState.OPEN or self._clock() < self._due_s:
                return False
            self._state = BreakerState.HALF_OPEN
            return True

    def probed(self, trouble: StoreTrouble | None, line: str = "") -> None:
        """How the probe went: None closes it."""
        with self._lock:
            if self._state is not BreakerState.HALF_OPEN:
                return
            if trouble is None:
                self._state = BreakerState.CLOSED
                self._closed_s, self._errors = self._clock(), 0
                self.trouble, self.line = None, ""
            else:
                self._open(trouble, line)

    def _count(self, weight: int, trouble: StoreTrouble, line: str) -> None:
        with self._lock:
            if self._state is not BreakerState.CLOSED:
                return
            self._errors += weight
            if self._errors >= self._errors_max:
                if self._clock() - self._closed_s > self._last_wait_s:
                    self._last_wait_s = 0.0
                self.openings += 1
                self._open(trouble, line)

    def _open(self, trouble: StoreTrouble, line: str) -> None:
        self._state = BreakerState.OPEN
        self.trouble, self.line = trouble, line
        self._last_wait_s = min(self._wait_max_s, max(self._wait_s, 2 * self._last_wait_s))
        self._due_s = self._clock() + self._last_wait_s * (1.0 - self._jitter.random() / 2)

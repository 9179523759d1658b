"""How often something may be done."""

from __future__ import annotations

from threading import Lock

from kvbm.clock import Clock


class Pace:
    """`per_s` times a second, and `burst` times at once. For all threads together."""

    def __init__(self, per_s: float, burst: float, clock: Clock) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._left, self._seen_s = burst, clock()
        self._lock = Lock()

    def take(self) -> bool:
        """Whether it may be done once more now."""
        with self._lock:
            now_s = self._clock()
            self._left = min(self._burst, self._left + (now_s - self._seen_s) * self._per_s)
            self._seen_s = now_s
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True

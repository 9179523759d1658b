"""When a read that takes long is asked a second time: the slowest answers of a store are its stragglers. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

DELAY_MIN_S = 0.05
MEDIANS = 3.0
SHARE = 0.05
"""At most this part of all reads is asked twice."""

SAMPLES_MAX = 32
SAMPLES_MIN = 8
_CREDIT_MAX = 4.0
"""So many second requests may follow one another, after a long time without."""


class Hedging:
    """Fed with how long reads took; sizes are alike within a power of two. Not thread-safe."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._delays: dict[int, float] = {}
        self._credit = 0.0
        self.hedged = 0
        """So many reads were asked a second time."""

    def took(self, byte_count: int, seconds: float) -> None:
        """A read took so long, from the store's first request to its first answer."""
        self._credit = min(_CREDIT_MAX, self._credit + SHARE)
        size = byte_count.bit_length()
        samples = self._seconds.setdefault(size, deque(maxlen=SAMPLES_MAX))
        samples.append(seconds)
        if len(samples) >= SAMPLES_MIN:
            self._delays[size] = max(DELAY_MIN_S, MEDIANS * median(samples))

    def delay_s(self, byte_count: int) -> float | None:
        """After so many seconds a read of this size is asked again; None where too few are known."""
        return self._delays.get(byte_count.bit_length())

    def take(self) -> bool:
        """Whether one more read may be asked a second time; it counts as asked then."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        self.hedged += 1
        return True

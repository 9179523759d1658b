"""How fast a store is, from what requests took: latency and bandwidth, each way. Pure.

A request's time is taken for a latency and a transfer. The latency is the median of small requests; the bandwidth is
the median of what larger ones moved in the time beyond it. Old ones count as long as no new ones push them out.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SMALL_BYTES = 64 << 10
SAMPLES_MAX = 32
_TRANSFER_MIN_S = 1e-6


class Pace:
    """The pace of one direction. Not thread-safe."""

    def __init__(self) -> None:
        self._latencies: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._large: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)
        self.latency_s = 0.0
        """0 while unknown."""
        self.bytes_per_s = 0.0
        """0 while unknown."""

    def took(self, byte_count: int, seconds: float) -> None:
        """A request moved so many bytes, and took so long."""
        if byte_count <= SMALL_BYTES:
            self._latencies.append(seconds)
        else:
            self._large.append((byte_count, seconds))
        fastest = min((seconds for _, seconds in self._large), default=None)
        self.latency_s = median(self._latencies) if self._latencies else 0.0
        if fastest is not None:
            # What a large one took in all is more than a latency.
            self.latency_s = min(self.latency_s, fastest / 2)
            self.bytes_per_s = median(
                size / max(_TRANSFER_MIN_S, taken - self.latency_s) for size, taken in self._large
            )

    def expected_s(self, byte_count: int) -> float:
        """Seconds that a request of so many bytes takes; 0 if unknown."""
        if not self.bytes_per_s:
            return self.latency_s
        return self.latency_s + byte_count / self.bytes_per_s

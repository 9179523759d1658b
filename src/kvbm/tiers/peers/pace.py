"""How long a load from peers takes, foretold from those that ended."""

from __future__ import annotations

_WEIGHT = 0.2


class Pace:
    """Averages in which each load counts a fifth: the wait for its first answer, and the seconds of a byte."""

    def __init__(self) -> None:
        self._latency_s = 0.0
        self._byte_s = 0.0

    def took(self, latency_s: float, transfer_s: float, byte_count: int) -> None:
        """A load ended that brought so many bytes."""
        if byte_count > 0:
            first = not self._byte_s
            weight = 1.0 if first else _WEIGHT
            self._latency_s += weight * (max(0.0, latency_s) - self._latency_s)
            self._byte_s += weight * (max(1e-12, transfer_s / byte_count) - self._byte_s)

    def expected_s(self, byte_count: int) -> float:
        """Seconds of a load of so many bytes; 0 before anything was loaded."""
        return self._latency_s + byte_count * self._byte_s if self._byte_s else 0.0

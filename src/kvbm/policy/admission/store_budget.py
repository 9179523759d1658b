"""A bound on what is written to a store per hour, in bytes and in requests: both cost money where it is a cloud's."""

from __future__ import annotations

HOUR_S = 3600.0
BURST_SHARE = 12
"""One part in this many of the hour's budget may be spent at once: five minutes' worth."""


class StoreBudget:
    """Writes within `bytes_per_hour` and `requests_per_hour`; 0 is no bound.

    Guarantees that in any hour of its life no more is spent than that: a twelfth at once (one request of any size at
    least), the rest evenly. It starts with that first part.
    """

    def __init__(self, bytes_per_hour: int, requests_per_hour: int, now_s: float) -> None:
        assert bytes_per_hour >= 0 and requests_per_hour >= 0
        self._bytes = _Bucket(float(bytes_per_hour), now_s)
        self._requests = _Bucket(float(requests_per_hour), now_s)

    def spend(self, byte_count: int, now_s: float) -> bool:
        """Take one request of so many bytes out of the budget; False, with nothing taken, when less is left."""
        self._bytes.fill(now_s)
        self._requests.fill(now_s)
        if not (self._bytes.has(byte_count) and self._requests.has(1)):
            return False
        self._bytes.left -= byte_count
        self._requests.left -= 1
        return True

    def plenty(self, requests: int, now_s: float) -> bool:
        """Whether after so many requests half of those that may be made at once are left."""
        self._requests.fill(now_s)
        return self._requests.keeps_half(requests)

    def refund(self, byte_count: int) -> None:
        """A request that was paid for was not made."""
        self._bytes.left += byte_count
        self._requests.left += 1


class _Bucket:
    """What is left of one budget. It may be overdrawn by its last purchase, which is then paid off first."""

    def __init__(self, per_hour: float, now_s: float) -> None:
        self._per_hour = per_hour
        self._burst = max(1.0, per_hour / BURST_SHARE)
        self.left = self._burst
        self._filled_s = now_s

    def fill(self, now_s: float) -> None:
        """Time has gone by."""
        rate = max(0.0, self._per_hour - self._burst) / HOUR_S
        self.left = min(self.left + (now_s - self._filled_s) * rate, self._burst)
        self._filled_s = now_s

    def keeps_half(self, amount: int) -> bool:
        """Whether half of a burst is left when so much is spent."""
        return not self._per_hour or self.left - amount >= self._burst / 2

    def has(self, amount: int) -> bool:
        """Whether so much can be spent: what is larger than a burst as soon as the bucket is full."""
        return not self._per_hour or self.left >= min(amount, self._burst)

"""A bound on the bytes written to disk per day, for an SSD's wear, around any policy that chooses the blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvbm.policy.contract import AdmissionPolicy, hit_all

DAY_S = 86_400.0
BURST_SHARE = 24
"""One part in this many of the day's bytes may be written at once: an hour's worth."""
BLOCKS_PER_DAY_MIN = 2
"""A smaller budget would never fill up again after its first block."""


class WriteBudget:
    """An admission policy that admits what another one does, as long as its bytes are within the budget.

    Guarantees that in any 24 hours of its life at most `bytes_per_day` are admitted, blocks of `block_bytes` each: a
    24th of them at once (one block at least), the rest evenly over the day. It starts with that first part. A block
    that was admitted and is not written is given back with `refund`.
    """

    def __init__(
        self, inner: AdmissionPolicy, bytes_per_day: int, block_bytes: int, now_s: float = 0.0
    ) -> None:
        """Raises ValueError when the budget is too small for `BLOCKS_PER_DAY_MIN` blocks."""
        assert block_bytes > 0
        if bytes_per_day < BLOCKS_PER_DAY_MIN * block_bytes:
            raise ValueError(
                f"bytes_per_day={bytes_per_day} cannot be used: at least {BLOCKS_PER_DAY_MIN * block_bytes}, "
                f"{BLOCKS_PER_DAY_MIN} blocks of {block_bytes} bytes"
            )
        self.inner = inner
        self._block_bytes = block_bytes
        self._burst_bytes = float(max(bytes_per_day // BURST_SHARE, block_bytes))
        self._bytes_per_s = (bytes_per_day - self._burst_bytes) / DAY_S
        self._left_bytes = self._burst_bytes
        self._filled_s = now_s
        self.refused_last = False
        """The latest block that was offered was refused for the budget, not by the inner policy."""

    def offered(self, key: Hashable, now_s: float) -> bool:
        """True when the inner policy, which counts every block, admits this one and the budget has room for it."""
        admitted = self.inner.offered(key, now_s)
        within = admitted and self.spend(now_s)
        self.refused_last = admitted and not within
        return within

    def hit(self, key: Hashable, now_s: float) -> None:
        """Pass it on to the inner policy."""
        self.inner.hit(key, now_s)

    def offered_all(self, keys: Sequence[Hashable], now_s: float) -> list[bool]:
        """`offered` for each."""
        return [self.offered(key, now_s) for key in keys]

    def hit_all(self, keys: Sequence[Hashable], now_s: float) -> None:
        """Pass them on to the inner policy."""
        hit_all(self.inner, keys, now_s)

    def spend(self, now_s: float) -> bool:
        """Take one block's bytes out of the budget; False, with nothing taken, when it has fewer left."""
        self._left_bytes += (now_s - self._filled_s) * self._bytes_per_s
        self._left_bytes = min(self._left_bytes, self._burst_bytes)
        self._filled_s = now_s
        if self._left_bytes < self._block_bytes:
            return False
        self._left_bytes -= self._block_bytes
        return True

    def refund(self) -> None:
        """A block that was admitted will not be written."""
        self._left_bytes = min(self._left_bytes + self._block_bytes, self._burst_bytes)

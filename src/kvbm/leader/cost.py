"""Is loading faster than recomputing? Answered from what was measured in this engine, never from a table.

Both sides are moving averages: seconds of prefill per token, and seconds of loading per block and tier. While one
of them is unknown the answer is yes, which is how it becomes known; a no is checked again now and then.
"""

from __future__ import annotations

from kvbm.block import Tier

_WEIGHT = 0.2
_PREFILL_TOKENS_MIN = 64
_RECHECK_EVERY = 16


class CostModel:
    """Moving averages of one engine. `block_tokens` is the number of tokens per block; with `always`, loading is
    always worth it (tests and measurements want to see every load)."""

    def __init__(self, block_tokens: int, always: bool = False) -> None:
        self._block_tokens = block_tokens
        self._always = always
        self._prefill_s_per_token: float | None = None
        self._load_s_per_block: dict[int, float] = {}
        self._refusals = 0

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` prompt tokens in `seconds`; steps too small to say anything are left out."""
        if tokens >= _PREFILL_TOKENS_MIN and seconds > 0.0:
            self._prefill_s_per_token = _average(self._prefill_s_per_token, seconds / tokens)

    def loaded(self, sources: bytes, seconds: float) -> None:
        """A load of blocks that were found in `sources` (one tier each) took `seconds` from plan to device."""
        if not sources or seconds <= 0.0:
            return
        on_host = sources.count(Tier.HOST)
        if on_host == len(sources):
            known = self._load_s_per_block.get(Tier.HOST)
            self._load_s_per_block[Tier.HOST] = _average(known, seconds / on_host)
            return
        # What the host's blocks are known to take is not the disk's time.
        rest_s = max(0.0, seconds - on_host * self._load_s_per_block.get(Tier.HOST, 0.0))
        known = self._load_s_per_block.get(Tier.DISK)
        self._load_s_per_block[Tier.DISK] = _average(known, rest_s / (len(sources) - on_host))

    def load_s(self, sources: bytes) -> float | None:
        """What loading these blocks will take, or None while it is unknown."""
        total_s = 0.0
        for tier in (Tier.HOST, Tier.DISK):
            if blocks := sources.count(tier):
                per_block = self._load_s_per_block.get(tier)
                if per_block is None:
                    return None
                total_s += per_block * blocks
        return total_s

    def prefill_s(self, blocks: int) -> float | None:
        """What computing this many blocks will take, or None while it is unknown."""
        per_token = self._prefill_s_per_token
        return None if per_token is None else per_token * self._block_tokens * blocks

    def worth_loading(self, sources: bytes) -> int:
        """How many leading blocks to load: all, those before the first that is on disk, or none.

        None are worth it when computing them is known to be faster.
        """
        if self._always:
            return len(sources)
        on_host = len(sources) - len(sources.lstrip(bytes((Tier.HOST,))))
        if self._beats_computing(sources):
            return len(sources)
        self._refusals += 1
        if self._refusals % _RECHECK_EVERY == 0:
            return len(sources)
        return on_host if self._beats_computing(sources[:on_host]) else 0

    def _beats_computing(self, sources: bytes) -> bool:
        load_s, prefill_s = self.load_s(sources), self.prefill_s(len(sources))
        return load_s is None or prefill_s is None or load_s <= prefill_s


def _average(known: float | None, value: float) -> float:
    return value if known is None else known + _WEIGHT * (value - known)

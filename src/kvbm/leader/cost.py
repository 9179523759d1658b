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
        if sources and seconds > 0.0:
            slowest = max(sources)
            known = self._load_s_per_block.get(slowest)
            self._load_s_per_block[slowest] = _average(known, seconds / len(sources))

    def load_s(self, sources: bytes) -> float | None:
        """What loading these blocks will take, or None while it is unknown."""
        if not sources:
            return 0.0
        per_block = self._load_s_per_block.get(max(sources))
        return None if per_block is None else per_block * len(sources)

    def prefill_s(self, blocks: int) -> float | None:
        """What computing this many blocks will take, or None while it is unknown."""
        per_token = self._prefill_s_per_token
        return None if per_token is None else per_token * self._block_tokens * blocks

    def worth_loading(self, sources: bytes) -> bool:
        """False when loading these blocks is known to take longer than computing them."""
        load_s, prefill_s = self.load_s(sources), self.prefill_s(len(sources))
        if self._always or load_s is None or prefill_s is None or load_s <= prefill_s:
            return True
        self._refusals += 1
        return self._refusals % _RECHECK_EVERY == 0

    def describe(self) -> dict[str, float]:
        """The averages, for `why`: seconds per token computed and per block loaded."""
        known = {f"load_s_per_block_{Tier(t).name.lower()}": s for t, s in self._load_s_per_block.items()}
        if self._prefill_s_per_token is not None:
            known["prefill_s_per_token"] = self._prefill_s_per_token
        return known


def _average(known: float | None, value: float) -> float:
    return value if known is None else known + _WEIGHT * (value - known)

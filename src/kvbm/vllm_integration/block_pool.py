"""vLLM's block pool as the leader sees it: its prefix cache, and blocks that are kept from being handed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PoolBlocks:
    """`DeviceBlocks` over vLLM's pool. The pool is bound after the scheduler was made; before that nothing is known."""

    def __init__(self) -> None:
        self.pool: Any = None
        self._index: Any = None

    def take_reset(self) -> bool:
        """Whether the engine has emptied its prefix cache since the last call: it makes a new index then."""
        index = getattr(self.pool, "cached_block_hash_to_block", None)
        if index is self._index:
            return False
        first, self._index = self._index is None, index
        return not first

    @property
    def block_count(self) -> int:
        return len(self.pool.blocks) if self.pool is not None else 0

    def forget_all(self) -> None:
        """Take every block out of the prefix cache, those in use as well."""
        if self.pool is not None:
            self.pool.evict_blocks(set(range(len(self.pool.blocks))))

    def pin(self, blocks: Sequence[int]) -> bool:
        """Count us among those that use the blocks."""
        if self.pool is None:
            return False
        self.pool.touch([self.pool.blocks[block] for block in blocks])
        return True

    def unpin(self, blocks: Sequence[int]) -> None:
        """Last blocks first, as vLLM frees a request's: it evicts in that order, and a block is of no use without those
        before it."""
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(blocks)])

    def on_device(self, block_hashes: Sequence[Any]) -> int:
        """How many leading blocks of a request are in the prefix cache at this moment; a hint, not a promise.

        A chain loses its last blocks first, so a few blocks tell where it ends. Where one is missing in its middle, the
        hint is too large: the leader asks again once vLLM has counted.
        """
        if self.pool is None:
            return 0
        held, ahead, count = 0, 1, len(block_hashes)
        while held < count and self._is_cached(block_hashes[min(held + ahead, count) - 1]):
            held = min(held + ahead, count)
            ahead *= 2
        missing = min(held + ahead, count)  # the block before this one is not there, unless all are
        while missing - held > 1:
            middle = (held + missing) // 2
            if self._is_cached(block_hashes[middle - 1]):
                held = middle
            else:
                missing = middle
        return held

    def _is_cached(self, block_hash: Any) -> bool:
        return bool(self.pool.get_cached_block(block_hash, [0]))

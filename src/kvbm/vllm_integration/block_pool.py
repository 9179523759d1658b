"""vLLM's block pool as the leader sees it: the content of device blocks, and which are handed out next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import takewhile
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

    def tag(self, block: int) -> Hashable | None:
        """The block's hash; None while it has none."""
        if self.pool is None:
            return None
        found: Hashable | None = self.pool.blocks[block].block_hash
        return found

    def next_out(self, limit: int) -> Sequence[int]:
        """The head of the free queue."""
        if self.pool is None:
            return ()
        queue = self.pool.free_block_queue
        blocks: list[int] = []
        entry = queue.fake_free_list_head.next_free_block
        while entry is not None and entry is not queue.fake_free_list_tail and len(blocks) < limit:
            blocks.append(entry.block_id)
            entry = entry.next_free_block
        return blocks

    def forget_all(self) -> None:
        """Take every block out of the prefix cache, those in use as well."""
        if self.pool is not None:
            self.pool.evict_blocks(set(range(len(self.pool.blocks))))

    def on_device(self, block_hashes: Sequence[Any]) -> int:
        """How many leading blocks of a request are in the prefix cache at this moment; a hint, not a promise."""
        if self.pool is None:
            return 0
        return sum(1 for _ in takewhile(lambda key: self.pool.get_cached_block(key, [0]), block_hashes))

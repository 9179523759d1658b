"""Blocks that a pool finds after a restart."""

from __future__ import annotations

from collections.abc import Iterable

from kvbm.block import BlockKey, SlotIndex
from kvbm.manager.pool import SlotPool
from kvbm.manager.recovery import Recovery
from kvbm.tiers.contract import RecoveredBlock
from kvbm.tiers.recovered import RecoveredBlocks


def found_blocks(blocks: Iterable[tuple[BlockKey, BlockKey | None, int]]) -> RecoveredBlocks:
    """Blocks by key, parent and slot, the oldest first."""
    return RecoveredBlocks.of(
        RecoveredBlock(key=key, parent=parent, slot=SlotIndex(slot), sequence=sequence)
        for sequence, (key, parent, slot) in enumerate(blocks, start=1)
    )


def recover(
    pool: SlotPool[BlockKey], blocks: Iterable[tuple[BlockKey, BlockKey | None, int]], now_s: float
) -> None:
    """Put these blocks into an empty pool."""
    recovery = Recovery(pool, found_blocks(blocks), now_s)
    for step in (recovery.index(), recovery.rank()):
        for _ in step:
            pool.check()

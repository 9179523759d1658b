"""Blocks that a tier found at start enter their pool, in two steps.

First all of them can be found, the newest first: that costs some hundred nanoseconds each. Then the eviction policy
learns of them, the oldest first and parents before their continuations; it takes up to 20 microseconds for each. A
block of which it has not learnt is not evicted, and needs nothing else of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvbm.block import BlockKey
from kvbm.slices import SLICE_BLOCKS

if TYPE_CHECKING:
    from kvbm.manager.pool import SlotPool
    from kvbm.tiers.recovered import RecoveredBlocks

FOUND_TO_RANKED = 8
"""So many times as many blocks as the policy learns of in a slice can be made findable in one."""


class Recovery:
    """Puts `found` into an empty pool. `tail_groups` are the groups whose blocks are tails (see `grouping`).

    Both steps are generators that yield after each slice; `index` comes first. Blocks may be evicted meanwhile.
    """

    def __init__(
        self,
        pool: SlotPool[BlockKey],
        found: RecoveredBlocks,
        now_s: float,
        tail_groups: frozenset[int] = frozenset(),
        blocks_at_once: int = SLICE_BLOCKS,
    ) -> None:
        self._pool, self._found, self._now_s = pool, found, now_s
        self._blocks_at_once = blocks_at_once
        self._tails = (
            np.isin(found.groups, list(tail_groups)) if tail_groups else np.zeros(len(found), np.bool_)
        )
        # The place of the block in each slot, in the order of age.
        self._place_of = np.full(pool.slot_count, -1, np.int32)
        pool.expect_found(found.slots)

    def index(self) -> Iterator[slice]:
        """Make the blocks findable. Yields the places of those that are, after each slice."""
        found, step = self._found, FOUND_TO_RANKED * self._blocks_at_once
        for end in range(len(found), 0, -step):
            part = slice(max(0, end - step), end)
            slots = found.slots[part]
            self._place_of[slots] = np.arange(part.start, end, dtype=np.int32)
            self._pool.add_found(slots, found.keys(part), self._tails[part])
            yield part

    def rank(self) -> Iterator[None]:
        """Have the policy learn of them, run by run: blocks that follow one another in age and in their chain."""
        breaks = ~self._found.follows
        breaks[1:] |= self._tails[1:] != self._tails[:-1]
        breaks[:: self._blocks_at_once] = True
        starts = np.flatnonzero(breaks)
        ends = np.append(starts[1:], len(breaks))
        pending, waiting, done = bytearray(b"\1") * len(starts), list[int](), 0
        first = 0
        while (first := pending.find(1, first)) >= 0:
            run: int | None = first
            while run is not None and pending[run]:
                pending[run] = 0
                waiting.append(run)
                run = self._run_before(int(starts[run]), starts)
                if len(waiting) % self._blocks_at_once == 0:
                    yield
            while waiting:
                run = waiting.pop()
                self._rank_run(int(starts[run]), int(ends[run]))
                done += int(ends[run] - starts[run])
                if done >= self._blocks_at_once:
                    done = 0
                    yield

    def _run_before(self, start: int, starts: np.ndarray) -> int | None:
        """The run with the parent of the block at this place, where the policy has yet to learn of it."""
        parent = self._found.parent(start)
        slot = self._pool.find(parent) if parent is not None else None
        if slot is None or not self._pool.is_unranked(slot):
            return None
        return int(np.searchsorted(starts, self._place_of[slot], "right")) - 1

    def _rank_run(self, start: int, end: int) -> None:
        """The blocks at these places, but for those that have gone since."""
        parent, run = self._found.parent(start), list[int]()
        for slot in self._found.slots[start:end].tolist():
            if self._pool.is_unranked(slot):
                run.append(slot)
            elif run:
                self._rank(run, parent, start)
                run = []
            if not run:
                parent = None  # it has gone
        if run:
            self._rank(run, parent, start)

    def _rank(self, slots: Sequence[int], parent: BlockKey | None, place: int) -> None:
        # The newest blocks count as used last.
        self._pool.rank_found(slots, parent, self._now_s - 1e-6 * (len(self._found) - place))

"""A tier without bytes: which blocks of a trace are resident, decided by the policy that the manager would use."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm.policy import EvictionPolicy

_NOBODY: frozenset[int] = frozenset()


class SimulatedTier:
    """`capacity` slots over blocks numbered below `unique_blocks`, driven as `manager.pool` drives the real ones.

    Filling takes no time and nothing is leased, so a block is evictable once it is inserted.
    """

    def __init__(self, capacity: int, unique_blocks: int, policy: EvictionPolicy) -> None:
        assert capacity > 0
        self.capacity = capacity
        self.policy = policy
        self.inserted_blocks = 0
        self.evicted_blocks = 0
        self._slot_of = [-1] * unique_blocks
        self._block_in = [-1] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    def request(self, blocks: Sequence[int], now_s: float) -> int:
        """A request asks for a chain; how many of its first blocks are resident. What is missing is not inserted."""
        slots = list(map(self._slot_of.__getitem__, blocks))
        self.policy.requested(blocks, slots, now_s)
        return slots.index(-1) if -1 in slots else len(slots)

    def insert(self, blocks: Sequence[int], start: int, now_s: float) -> int:
        """Put `blocks[start:]` in behind their resident prefix, as far as the policy finds them worth it; how many."""
        parent = self._slot_of[blocks[start - 1]] if start else -1
        end, inserted = len(blocks), 0
        while start < end:
            if self._slot_of[blocks[start]] >= 0:  # left behind when the block before it went
                parent = self._slot_of[blocks[start]]
                start += 1
                continue
            stop = start
            while stop < end and self._slot_of[blocks[stop]] < 0:
                stop += 1
            taken = self._insert_run(blocks[start:stop], parent, now_s)
            inserted += taken
            if taken < stop - start:
                break
            start, parent = stop, self._slot_of[blocks[stop - 1]]
        return inserted

    def holds(self, block: int) -> bool:
        """The block is resident."""
        return self._slot_of[block] >= 0

    def resident_count(self) -> int:
        """Blocks in the tier."""
        return self.capacity - len(self._free)

    def _insert_run(self, run: Sequence[int], parent: int, now_s: float) -> int:
        free, slot_of = self._free, self._slot_of
        needed = len(run) - len(free)
        if needed > 0:
            # The parent would be a leaf until the run is in; it must not make room for its own continuation.
            pinned = (parent,) if parent >= 0 else _NOBODY
            victims = self.policy.victims(needed, run, pinned, now_s)
            for slot in victims:
                slot_of[self._block_in[slot]] = -1
            if pinned:
                self.policy.evictable(pinned)
            free += victims[::-1]
            self.evicted_blocks += len(victims)
            run = run[: len(free)]
        if not run:
            return 0
        slots = free[: -len(run) - 1 : -1]
        del free[-len(run) :]
        for block, slot in zip(run, slots, strict=True):
            slot_of[block] = slot
            self._block_in[slot] = block
        self.policy.inserted(run, slots, parent, now_s)
        self.policy.evictable(slots)
        self.inserted_blocks += len(run)
        return len(run)

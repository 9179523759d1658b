"""A tier of one node among many: it costs memory for what is resident, whatever the number of blocks in the world."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvbm.policy import EvictionPolicy

ABSENT = -1

Heard = Callable[[Sequence[int]], None]
"""Is told of blocks."""


def nobody(blocks: Sequence[int]) -> None:
    """Hears, and does nothing."""


class NodeTier:
    """`SimulatedTier` for numbers without a limit: it remembers what is resident and nothing else.

    `stored` and `removed` hear of every block that enters and leaves.
    """

    def __init__(
        self,
        capacity: int,
        policy: EvictionPolicy,
        stored: Heard,
        removed: Heard,
    ) -> None:
        assert capacity > 0
        self.capacity = capacity
        self.policy = policy
        self.slots: dict[int, int] = {}
        self._stored, self._removed = stored, removed
        self._block_in = array("q")
        self._free: list[int] = []

    def request(self, blocks: Sequence[int], now_s: float) -> int:
        """A request asks for a chain; how many of its first blocks are resident."""
        get = self.slots.get
        slots = [get(block, ABSENT) for block in blocks]
        self.policy.requested(blocks, slots, now_s)
        return slots.index(ABSENT) if ABSENT in slots else len(slots)

    def insert(self, blocks: Sequence[int], now_s: float) -> int:
        """Put in what is missing of a chain, as far as the policy finds it worth it; how many blocks."""
        slots = self.slots
        parent = ABSENT
        start, end, inserted = 0, len(blocks), 0
        while start < end:
            slot = slots.get(blocks[start], ABSENT)
            if slot >= 0:
                parent = slot
                start += 1
                continue
            stop = start + 1
            while stop < end and blocks[stop] not in slots:
                stop += 1
            taken = self._insert_run(blocks[start:stop], parent, now_s)
            inserted += taken
            if taken < stop - start:
                break
            start, parent = stop, slots[blocks[stop - 1]]
        return inserted

    def _insert_run(self, run: Sequence[int], parent: int, now_s: float) -> int:
        free, block_in = self._free, self._block_in
        needed = len(run) - len(free) - (self.capacity - len(block_in))
        if needed > 0:
            self._make_room(needed, run, parent, now_s)
            run = run[: len(free) + self.capacity - len(block_in)]
            if not run:
                return 0
        slots = free[: -len(run) - 1 : -1]
        del free[-len(run) :]
        if len(slots) < len(run):
            # Slots are made when they are first needed: most tiers of a large cluster never fill.
            fresh = range(len(block_in), len(block_in) + len(run) - len(slots))
            slots.extend(fresh)
            block_in.extend(fresh)
        for block, slot in zip(run, slots, strict=True):
            self.slots[block] = slot
            block_in[slot] = block
        self.policy.inserted(run, slots, parent, now_s)
        self.policy.evictable(slots)
        self._stored(run)
        return len(run)

    def _make_room(self, needed: int, run: Sequence[int], parent: int, now_s: float) -> None:
        # The parent would be a leaf until the run is in; it must not make room for its own continuation.
        leased = {parent} if parent >= 0 else set()
        victims = self.policy.victims(needed, run, leased, now_s)
        gone = [self._block_in[slot] for slot in victims]
        for block in gone:
            del self.slots[block]
        if leased:
            self.policy.evictable((parent,))
        self._free += victims[::-1]
        self._removed(gone)

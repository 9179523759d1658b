"""A tier without bytes: which blocks of a trace are resident, decided by the policy that the manager would use."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from kvbm.policy import EvictionPolicy

NOBODY = -1
"""In place of a block: it has no parent."""


class SimulatedTier:
    """`capacity` slots over blocks numbered below `unique_blocks`, driven as `manager.pool` drives the real ones.

    Filling takes no time, so a block is evictable once it is inserted, unless it is leased. With `insist` newcomers
    get a place whatever the policy thinks of them: a tier above another is the way into it.
    """

    def __init__(self, capacity: int, unique_blocks: int, policy: EvictionPolicy) -> None:
        assert capacity > 0
        self.capacity = capacity
        self.policy = policy
        self.insist = False
        self.inserted_blocks = 0
        self.evicted_blocks = 0
        self._slot_of = [-1] * unique_blocks
        self._block_in = [-1] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        # Leases by slot; a slot without one is absent.
        self._leases: dict[int, int] = {}

    def request(self, blocks: Sequence[int], now_s: float) -> int:
        """A request asks for a chain; how many of its first blocks are resident. What is missing is not inserted."""
        slots = list(map(self._slot_of.__getitem__, blocks))
        self.policy.requested(blocks, slots, now_s)
        return slots.index(-1) if -1 in slots else len(slots)

    def insert(self, blocks: Sequence[int], start: int, now_s: float) -> int:
        """Put `blocks[start:]` in behind the block before, as far as the policy finds them worth it; how many."""
        slot_of = self._slot_of
        parent = blocks[start - 1] if start else NOBODY
        end, inserted = len(blocks), 0
        while start < end:
            if slot_of[blocks[start]] >= 0:  # left behind when the block before it went
                parent = blocks[start]
                start += 1
                continue
            stop = start + 1
            while stop < end and slot_of[blocks[stop]] < 0:
                stop += 1
            taken = self.insert_run(blocks[start:stop], parent, now_s)
            inserted += taken
            if taken < stop - start:
                break
            start, parent = stop, blocks[stop - 1]
        return inserted

    def insert_run(self, run: Sequence[int], parent: int, now_s: float) -> int:
        """Put consecutive blocks of a chain in, none of which is resident, behind `parent` (a block or NOBODY).

        Answers for how many of them the policy made room.
        """
        free, slot_of, block_in = self._free, self._slot_of, self._block_in
        parent_slot = slot_of[parent] if parent >= 0 else -1
        needed = len(run) - len(free)
        if needed > 0:
            self._make_room(needed, run, parent_slot, now_s)
            run = run[: len(free)]
            if not run:
                return 0
        slots = free[: -len(run) - 1 : -1]
        del free[-len(run) :]
        for block, slot in zip(run, slots, strict=True):
            slot_of[block] = slot
            block_in[slot] = block
        self.policy.inserted(run, slots, parent_slot, now_s)
        self.policy.evictable(slots)
        self.inserted_blocks += len(run)
        return len(run)

    def holds(self, block: int) -> bool:
        """The block is resident."""
        return self._slot_of[block] >= 0

    def resident_count(self) -> int:
        """Blocks in the tier."""
        return self.capacity - len(self._free)

    def slot_of(self, block: int) -> int:
        """Where the block is; -1 when it is not resident."""
        return self._slot_of[block]

    def block_in(self, slot: int) -> int:
        """The block that this slot holds, or held last."""
        return self._block_in[slot]

    @property
    def leased(self) -> Container[int]:
        """The slots that somebody holds."""
        return self._leases

    def lease(self, blocks: Iterable[int]) -> None:
        """Keep resident blocks from being evicted; leases add up."""
        for block in blocks:
            slot = self._slot_of[block]
            assert slot >= 0, "only resident blocks are leased"
            self._leases[slot] = self._leases.get(slot, 0) + 1

    def unlease(self, blocks: Iterable[int]) -> None:
        """Undo one `lease` of each."""
        ended = []
        for block in blocks:
            slot = self._slot_of[block]
            self._leases[slot] -= 1
            if not self._leases[slot]:
                del self._leases[slot]
                ended.append(slot)
        self.policy.evictable(ended)

    def _make_room(self, needed: int, run: Sequence[int], parent_slot: int, now_s: float) -> None:
        # The parent would be a leaf until the run is in; it must not make room for its own continuation.
        pins = parent_slot >= 0 and parent_slot not in self._leases
        if pins:
            self._leases[parent_slot] = 1
        victims = self.policy.victims(needed, () if self.insist else run, self._leases, now_s)
        for block in map(self._block_in.__getitem__, victims):
            self._slot_of[block] = -1
        if pins:
            del self._leases[parent_slot]
            self.policy.evictable((parent_slot,))
        self._free += victims[::-1]
        self.evicted_blocks += len(victims)

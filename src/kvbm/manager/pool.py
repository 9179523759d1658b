"""The slots of one tier: which block is where, in which state, and who may evict it.

At all times `free + filling + resident == total` and every lease is on a resident slot; `check` says so and tests
call it after every step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvbm.block import TRANSITIONS, BlockKey, BlockState, SlotIndex, Tier, Transition
from kvbm.policy import EvictionPolicy


class PoolCounts(msgspec.Struct, frozen=True):
    """Slots per state and the number of leased ones."""

    free: int
    filling: int
    resident: int
    leased: int


class SlotPool:
    """Index and states of one tier's slots. Owned by one thread.

    `on_emptied(slot, key, was_resident)` is called whenever a slot becomes free, before anyone can reserve it
    again: the owner invalidates readers and journals there.
    """

    def __init__(
        self,
        tier: Tier,
        slot_count: int,
        policy: EvictionPolicy,
        on_emptied: Callable[[int, BlockKey, bool], None] = lambda slot, key, was_resident: None,
    ) -> None:
        assert slot_count > 0
        self.tier = tier
        self.slot_count = slot_count
        self.evicted_count = 0
        self._policy = policy
        self._on_emptied = on_emptied
        self._slots: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * slot_count
        self._state = bytearray(slot_count)
        self._leases = array("i", bytes(4 * slot_count))
        self._free = array("i", range(slot_count - 1, -1, -1))
        self._filling_count = 0
        self._leased_count = 0

    # ---- questions

    def find(self, key: BlockKey) -> SlotIndex | None:
        """The slot that holds the block, resident; None otherwise (also while it is being filled)."""
        slot = self._slots.get(key)
        if slot is None or self._state[slot] != BlockState.RESIDENT:
            return None
        return SlotIndex(slot)

    def find_filling(self, key: BlockKey) -> SlotIndex | None:
        """The slot that is being filled with the block, if any."""
        slot = self._slots.get(key)
        if slot is None or self._state[slot] != BlockState.FILLING:
            return None
        return SlotIndex(slot)

    def holds(self, key: BlockKey) -> bool:
        """True when the block is resident or being filled."""
        return key in self._slots

    def key_of(self, slot: int) -> BlockKey:
        """The key of a slot that is not free."""
        key = self._keys[slot]
        assert key is not None, f"slot {slot} is free"
        return key

    def state_of(self, slot: int) -> BlockState:
        return BlockState(self._state[slot])

    def is_leased(self, slot: int) -> bool:
        return self._leases[slot] > 0

    def counts(self) -> PoolCounts:
        free = len(self._free)
        return PoolCounts(
            free=free,
            filling=self._filling_count,
            resident=self.slot_count - free - self._filling_count,
            leased=self._leased_count,
        )

    def resident(self) -> Iterator[tuple[SlotIndex, BlockKey]]:
        """Every resident slot with its key."""
        for slot, state in enumerate(self._state):
            if state == BlockState.RESIDENT:
                yield SlotIndex(slot), self.key_of(slot)

    # ---- moves

    def reserve(self, key: BlockKey, parent: BlockKey | None, now_s: float) -> SlotIndex | None:
        """A slot to fill with `key`, evicting where needed; None when every block is leased or being filled.

        The block must not be held already. Until `commit` nobody finds it.
        """
        assert key not in self._slots, "block is held already"
        # The parent is pinned while we look for room: evicting it would orphan the block that we make room for.
        parent_slot = self._slots.get(parent, -1) if parent else -1
        if not self._free and not self._make_room(parent_slot):
            return None
        slot = self._free.pop()
        self._move(slot, Transition.RESERVE)
        self._keys[slot] = key
        self._slots[key] = slot
        self._filling_count += 1
        self._policy.inserted(slot, parent_slot, now_s)
        return SlotIndex(slot)

    def recover(self, found: Sequence[tuple[BlockKey, BlockKey | None, int]], now_s: float) -> None:
        """Fill an empty pool with blocks found after a restart: (key, parent, slot), oldest first, keys distinct."""
        assert len(self._free) == self.slot_count, "only an empty pool recovers"
        recency_s = {key: now_s - 1e-6 * (len(found) - i) for i, (key, _, _) in enumerate(found)}
        for key, parent, slot in _parents_first(found):
            self._move(slot, Transition.RESERVE)
            self._keys[slot] = key
            self._slots[key] = slot
            self._policy.inserted(slot, self._slots.get(parent, -1) if parent else -1, recency_s[key])
            self._filling_count += 1
            self.commit(slot)
        self._free = array("i", (s for s in range(self.slot_count - 1, -1, -1) if not self._state[s]))

    def commit(self, slot: int) -> None:
        """The slot's bytes are complete: the block can be found from now on."""
        self._move(slot, Transition.COMMIT)
        self._filling_count -= 1
        self._policy.unleased(slot)

    def abort(self, slot: int) -> None:
        """The slot's bytes never became complete: it is free again."""
        self._move(slot, Transition.ABORT)
        self._filling_count -= 1
        self._empty(slot, was_resident=False)

    def evict(self, slot: int) -> None:
        """Drop a resident block that nobody leases."""
        assert self._leases[slot] == 0, "a leased slot is never evicted"
        self._move(slot, Transition.EVICT)
        self._empty(slot, was_resident=True)

    def lease(self, slot: int) -> None:
        """Pin a resident slot; pins add up."""
        assert self._state[slot] == BlockState.RESIDENT, "only resident slots are leased"
        self._leases[slot] += 1
        if self._leases[slot] == 1:
            self._leased_count += 1
            self._policy.leased(slot)

    def unlease(self, slot: int) -> None:
        """Undo one `lease`."""
        assert self._leases[slot] > 0
        self._leases[slot] -= 1
        if self._leases[slot] == 0:
            self._leased_count -= 1
            self._policy.unleased(slot)

    def accessed(self, slots: list[int], now_s: float) -> None:
        """A request used these blocks."""
        self._policy.accessed(slots, now_s)

    def clear(self) -> tuple[int, int]:
        """Evict every block that is not in use; (dropped, in use)."""
        dropped = 0
        for slot, _ in list(self.resident()):
            if not self._leases[slot]:
                self.evict(slot)
                dropped += 1
        return dropped, self.slot_count - len(self._free)

    # ---- law

    def check(self) -> None:
        """Assert the conservation law and that the index agrees with the slots."""
        states = [self._state.count(state) for state in BlockState]
        assert sum(states) == self.slot_count
        assert states[BlockState.FREE] == len(self._free) == len(set(self._free))
        assert states[BlockState.FILLING] == self._filling_count
        assert len(self._slots) == self.slot_count - len(self._free)
        for key, slot in self._slots.items():
            assert self._keys[slot] == key and self._state[slot] != BlockState.FREE
        leased = [slot for slot, count in enumerate(self._leases) if count]
        assert all(self._state[slot] == BlockState.RESIDENT for slot in leased)
        assert len(leased) == self._leased_count and min(self._leases) >= 0

    def _make_room(self, parent_slot: int) -> bool:
        pinned = parent_slot >= 0 and self._state[parent_slot] == BlockState.RESIDENT
        if pinned:
            self.lease(parent_slot)
        victim = self._policy.victim()
        if victim >= 0:
            self.evict(victim)
            self.evicted_count += 1
        if pinned:
            self.unlease(parent_slot)
        return victim >= 0

    def _move(self, slot: int, transition: Transition) -> None:
        before, after = TRANSITIONS[transition]
        assert self._state[slot] == before, (
            f"slot {slot} cannot {transition.value}: {self.state_of(slot).name}"
        )
        self._state[slot] = after

    def _empty(self, slot: int, was_resident: bool) -> None:
        key = self.key_of(slot)
        del self._slots[key]
        self._keys[slot] = None
        self._policy.removed(slot)
        self._free.append(slot)
        self._on_emptied(slot, key, was_resident)


def _parents_first(
    found: Sequence[tuple[BlockKey, BlockKey | None, int]],
) -> Iterator[tuple[BlockKey, BlockKey | None, int]]:
    """The same blocks, each after its parent where the parent is among them."""
    by_key = {entry[0]: entry for entry in found}
    waiting: list[tuple[BlockKey, BlockKey | None, int]] = []
    for entry in found:
        current: tuple[BlockKey, BlockKey | None, int] | None = by_key.pop(entry[0], None)
        while current is not None:
            waiting.append(current)
            current = by_key.pop(current[1], None) if current[1] else None
        while waiting:
            yield waiting.pop()

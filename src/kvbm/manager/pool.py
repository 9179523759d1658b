"""The slots of one tier: the block in each, its state and its leases.

At all times `free + filling + resident == total` and every lease is on a resident slot; `check` says so and tests
call it after every step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, cast

import msgspec

from kvbm.block import NO_SLOT, BlockState, SlotIndex, Tier, Transition
from kvbm.manager.block_index import BlockIndex
from kvbm.manager.favouring import Favouring
from kvbm.manager.key_table import KeyT
from kvbm.policy import EvictionPolicy
from kvbm.policy.contract import ClientWord, insert_tail, request_tail, tell_hint
from kvbm.slices import SLICE_BLOCKS, at_once, sliced

if TYPE_CHECKING:
    import numpy as np

    from kvbm.manager.slot_table import SlotTable
    from kvbm.policy.shares import Slots

OFFERED_AT_ONCE = 4096
"""Slots of which a policy learns in one slice that their leases have ended."""
CAPACITY, RESET, CORRUPT, MISSING, TIER_OFF = "capacity", "reset", "corrupt", "missing", "tier_off"
ABORTED = "aborted"
EXPIRED = "expired"
"""Why a block was dropped: the policy chose it to make room; somebody dropped the whole tier; its checksum did not
match; the medium had another block in its place, or none; the tier was off, and came back without it; its client wanted
it kept for no longer. `ABORTED`: it was being filled, and its bytes never became complete."""


class PoolCounts(msgspec.Struct, frozen=True):
    """Slots per state and the number of leased ones."""

    free: int
    filling: int
    resident: int
    leased: int


class SlotPool(BlockIndex[KeyT]):
    """Index and states of one tier's slots. Owned by one thread.

    `on_emptied(slots, keys, reason)` is called whenever slots become free, before anyone can reserve them again: the
    owner invalidates readers and journals there. `reason` is one of those above, or `ABORTED`. `chained`: a block is of
    use only while its parent is here too, so parents go last; without it each block stands alone.
    `salt_share` is the part of an equal share of the slots that each tenant is sure of (see `favouring`).
    """

    def __init__(
        self,
        tier: Tier,
        slot_count: int,
        policy: EvictionPolicy,
        on_emptied: Callable[[Sequence[int], Sequence[KeyT], str], None] | None = None,
        chained: bool = True,
        salt_share: float = 0.0,
    ) -> None:
        from kvbm.manager.slot_table import SlotTable  # needs numpy

        assert slot_count > 0
        self._table: SlotTable = SlotTable(slot_count)
        super().__init__(slot_count, self._table.state)
        self.tier = tier
        self.slot_count = slot_count
        self.evicted: Counter[str] = Counter()
        """Blocks that were dropped, by reason, since whoever counts them cleared it."""
        self.policy = policy
        self.favouring = Favouring(self, salt_share)
        self._on_emptied = on_emptied
        self.on_committed: Callable[[Sequence[int]], None] | None = None
        self._chained = chained
        self._free = self._table.free_slots()
        self.offered_at_once = OFFERED_AT_ONCE
        # Slots whose last lease has ended, and that the policy was not told of yet.
        self._ended: deque[Sequence[int]] = deque()
        self.unindexed_count = 0
        """Blocks found after a restart that cannot be found here yet. While there are some, nothing can be stored."""
        self.tails = bytearray(slot_count)  # whether a slot's block is one of a tail; others only read

    # ---- questions

    def is_tail(self, slot: int) -> bool:
        """Whether the block in a slot that is not free came as one of a tail (see `reserve_chain`)."""
        return bool(self.tails[slot])

    def state_of(self, slot: int) -> BlockState:
        """The slot's state."""
        return BlockState(self._state[slot])

    def is_leased(self, slot: int) -> bool:
        """Whether the slot is leased."""
        return slot in self._table

    @property
    def leased(self) -> Container[int]:
        """The leased slots, as policies take them."""
        return self._table

    def slots_in(self, state: BlockState) -> list[int]:
        """All slots in this state."""
        slots: list[int] = self._table.slots_in(state).tolist()
        return slots

    def used_slots(self) -> Slots:
        """All slots whose blocks the policy knows, those of cleared blocks too."""
        return self._table.used()

    @property
    def evicted_count(self) -> int:
        """`evicted` for all reasons."""
        return self.evicted.total()

    @property
    def free_count(self) -> int:
        """Slots that hold nothing."""
        return len(self._free) + self.cleared_count

    def counts(self) -> PoolCounts:
        """How many slots are in each state."""
        return PoolCounts(
            free=self.free_count,
            filling=self._table.count(BlockState.FILLING),
            resident=self._table.count(BlockState.RESIDENT) + self.unindexed_count,
            leased=self._table.leased_count(),
        )

    def all_in_use(self) -> bool:
        """Whether every slot is leased or being filled, so that no policy could make room. Looks at all slots."""
        idle = self.free_count or self.unindexed_count
        return not idle and self._table.count(BlockState.RESIDENT) == self._table.leased_count()

    # ---- moves

    def reserve(self, key: KeyT, parent: KeyT | None, now_s: float, insist: bool = False) -> SlotIndex | None:
        """A slot to fill with `key`, evicting where needed; None when every block is leased or being filled, or worth
        more than this one (unless the caller insists).

        The block must not be held already. It cannot be found until `commit`.
        """
        slots = self.reserve_chain((key,), parent, now_s, insist)
        return slots[0] if slots else None

    def reserve_chain(
        self,
        keys: Sequence[KeyT],
        parent: KeyT | None,
        now_s: float,
        insist: bool = False,
        tail: bool = False,
        tenant: str | None = None,
    ) -> list[SlotIndex]:
        """Slots to fill with the blocks of a chain, as `reserve` gives one; with little room, for the first of them.

        `tail`: they are what other groups need behind `parent` (see `grouping`). `tenant` is whose they are, where that
        is known.
        """
        if self.unindexed_count:
            return []
        assert not self.holds_any(keys), "block is held already"
        if self.cleared_count:
            self._tidy_for(keys)
        parent_slot = self._slot_of(parent)
        self.favouring.stores(tenant, parent_slot)
        needed = len(keys) - len(self._free)
        if needed > 0:
            self._make_room(needed, () if insist else keys, parent_slot, now_s)
            keys = keys[: len(self._free)]
        first = len(self._free) - len(keys)
        slots = sorted(self._free[first:])  # in order: a chain shall lie in as few runs as can be
        del self._free[first:]
        self._fill(slots, keys, parent_slot, now_s, tail)
        return list(cast(Sequence[SlotIndex], slots))

    def expect_found(self, slots: np.ndarray) -> None:
        """These slots of an empty pool hold blocks that were found after a restart: `add_found` brings them."""
        assert len(self._free) == self.slot_count, "only an empty pool recovers"
        self._free, self.unindexed_count = self._table.free_slots(slots), len(slots)
        self.favouring.recovers(bool(len(slots)))

    def add_found(self, slots: np.ndarray, keys: Sequence[KeyT], tails: np.ndarray) -> None:
        """These blocks can be found from now on; the policy learns of them by `rank_found`."""
        for transition in (Transition.RESERVE, Transition.COMMIT):
            self._table.move(slots, transition)
        self._table.mark_unranked(slots)
        self.unindexed_count -= len(slots)
        places: list[int] = slots.tolist()
        self._slots.put_each(keys, places)
        for slot, key, tail in zip(places, keys, tails.tolist(), strict=True):
            self._keys[slot], self.tails[slot] = key, tail
        if self.on_committed is not None:
            self.on_committed(places)

    def is_unranked(self, slot: int) -> bool:
        """Whether the slot holds a block that was found, and of which the policy has yet to learn."""
        return self._table.is_unranked(slot) and self._state[slot] == BlockState.RESIDENT

    def rank_found(self, slots: Sequence[int], parent: KeyT | None, now_s: float) -> None:
        """Tell the policy of a stretch of a chain behind `parent`, all of it tails or none; each is unranked."""
        parent_slot = self._slot_of(parent)
        self.favouring.stores(None, NO_SLOT)
        self._insert(slots, self._keys_of(slots), parent_slot, now_s, self.is_tail(slots[0]))
        self._table.unmark_unranked(slots)
        self.policy.evictable(slots)

    def commit(self, slot: int) -> None:
        """The slot's bytes are complete: the block can be found from now on."""
        self.commit_all((slot,))

    def commit_all(self, slots: Sequence[int]) -> None:
        """`commit` for many slots at once."""
        self._table.move(slots, Transition.COMMIT)
        self.policy.evictable(slots)
        if self.on_committed is not None:
            self.on_committed(slots)

    def abort(self, slot: int) -> None:
        """The slot's bytes never became complete: it is free again."""
        self.abort_all((slot,))

    def abort_all(self, slots: Sequence[int]) -> None:
        """`abort` for many slots at once; of a chain the last block first."""
        self.policy.removed(slots)
        self._empty(slots, Transition.ABORT, ABORTED)

    def evict(self, slot: int, reason: str = CAPACITY) -> None:
        """Drop a resident block without leases."""
        self.policy.removed(self._table.ranked((slot,)))
        self.evicted[reason] += 1
        self._empty((slot,), Transition.EVICT, reason)

    def lease(self, slot: int) -> None:
        """Lease a resident slot; leases add up."""
        self._table.lease((slot,))

    def lease_all(self, slots: Sequence[int]) -> None:
        """`lease` for many slots at once."""
        self._table.lease(slots)

    def unlease(self, slot: int) -> None:
        """Undo one `lease`."""
        self.unlease_all((slot,))

    def unlease_all(self, slots: Sequence[int]) -> None:
        """`unlease` for many slots at once. Of very many the policy learns in slices (`offer_ended`)."""
        self._table.unlease(slots)
        if len(slots) > self.offered_at_once:
            self._ended.append(slots[self.offered_at_once :])
            slots = slots[: self.offered_at_once]
        self.policy.evictable(self._table.idle(slots))

    def offer_ended(self) -> bool:
        """Tell the policy of some of the slots whose last lease has ended. False: it knows of all."""
        if not self._ended:
            return False
        slots = self._ended.popleft()
        if len(slots) > self.offered_at_once:
            self._ended.appendleft(slots[self.offered_at_once :])
        self.policy.evictable(self._table.idle(slots[: self.offered_at_once]))
        return True

    @property
    def has_ended(self) -> bool:
        """Something is left for `offer_ended`."""
        return bool(self._ended)

    def requested(
        self,
        keys: list[KeyT],
        now_s: float,
        word: ClientWord | None = None,
        tenant: str | None = None,
        brought: Set[KeyT] = frozenset(),
        slots: list[int] | None = None,
    ) -> int:
        """A request of the tenant, if that is known, came for this chain, of which its client says this; how many of
        its first blocks are resident, without those that were `brought` here for it. `slots` are those of `finding`."""
        if slots is None:
            slots = at_once(self.finding(keys, brought))
        self.favouring.asks(tenant, now_s)
        self.policy.requested(keys, self._table.known(slots), now_s)
        if word is not None and keys:
            tell_hint(self.policy, keys[-1], word, now_s)
        return slots.index(NO_SLOT) if NO_SLOT in slots else len(slots)

    def requested_tail(self, keys: list[KeyT], now_s: float, brought: Set[KeyT] = frozenset()) -> None:
        """The same request wants these blocks of other groups too, of which these were `brought` here for it."""
        request_tail(self.policy, keys, self._table.known(self._found_before(keys, brought)), now_s)

    def slots_of(self, keys: Iterable[KeyT]) -> list[int]:
        """The slot that holds each of the blocks, resident or being filled; NO_SLOT for one that is not held, or that
        the policy does not know yet."""
        slots = [NO_SLOT if slot is None else slot for slot in self._slots.find_each(keys)]
        if self.cleared_count:
            slots = [
                slot if slot >= 0 and self._state[slot] != BlockState.FREE else NO_SLOT for slot in slots
            ]
        return self._table.known(slots)

    def finished(self, key: KeyT, output_tokens: int, now_s: float) -> None:
        """The request whose chain ended with this key when it came has generated that many tokens, and no more."""
        self.policy.finished(key, output_tokens, now_s)

    def clear(self) -> tuple[int, int]:
        """Evict every block that is not in use; (dropped, in use). They cannot be found from now on, and their slots
        count as free; `tidying` forgets them."""
        assert not self.unindexed_count, "blocks that are not indexed yet cannot be cleared"
        dropped = self._table.clear_idle()
        self.cleared_count += dropped
        self.evicted[RESET] += dropped
        return dropped, self.slot_count - self.free_count

    def tidying(self, blocks_at_once: int = SLICE_BLOCKS) -> Iterator[None]:
        """Forget the blocks that were cleared, and end what is retained of them, in slices of so many blocks."""
        retained = self.favouring.retained_entries()
        while self.cleared_count:
            self._forget_cleared(self._table.last_cleared(blocks_at_once))
            yield
        for some in sliced(retained, blocks_at_once):
            self.favouring.end_absent(some)
            yield

    # ---- law

    def check(self) -> None:
        """Assert the conservation law and that the index agrees with the slots."""
        states = [self._state.count(state) for state in BlockState]
        assert sum(states) == self.slot_count
        assert states[BlockState.FREE] == self.free_count + self.unindexed_count
        assert len(self._free) == len(set(self._free))
        assert (
            states[BlockState.FILLING] + states[BlockState.RESIDENT] == len(self._slots) - self.cleared_count
        )
        for key, slot in self._slots.items():
            assert self._keys[slot] == key
            assert (self._state[slot] == BlockState.FREE) == self._table.is_cleared(slot)
        assert all(self._keys[slot] is None for slot in self._free)
        self.favouring.check(len(self._slots) - self._table.unranked_count)
        self._table.check()

    def _slot_of(self, key: KeyT | None) -> int:
        """The slot of a parent that is held in any state; NO_SLOT when there is none, or it does not matter."""
        if key is None or not self._chained:
            return NO_SLOT
        return self.slots_of((key,))[0]

    def _tidy_for(self, keys: Sequence[KeyT]) -> None:
        """Forget those of these blocks that were cleared, as they come again, and as many more as give them slots."""
        again = [slot for slot in self._slots.find_each(keys) if slot is not None]
        self._forget_cleared(again[::-1])
        self._forget_cleared(self._table.last_cleared(max(0, len(keys) - len(self._free))))

    def _forget_cleared(self, slots: Sequence[int]) -> None:
        self.policy.removed(self._table.ranked(slots))
        self._table.unmark(slots)
        self.cleared_count -= len(slots)
        self._forget(slots, RESET)

    def _make_room(self, needed: int, keys: Sequence[KeyT], parent_slot: int, now_s: float) -> None:
        # Evicting the parent would orphan the very blocks that we make room for.
        pinned = (
            (parent_slot,) if parent_slot >= 0 and self._state[parent_slot] == BlockState.RESIDENT else ()
        )
        self.lease_all(pinned)
        while needed > 0:
            victims = self.policy.victims(needed, keys, self._table, now_s)
            self._empty(victims, Transition.EVICT, CAPACITY)
            self.evicted[CAPACITY] += len(victims)
            needed -= len(victims)
            if not self.offer_ended():  # else it may not know of more that could go
                break
        self.unlease_all(pinned)

    def _fill(
        self, slots: Sequence[int], keys: Sequence[KeyT], parent_slot: int, now_s: float, tail: bool = False
    ) -> None:
        self._table.move(slots, Transition.RESERVE)
        self._slots.put_each(keys, slots)
        for slot, key in zip(slots, keys, strict=True):
            self._keys[slot], self.tails[slot] = key, tail
        self._insert(slots, keys, parent_slot, now_s, tail)

    def _insert(
        self, slots: Sequence[int], keys: Sequence[KeyT], parent_slot: int, now_s: float, tail: bool
    ) -> None:
        """Tell the policy of blocks of a chain."""
        if self._chained:
            if tail:
                insert_tail(self.policy, keys, slots, parent_slot, now_s)
            else:
                self.policy.inserted(keys, slots, parent_slot, now_s)
        else:
            for slot, key in zip(slots, keys, strict=True):
                self.policy.inserted((key,), (slot,), NO_SLOT, now_s)

    def _empty(self, slots: Sequence[int], transition: Transition, reason: str) -> None:
        """Evict or abort the blocks in these slots: forget them and report that to the owner."""
        leased = transition is Transition.EVICT and not self._table.isdisjoint(slots)
        assert not leased, "a leased slot is never evicted"
        self._table.move(slots, transition)
        self._forget(slots, reason)

    def _forget(self, slots: Sequence[int], reason: str) -> None:
        keys = self._keys_of(slots)
        self._table.unmark_unranked(slots)
        self._slots.remove_each(keys)
        for slot in slots:
            self._keys[slot] = None
        self._free.extend(slots)
        if self._gone is not None:
            self._gone.update(slots)
        if self._on_emptied is not None and slots:
            self._on_emptied(slots, keys, reason)

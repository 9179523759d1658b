"""One tier's slots: states, leases, room, and what a restart brings."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvbm.block import TRANSITIONS, BlockKey, BlockState, Tier, Transition
from kvbm.hashing import chain_keys
from kvbm.manager.pool import ABORTED, CAPACITY, RESET, PoolCounts, SlotPool
from kvbm.manager.recovery import FOUND_TO_RANKED, Recovery
from kvbm.policy import LeafFirstLru
from kvbm.slices import at_once
from rigs.found_blocks import found_blocks, recover

KEYS = chain_keys(bytes(32), range(200), 2)
OTHER = chain_keys(bytes(32), range(1000, 1200), 2)
Emptied = list[tuple[int, BlockKey, str]]


def make(slots: int) -> tuple[SlotPool, Emptied]:
    emptied: Emptied = []
    pool = SlotPool(
        Tier.HOST,
        slots,
        LeafFirstLru(slots),
        lambda slots, keys, reason: emptied.extend(zip(slots, keys, [reason] * len(slots), strict=True)),
    )
    return pool, emptied


def put(pool: SlotPool, key: BlockKey, parent: BlockKey | None = None, now_s: float = 0.0) -> int:
    slot = pool.reserve(key, parent, now_s)
    assert slot is not None
    pool.commit(slot)
    pool.check()
    return slot


def test_every_transition_is_in_the_table_and_no_other() -> None:
    states = {state: set() for state in BlockState}  # type: ignore[var-annotated]
    for before, after in TRANSITIONS.values():
        states[before].add(after)
    assert states == {
        BlockState.FREE: {BlockState.FILLING},
        BlockState.FILLING: {BlockState.RESIDENT, BlockState.FREE},
        BlockState.RESIDENT: {BlockState.FREE},
    }
    assert set(TRANSITIONS) == set(Transition)


def test_a_block_is_found_only_after_its_commit() -> None:
    pool, emptied = make(2)
    slot = pool.reserve(KEYS[0], None, 0.0)
    assert slot is not None
    assert (pool.find(KEYS[0]), pool.find_filling(KEYS[0]), pool.holds(KEYS[0])) == (None, slot, True)
    pool.commit(slot)
    assert (pool.find(KEYS[0]), pool.find_filling(KEYS[0]), pool.holds(KEYS[0])) == (slot, None, True)
    pool.evict(slot)
    assert not pool.holds(KEYS[0])
    assert emptied == [(slot, KEYS[0], CAPACITY)]
    again = pool.reserve(KEYS[1], None, 1.0)
    assert again is not None
    pool.abort(again)
    assert emptied[-1] == (again, KEYS[1], ABORTED)
    pool.check()


@pytest.mark.parametrize("move", ["commit", "abort", "evict", "lease", "unlease"])
def test_a_move_from_the_wrong_state_is_a_programmers_error(move: str) -> None:
    pool, _ = make(2)
    with pytest.raises((AssertionError, KeyError)):
        getattr(pool, move)(0)
    pool.check()
    slot = put(pool, KEYS[0])
    if move in ("commit", "abort"):
        with pytest.raises(AssertionError):
            getattr(pool, move)(slot)


def test_a_leased_slot_is_not_evicted() -> None:
    pool, _ = make(1)
    slot = put(pool, KEYS[0])
    pool.lease(slot)
    pool.lease(slot)
    assert pool.reserve(KEYS[1], None, 1.0) is None
    with pytest.raises(AssertionError):
        pool.evict(slot)
    pool.unlease(slot)
    assert pool.reserve(KEYS[1], None, 1.0) is None
    assert pool.counts().leased == 1
    pool.unlease(slot)
    assert pool.reserve(KEYS[1], None, 1.0) == slot


def test_a_parent_that_is_being_filled_is_no_victim() -> None:
    pool, _ = make(2)
    first = pool.reserve(KEYS[0], None, 0.0)
    second = pool.reserve(KEYS[1], KEYS[0], 0.0)
    assert None not in (first, second)
    assert pool.reserve(KEYS[2], KEYS[1], 0.0) is None


def test_making_room_takes_leaves_of_others_before_ones_own_prefix() -> None:
    pool, _ = make(3)
    put(pool, KEYS[0], None, 1.0)
    put(pool, KEYS[1], KEYS[0], 2.0)
    put(pool, KEYS[10], None, 3.0)
    put(pool, KEYS[2], KEYS[1], 4.0)
    assert [pool.find(key) is not None for key in (KEYS[0], KEYS[1], KEYS[2], KEYS[10])] == [True] * 3 + [
        False
    ]


def test_a_pool_recovers_what_it_is_told_in_order_of_age() -> None:
    found = [
        (KEYS[2], KEYS[1], 5),
        (KEYS[0], None, 3),
        (KEYS[1], KEYS[0], 4),
        (KEYS[20], None, 0),
    ]
    for seed in range(6):
        random.Random(seed).shuffle(found)
        pool, _ = make(6)
        recover(pool, found, 100.0)
        pool.check()
        assert pool.counts().resident == 4
        for key, _, place in found:
            assert pool.find(key) == place
        free = {pool.reserve(BlockKey(bytes([i]) * 32), None, 101.0) for i in (1, 2)}
        assert free == {1, 2}
        victims = []
        for i in range(3, 7):
            slot = pool.reserve(BlockKey(bytes([i]) * 32), None, 102.0)
            victims.append(slot)
        leaf_order = [victims.index(slot) for slot in (5, 4, 3)]
        assert leaf_order == sorted(leaf_order), "continuations go before their prefix"


def test_recovered_parents_may_be_missing_or_circular() -> None:
    pool, _ = make(3)
    recover(pool, ((KEYS[0], KEYS[1], 0), (KEYS[1], KEYS[0], 1), (KEYS[2], KEYS[99], 2)), 0.0)
    pool.check()
    for key in (KEYS[50], KEYS[51], KEYS[52]):
        assert pool.reserve(key, None, 1.0) is not None, "a block can never go"


CHAIN = [(KEYS[i], KEYS[i - 1] if i else None, i) for i in range(2 * FOUND_TO_RANKED)]


def half_ranked() -> tuple[SlotPool, Emptied, Iterator[None]]:
    """A pool of two slots more than `CHAIN`, whose blocks are found, the policy knowing the first half of them; and the
    steps by which it learns of the others."""
    pool, emptied = make(len(CHAIN) + 2)
    recovery = Recovery(pool, found_blocks(CHAIN), 100.0, blocks_at_once=FOUND_TO_RANKED // 2)
    at_once(recovery.index())
    ranking = recovery.rank()
    next(ranking)
    next(ranking)
    assert [pool.is_unranked(slot) for slot in range(len(CHAIN))] == [False] * 8 + [True] * 8
    pool.check()
    return pool, emptied, ranking


def test_found_blocks_can_be_found_some_at_a_time_the_newest_first() -> None:
    pool, _ = make(len(CHAIN) + 2)
    indexing = Recovery(pool, found_blocks(CHAIN), 100.0, blocks_at_once=1).index()
    for known in (FOUND_TO_RANKED, 2 * FOUND_TO_RANKED):
        next(indexing)
        pool.check()
        found = [pool.find(key) for key, _, _ in CHAIN]
        assert found == [None] * (len(CHAIN) - known) + [*range(len(CHAIN) - known, len(CHAIN))]
        assert pool.counts() == PoolCounts(free=2, filling=0, resident=len(CHAIN), leased=0)
        assert not pool.all_in_use()
        if known < len(CHAIN):
            assert pool.reserve_chain(KEYS[:1], None, 101.0) == [], "the block may lie in another slot"
    assert next(indexing, None) is None
    assert pool.held(KEYS[:17]) == b"\1" * 16 + b"\0", "blocks that are there are not stored again"


def test_blocks_that_the_policy_does_not_know_yet_are_used_and_not_evicted() -> None:
    pool, emptied, ranking = half_ranked()
    pool.requested(KEYS[:16], 101.0)
    pool.lease_all(range(16))
    pool.unlease_all(range(16))
    pool.check()
    new = pool.reserve_chain(OTHER[:6], None, 102.0)
    assert sorted(new) == [4, 5, 6, 7, 16, 17], "of the half that the policy knows the end goes"
    assert {slot for slot, _, _ in emptied} == {4, 5, 6, 7}
    pool.commit_all(new)
    at_once(ranking)
    pool.check()
    assert pool.find_all(KEYS[8:16]) == list(range(8, 16))
    pool.lease_all(new)
    assert sorted(pool.reserve_chain(OTHER[20:32], None, 103.0)) == [*range(4), *range(8, 16)]


@pytest.mark.parametrize("cleared", [False, True])
def test_blocks_that_go_before_the_policy_knows_them_stay_away(cleared: bool) -> None:
    pool, emptied, ranking = half_ranked()
    if cleared:
        assert pool.clear() == (16, 0)
        next(ranking, None)
        at_once(pool.tidying())
    else:
        pool.evict(12, RESET)
    again = pool.reserve_chain([KEYS[12]], None, 101.0)
    pool.commit_all(again)
    pool.check()
    at_once(ranking)
    pool.check()
    assert [key for _, key, _ in emptied].count(KEYS[12]) == 1
    assert pool.find(KEYS[12]) == again[0]
    assert pool.counts().resident == (1 if cleared else 16)
    for i in range(18):
        assert pool.reserve(OTHER[i], None, 102.0) is not None, "a block can never go"


def test_a_pool_in_use_does_not_recover() -> None:
    pool, _ = make(2)
    put(pool, KEYS[0])
    with pytest.raises(AssertionError):
        recover(pool, [(KEYS[1], None, 0)], 0.0)


def test_clearing_counts_what_went_and_what_stays() -> None:
    pool, emptied = make(6)
    for i in range(4):
        put(pool, KEYS[i], KEYS[i - 1] if i else None)
    pool.lease(pool.find(KEYS[3]))  # type: ignore[arg-type]
    assert pool.reserve(KEYS[4], KEYS[3], 1.0) is not None
    assert pool.clear() == (3, 2)
    at_once(pool.tidying())
    assert {key for _, key, _ in emptied} == set(KEYS[:3])
    pool.check()


def test_what_is_cleared_cannot_be_found_and_is_forgotten_some_at_a_time() -> None:
    pool, emptied = make(12)
    for i in range(8):
        put(pool, KEYS[i], KEYS[i - 1] if i else None)
    pool.lease(pool.find(KEYS[0]))  # type: ignore[arg-type]
    assert pool.clear() == (7, 1)
    assert emptied == [], "that takes as long as there are blocks"
    assert [pool.find(key) is not None for key in KEYS[:8]] == [True, *[False] * 7]
    assert pool.find_all(KEYS[:8])[1:] == [None] * 7
    assert pool.held(KEYS[:8]) == b"\1" + bytes(7)
    assert (pool.holds(KEYS[1]), pool.holds_any(KEYS[1:8])) == (False, False)
    assert pool.counts() == PoolCounts(free=11, filling=0, resident=1, leased=1)
    pool.check()
    counts = []
    for _ in pool.tidying(3):
        counts.append(len(emptied))
        pool.check()
    assert counts == [3, 6, 7]
    assert {key for _, key, _ in emptied} == set(KEYS[1:8])
    assert {reason for _, _, reason in emptied} == {RESET}
    assert pool.evicted[RESET] == 7


def test_blocks_that_come_again_and_blocks_without_room_take_the_slots_of_what_was_cleared() -> None:
    pool, emptied = make(6)
    for i in range(6):
        put(pool, KEYS[i], KEYS[i - 1] if i else None)
    pool.clear()
    again = pool.reserve_chain(KEYS[:2], None, 1.0)
    assert len(again) == 2
    assert {key for _, key, _ in emptied} == set(KEYS[:2]), "each has one place in the index"
    assert len(pool.reserve_chain(OTHER[:4], None, 2.0)) == 4
    assert pool.evicted_count == 6, "nothing else had to go"
    assert pool.cleared_count == 0
    pool.check()


def test_clearing_a_long_chain_looks_at_each_block_a_few_times() -> None:
    """Not at every slot for every block, which for a large pool takes hours and stops the manager."""
    slots = 2000
    pool, _ = make(slots)
    keys = chain_keys(bytes(32), range(slots), 1)
    for i, key in enumerate(keys):
        slot = pool.reserve(key, keys[i - 1] if i else None, float(i))
        assert slot is not None
        pool.commit(slot)
    policy = pool.policy
    looked = 0

    class Counted:
        """An array that counts how often it is read."""

        def __init__(self, inner: object) -> None:
            self.inner = inner

        def __getitem__(self, index: int) -> int:
            nonlocal looked
            looked += 1
            return self.inner[index]  # type: ignore[index, no-any-return]

        def __setitem__(self, index: int, value: int) -> None:
            self.inner[index] = value  # type: ignore[index]

        def __len__(self) -> int:
            return slots

    chains = policy.tree  # type: ignore[attr-defined]
    chains.parent = Counted(chains.parent)
    assert pool.clear() == (slots, 0)
    at_once(pool.tidying())
    assert looked <= 4 * slots


@pytest.mark.parametrize("seed", range(8))
def test_many_keys_are_found_as_each_is_found_alone(seed: int) -> None:
    choice = random.Random(seed)
    pool, _ = make(512)
    chains = [chain_keys(bytes([seed]) * 32, range(1000 * i, 1000 * i + 2 * 80), 2) for i in range(7)]

    def fill(chain: list[BlockKey]) -> None:
        for key in chain:
            slot = pool.reserve(key, None, 0.0)
            assert slot is not None
            if choice.random() < 0.97:
                pool.commit(slot)

    for chain in chains[:6]:
        fill(chain)
    for key in choice.sample(
        chains[3] + chains[5], 50
    ):  # holes, which the last chain fills: its run has breaks
        slot = pool.find(key)
        if slot is not None:
            pool.evict(slot)
    fill(chains[6])
    for chain in chains:
        asked = chain[choice.randrange(60) :] + chains[0][:10]
        assert pool.find_all(asked) == [pool.find(key) for key in asked]
    mixed = [key for chain in chains for key in chain]
    choice.shuffle(mixed)
    assert pool.find_all(mixed) == [pool.find(key) for key in mixed]


def test_leases_of_many_slots_add_up() -> None:
    pool, _ = make(4)
    slots = [put(pool, key) for key in KEYS[:4]]
    pool.lease_all(slots[:3])
    pool.lease_all(slots[1:])
    pool.lease_all([slots[0], slots[0]])
    pool.unlease_all(slots)
    assert [pool.is_leased(slot) for slot in slots] == [True, True, True, False]
    pool.unlease_all([slots[0], slots[0]])
    pool.unlease_all(slots[1:3])
    assert not any(pool.is_leased(slot) for slot in slots)
    with pytest.raises(AssertionError, match="never taken"):
        pool.unlease_all(slots[:2])

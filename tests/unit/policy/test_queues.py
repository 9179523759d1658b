"""S3-FIFO, SIEVE and ARC: the idea of each on a handful of blocks, and the queues that they share with W-TinyLFU."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Container

import pytest

from kvbm.policy import Arc, LeafFirstLru, PolicyFactory, S3Fifo, Sieve, WTinyLfu
from kvbm.policy.leaf_first import LeafFirstQueues
from kvbm.testing.checked_tier import CheckedTier, traffic

QUEUED = [S3Fifo, Sieve, Arc, WTinyLfu]


def tier_of(policy: PolicyFactory, slot_count: int, blocks: int) -> CheckedTier:
    """A tier that blocks 0, 1, … were asked for in that order, once each, every one a chain of its own."""
    tier = CheckedTier(policy, slot_count, admits_all=True)
    for block in range(blocks):
        tier.serve((block,))
    return tier


def held(tier: CheckedTier) -> set[int]:
    return {block.path[0] for block in tier.blocks.values()}


# ---- S3-FIFO


def test_s3fifo_a_scan_does_not_drive_out_what_is_used_again() -> None:
    tier = tier_of(S3Fifo, 10, 10)
    for _ in range(2):
        for block in (0, 1, 2):
            assert tier.serve((block,))
    for block in range(100, 140):
        tier.serve((block,))
    assert {0, 1, 2} < held(tier)


def test_s3fifo_one_use_is_not_enough() -> None:
    tier = tier_of(S3Fifo, 10, 10)
    for block in (0, 1):
        tier.serve((block,))
    tier.serve((1,))
    tier.serve((100,))
    assert held(tier) == {1, *range(2, 10), 100}, "used once goes in turn, used twice moves on"


def test_s3fifo_a_ghost_comes_back_to_stay() -> None:
    tier = tier_of(S3Fifo, 10, 11)
    assert 0 not in held(tier)
    assert not tier.serve((0,))
    for block in range(100, 140):
        tier.serve((block,))
    assert 0 in held(tier)


def test_s3fifo_a_ghost_is_forgotten_in_the_end() -> None:
    tier = tier_of(S3Fifo, 10, 11)
    for block in range(100, 120):
        tier.serve((block,))
    tier.serve((0,))
    for block in range(200, 240):
        tier.serve((block,))
    assert 0 not in held(tier)


def test_s3fifo_main_gives_a_round_for_each_use() -> None:
    tier = tier_of(lambda slot_count: S3Fifo(slot_count, small_share=0.5), 4, 6)
    assert held(tier) == {2, 3, 4, 5}
    for block in (0, 1):
        assert not tier.serve((block,)), "their ghosts bring them into the main queue"
    assert tier.serve((0,))
    for block in (2, 3):
        assert not tier.serve((block,))
    assert held(tier) == {0, 2, 3, 5}, "main is too long, and 0, its oldest, was used where 1 was not"


# ---- SIEVE


def test_sieve_spares_the_used_once_and_leaves_the_hand_where_it_is() -> None:
    tier = tier_of(Sieve, 3, 3)
    tier.serve((0,))
    tier.serve((3,))
    assert held(tier) == {0, 2, 3}, "0 was used"
    tier.serve((4,))
    assert held(tier) == {0, 3, 4}, "the hand goes on from 1 to 2"
    tier.serve((5,))
    assert held(tier) == {0, 4, 5}, "and to 3, newer than 0, which would be next in any other queue"


def test_sieve_the_next_block_in_a_slot_begins_unused() -> None:
    tier = tier_of(Sieve, 3, 3)
    tier.serve((0,))
    slot = tier.find((0,))
    tier.remove([slot])
    tier.serve((3,))
    assert tier.find((3,)) == slot
    tier.evict(2)
    assert held(tier) == {3}
    tier.serve((4,))
    assert tier.evict(1) == (slot,)


# ---- ARC


def test_arc_a_scan_does_not_drive_out_what_was_asked_for_again() -> None:
    tier = tier_of(Arc, 4, 4)
    tier.serve((0,))
    tier.serve((1,))
    for block in range(100, 140):
        tier.serve((block,))
    assert {0, 1} < held(tier)


def test_arc_a_ghost_of_the_first_queue_makes_it_longer() -> None:
    tier = tier_of(Arc, 4, 4)
    for block in (0, 1, 4):
        tier.serve((block,))
    assert held(tier) == {0, 1, 3, 4}, "2 was asked for once, longest ago"
    tier.serve((2,))
    assert held(tier) == {0, 1, 2, 4}
    tier.serve((5,))
    assert held(tier) == {1, 2, 4, 5}, "one block asked for once has its place now: 0 goes, not 4"


def test_arc_a_ghost_of_the_second_queue_makes_the_first_shorter() -> None:
    tier = tier_of(Arc, 4, 4)
    for block in (0, 1, 4, 2, 5):
        tier.serve((block,))
    tier.serve((0,))
    assert held(tier) == {0, 1, 2, 5}, "no place for blocks asked for once any more: 4 goes, not 1"


@pytest.mark.parametrize("seed", range(20))
def test_arc_weighs_a_run_as_if_its_blocks_came_one_by_one(seed: int) -> None:
    chance, tier = random.Random(seed), CheckedTier(Arc, 12, admits_all=True)
    for _ in range(200):
        tier.serve((min(int(chance.paretovariate(0.5)), 60),))
    one_by_one = tier._policies[0]
    assert isinstance(one_by_one, Arc)
    at_once = copy.deepcopy(one_by_one)
    run = (101, 102, 103, 104)
    victims: list[int] = []
    for key in run:
        victims += one_by_one.victims(1, (key,), set(victims), 0.0)
        one_by_one.inserted((key,), victims[-1:], -1, 0.0)
    assert at_once.victims(len(run), run, (), 0.0) == victims


# ---- leaves first


@pytest.mark.parametrize("policy", [Sieve, Arc, WTinyLfu])
def test_what_continues_a_block_goes_in_its_turn(policy: type[LeafFirstQueues]) -> None:
    tier = CheckedTier(policy, 5)
    for path in ((1,), (1, 1), (2,), (3,)):
        tier.reserve(path)
        tier.commit([slot for slot, block in tier.blocks.items() if not block.resident])
    parent, child = tier.find((1,)), tier.find((1, 1))
    assert tier.evict(2) == (child, parent)


def test_s3fifo_what_was_continued_moves_to_main() -> None:
    tier = CheckedTier(S3Fifo, 5)
    for path in ((1,), (1, 1), (2,), (3,)):
        tier.reserve(path)
        tier.commit([slot for slot, block in tier.blocks.items() if not block.resident])
    parent, child, *others = (tier.find(path) for path in ((1,), (1, 1), (2,), (3,)))
    assert tier.evict(4) == (child, *others, parent)


@pytest.mark.parametrize("policy", QUEUED)
def test_a_block_that_waited_for_the_end_of_a_lease_is_next_in_turn(policy: type[LeafFirstQueues]) -> None:
    tier = tier_of(policy, 6, 5)
    first, second, third = (tier.find((block,)) for block in range(3))
    tier.lease([first])
    assert tier.evict(1) == (second,)
    tier.unlease([first])
    assert tier.evict(2) == (first, third)


@pytest.mark.parametrize("policy", QUEUED)
def test_a_used_block_gets_its_second_chance_also_when_it_waited(policy: type[LeafFirstQueues]) -> None:
    tier = CheckedTier(policy, 6)
    for path in ((1,), (1, 1), (2,), (3,), (4,)):
        tier.reserve(path)
        tier.commit([slot for slot, block in tier.blocks.items() if not block.resident])
    parent, child, other = tier.find((1,)), tier.find((1, 1)), tier.find((2,))
    assert tier.evict(1) == (child,)
    tier.lease([parent])
    assert tier.evict(1) == (other,)
    tier.request((1,))
    tier.request((1,))
    tier.unlease([parent])
    next_in_turn = tier.find((3,))
    assert tier.evict(1) == (next_in_turn,)


def session_hits(policy: PolicyFactory, slot_count: int) -> int:
    """Eighty sessions, six at a time, that grow by one to three blocks a turn and end after five to 25 turns."""
    chance, tier = random.Random(1), CheckedTier(policy, slot_count, admits_all=True)
    sessions: list[tuple[int, ...]] = [(session,) for session in range(80)]
    turns = [chance.randint(5, 25) for _ in sessions]
    waiting = list(range(len(sessions)))
    live, hits = [waiting.pop() for _ in range(6)], 0
    while live:
        tier.now_s += 1.0
        session = chance.choice(live)
        sessions[session] += tuple(range(chance.randint(1, 3)))
        hits += tier.serve(sessions[session])
        turns[session] -= 1
        if not turns[session]:
            live.remove(session)
            live += [waiting.pop()] if waiting else []
    return hits


@pytest.mark.parametrize("policy", [S3Fifo, Sieve, Arc])
def test_sessions_that_ended_go_as_a_whole(policy: type[LeafFirstQueues]) -> None:
    """Where a session's blocks are judged one by one, its first ones are used so often that they outlive it for long,
    while what runs now is driven out. Order of use is at its best here; the others must come close."""

    class OneByOne(policy):  # type: ignore[valid-type,misc]
        def _leaf_of(self, slot: int, leased: Container[int]) -> int:
            if self._may_go(slot, leased):
                return slot
            self._wait(slot)
            return -1

    lru_hits = session_hits(LeafFirstLru, 150)
    assert session_hits(policy, 150) > 0.93 * lru_hits
    if policy is not Arc:  # its queues are in order of use themselves
        assert session_hits(OneByOne, 150) < 0.93 * lru_hits


def test_a_search_for_leaves_ends_with_the_block_that_it_was_for() -> None:
    """The slot of block 1 is given to block 2: what once continued block 1 is not the continuation of that."""
    tier = CheckedTier(Sieve, 6)
    for path in ((1,), (1, 1), (1, 1, 1)):
        tier.reserve(path)
        tier.commit([slot for slot, block in tier.blocks.items() if not block.resident])
    first, second = tier.find((1,)), tier.find((1, 1))
    tier.evict(1)
    tier.remove([first])
    tier.request((1, 1))
    for path in ((2,), (2, 2)):
        tier.reserve(path)
        tier.commit([slot for slot, block in tier.blocks.items() if not block.resident])
    new_first, new_second = tier.find((2,)), tier.find((2, 2))
    assert new_first == first
    assert tier.evict(2) == (new_second, new_first)
    assert tier.find((1, 1)) == second


class CountingArray(array):  # type: ignore[type-arg]
    """An array that counts how often it is read."""

    reads = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("policy", QUEUED)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_long_chain_is_not_searched_again_for_each_victim(policy: PolicyFactory, at_once: bool) -> None:
    """However it came in, and although its first block may be the one whose turn it is all the time."""
    made, count = policy(1000), 1000
    for run in [range(count)] if at_once else [range(block, block + 1) for block in range(count)]:
        made.inserted(run, run, run[0] - 1, 0.0)
        made.evictable(run)
    chains = made.tree  # type: ignore[attr-defined]
    chains.child = CountingArray("i", chains.child)
    for block in range(count - 1, -1, -1):
        assert made.victims(1, (), (), 0.0) == [block]
    assert chains.child.reads < 20 * count


def check(policy: LeafFirstQueues, blocks: Container[int]) -> None:
    """Each block stands in its queue or waits, both ways round, and is counted there."""
    count = policy._slot_count
    sizes = [0] * len(policy._sizes)
    for queue in range(len(sizes)):
        slot, end = policy._newer[count + queue], count + queue
        while slot != end:
            assert slot in blocks
            assert policy._queue[slot] == queue
            assert not policy._waits[slot]
            assert policy._older[policy._newer[slot]] == slot == policy._newer[policy._older[slot]]
            sizes[queue] += 1
            slot = policy._newer[slot]
    for slot in range(count):
        if policy._waits[slot]:
            assert slot in blocks
            sizes[policy._queue[slot]] += 1
    assert sizes == policy._sizes


@pytest.mark.parametrize("policy", QUEUED)
def test_no_block_is_lost_from_the_queues(policy: type[LeafFirstQueues]) -> None:
    made: list[LeafFirstQueues] = []

    def make(slot_count: int) -> LeafFirstQueues:
        made.append(policy(slot_count))  # type: ignore[call-arg]
        return made[-1]

    tier = CheckedTier(make, 32)
    for _ in traffic(tier, 7, 600):
        check(made[0], tier.blocks)
        assert sum(made[0]._sizes) == len(tier.blocks)


@pytest.mark.parametrize("policy", [S3Fifo, Arc])
def test_ghosts_are_bounded(policy: type[LeafFirstQueues]) -> None:
    made: list[S3Fifo | Arc] = []

    def make(slot_count: int) -> S3Fifo | Arc:
        made.append(policy(slot_count))  # type: ignore[call-arg,arg-type]
        return made[-1]

    tier = CheckedTier(make, 32)
    ghosts_most = 0
    for _ in traffic(tier, 8, 600):
        ghosts = made[0]._ghosts
        count = len(ghosts) if isinstance(made[0], S3Fifo) else sum(map(len, ghosts))
        ghosts_most = max(ghosts_most, count)
    assert 20 <= ghosts_most <= 64

"""The simulated tier and its replay against plain dictionaries that do the same the slow way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.policy import LeafFirstLru
from kvbm.sim.replay.replay import replay
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.halves import halves
from kvbm.sim.traces.trace import TraceBuilder
from rigs.property_tests import scale_examples
from rigs.traces import random_trace


class SlowLru:
    """Leaf-first LRU by looking at everything, for every block."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[int, int] = {}
        self.parent: dict[int, int | None] = {}

    def request(self, number: int, blocks: tuple[int, ...]) -> int:
        hits = 0
        while hits < len(blocks) and blocks[hits] in self.used:
            hits += 1
        for block in blocks:
            if block in self.used:
                self.used[block] = number
        for i in range(hits, len(blocks)):
            if len(self.used) == self.capacity and not self._evict(number):
                break
            self.used[blocks[i]] = number
            self.parent[blocks[i]] = blocks[i - 1] if i else None
        return hits

    def _evict(self, number: int) -> bool:
        parents = {self.parent[block] for block in self.used}
        leaves = [block for block in self.used if block not in parents and self.used[block] < number]
        if not leaves:
            return False
        del self.used[min(leaves, key=self.used.__getitem__)]
        return True


@settings(max_examples=scale_examples(60))
@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 40))
def test_lru_hits_what_the_slow_one_hits(seed: int, capacity: int) -> None:
    trace, slow = random_trace(seed), SlowLru(capacity)
    expected = [slow.request(n, tuple(r.blocks)) for n, r in enumerate(trace.requests)]
    found = replay(trace, capacity, LeafFirstLru(capacity))
    assert list(found.hits_by_request) == expected
    assert found.hits == sum(expected)
    assert found.accesses == trace.accesses


def test_a_cache_for_everything_misses_every_block_once() -> None:
    trace = random_trace(1)
    found = replay(trace, trace.unique_blocks, LeafFirstLru(trace.unique_blocks))
    assert found.accesses - found.hits == trace.unique_blocks == found.inserted
    assert found.evicted == 0


def test_progress_ends_with_the_number_of_requests() -> None:
    trace, heard = random_trace(2, requests=600), []
    replay(trace, 5, LeafFirstLru(5), heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == 600


class Listener(LeafFirstLru):
    """Keeps the ends that were reported to it."""

    def __init__(self, slot_count: int) -> None:
        super().__init__(slot_count)
        self.ends: list[tuple[object, int, float]] = []

    def finished(self, key, output_tokens, now_s) -> None:
        self.ends.append((key, output_tokens, now_s))


def test_the_policy_hears_of_ends_before_later_requests() -> None:
    builder = TraceBuilder("ends", 16)
    builder.add(0.0, ["a", "b"], 32, 7, seconds=5.0)
    builder.add(1.0, ["a"], 16, 3, seconds=1.0)
    builder.add(10.0, ["c"], 16, 1, seconds=1.0)
    trace, policy = builder.build(), Listener(4)
    replay(trace, 4, policy)
    assert policy.ends == [(0, 3, 2.0), (1, 7, 5.0)]


def full_tier(capacity: int) -> SimulatedTier:
    """Holds chains of one block each, 0 to capacity - 1, used in that order."""
    tier = SimulatedTier(capacity, LeafFirstLru(capacity))
    for block in range(capacity):
        tier.requested([block], float(block))
        assert tier.insert([block], 0, float(block)) == 1
    return tier


def test_leased_blocks_stay_until_their_last_lease_ends() -> None:
    tier = full_tier(2)
    tier.lease_blocks([0, 1])
    tier.lease_blocks([0])
    assert tier.insert([5], 0, 10.0) == 0
    tier.unlease_blocks([0, 1])
    assert tier.insert([5], 0, 11.0) == 1
    assert tier.holds(0)
    assert not tier.holds(1)
    tier.unlease_blocks([0])
    assert tier.insert([6], 0, 12.0) == 1
    assert not tier.holds(0)


def test_a_parent_makes_no_room_for_its_continuation() -> None:
    tier = full_tier(1)
    assert tier.insert([0, 7], 1, 5.0) == 0
    assert tier.holds(0)
    assert tier.counts().resident == 1


def test_a_chain_longer_than_the_tier_keeps_its_beginning() -> None:
    tier = SimulatedTier(3, LeafFirstLru(3))
    assert tier.insert(list(range(10, 20)), 0, 1.0) == 3
    assert [tier.holds(block) for block in range(10, 15)] == [True, True, True, False, False]
    assert tier.requested(list(range(10, 20)), 2.0) == 3


def test_what_was_left_behind_is_found_again() -> None:
    tier = SimulatedTier(4, LeafFirstLru(4))
    tier.insert([2, 3], 0, 1.0)
    assert tier.requested([1, 2, 3], 2.0) == 0
    assert tier.insert([1, 2, 3], 0, 2.0) == 1
    assert tier.requested([1, 2, 3], 3.0) == 3


def test_only_resident_blocks_are_leased() -> None:
    with pytest.raises(AssertionError):
        full_tier(1).lease_blocks([9])


def test_halves_are_of_sessions_where_there_are_sessions() -> None:
    builder = TraceBuilder("t", 16)
    for number in range(120):
        session = number % 30
        builder.add(float(number), [(session, i) for i in range(number // 30 + 1)], 16, 1)
    first, second = halves(builder.build())
    assert (first.name, second.name) == ("t, odd sessions", "t, even sessions")
    assert (len(first.requests), len(second.requests)) == (60, 60)
    assert (first.unique_blocks, second.unique_blocks) == (60, 60)
    assert second.requests[0].arrived_s == 0.0
    assert [len(request.blocks) for request in first.requests] == [1] * 15 + [2] * 15 + [3] * 15 + [4] * 15


def test_halves_are_of_time_where_all_begin_alike() -> None:
    builder = TraceBuilder("t", 16)
    for number in range(100):
        builder.add(number**2 / 100, ["system", number], 32, 1)
    first, second = halves(builder.build())
    assert (first.name, second.name) == ("t, first half", "t, second half")
    assert (len(first.requests), len(second.requests)) == (71, 29)
    assert second.unique_blocks == 30

"""The offline optimum against every other way to decide, on traces small enough to try them all."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.policy import LeafFirstLru
from kvbm.sim.replay.optimum import next_requests, optimum
from kvbm.sim.replay.replay import replay
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import Trace
from rigs.property_tests import scale_examples
from rigs.traces import random_trace


def most_hits(trace: Trace, capacity: int) -> int:
    """The best over all decisions: after each request any whole prefixes that were there may be kept."""
    best = {frozenset(): 0}
    for request in trace.requests:
        following: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            depth = 0
            while depth < len(request.blocks) and request.blocks[depth] in held:
                depth += 1
            there = sorted(held | set(request.blocks))
            for count in range(min(capacity, len(there)) + 1):
                for kept in map(frozenset, combinations(there, count)):
                    following[kept] = max(following.get(kept, 0), hits + depth)
        best = following
    return max(best.values())


@settings(max_examples=scale_examples(60))
@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 4))
def test_nothing_hits_more(seed: int, capacity: int) -> None:
    # Any set of blocks may be kept here, not only whole prefixes: the optimum needs no more than those.
    trace = random_trace(seed, requests=7, branching=2, depth=4)
    assert optimum(trace, capacity).hits == most_hits(trace, capacity)


@settings(max_examples=scale_examples(40))
@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 60))
def test_no_policy_hits_more(seed: int, capacity: int) -> None:
    trace = random_trace(seed)
    best = optimum(trace, capacity)
    assert best.hits >= replay(trace, capacity, LeafFirstLru(capacity)).hits
    assert best.inserted - best.evicted <= capacity


def test_a_cache_for_everything_hits_every_repetition() -> None:
    trace = chats(ChatShape(conversations=50))
    found = optimum(trace, trace.unique_blocks)
    assert found.hits == trace.accesses - trace.unique_blocks
    assert found.evicted == 0
    assert sum(found.hits_by_request) == found.hits


def test_what_is_never_needed_again_is_not_kept() -> None:
    trace = random_trace(5, requests=1)
    assert optimum(trace, 10).inserted == 0


def test_next_requests() -> None:
    trace = random_trace(7, requests=25)
    found, at = next_requests(trace).tolist(), 0
    for number, request in enumerate(trace.requests):
        for block in request.blocks:
            later = (n for n in range(number + 1, 25) if block in trace.requests[n].blocks)
            assert found[at] == next(later, 25)
            at += 1


def test_progress_ends_with_the_number_of_requests() -> None:
    trace, heard = random_trace(2, requests=600), []
    optimum(trace, 5, heard.append)
    assert heard[-1] == 600

"""LRU at all sizes in one pass, against a replay at each size; and sampling against the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.policy import LeafFirstLru
from kvbm.sim.replay.curves import lru_curve
from kvbm.sim.replay.optimum import optimum
from kvbm.sim.replay.replay import replay
from kvbm.sim.replay.sampling import Sample
from kvbm.sim.traces.synthetic import ChatShape, chats
from rigs.property_tests import scale_examples
from rigs.traces import random_trace


@settings(max_examples=scale_examples(40))
@given(seed=st.integers(0, 10_000), branching=st.integers(1, 4), depth=st.integers(1, 9))
def test_the_curve_is_what_replays_find(seed: int, branching: int, depth: int) -> None:
    trace = random_trace(seed, 30, branching, depth)
    curve = lru_curve(trace)
    for capacity in range(1, trace.unique_blocks + 1):
        assert curve.hits[capacity] == replay(trace, capacity, LeafFirstLru(capacity)).hits
    assert curve.hits[0] == 0


def test_the_curve_of_conversations_is_what_replays_find() -> None:
    trace = chats(ChatShape(conversations=60))
    curve = lru_curve(trace)
    for capacity in (1, 10, 100, 500, 2000, trace.unique_blocks):
        assert curve.hits[capacity] == replay(trace, capacity, LeafFirstLru(capacity)).hits


def test_points_and_sizes() -> None:
    trace = random_trace(3, 60)
    curve = lru_curve(trace)
    points = curve.points(20)
    assert points[0][0] == 1
    assert points[-1] == (trace.unique_blocks, 1.0 - trace.unique_blocks / trace.accesses)
    assert [rate for _, rate in points] == sorted(rate for _, rate in points)
    assert curve.hit_rate(10 * trace.unique_blocks) == points[-1][1]


def test_a_sample_of_everything_is_exact() -> None:
    trace = chats(ChatShape(conversations=40))
    sample = Sample(trace, 1.0)
    assert len(sample.trace.requests) == len(trace.requests)
    found = sample.estimate(200, lambda t, capacity: optimum(t, capacity).hit_rate)
    assert found.error == 0.0
    assert found.hit_rate == optimum(trace, 200).hit_rate


def test_a_sample_keeps_whole_conversations() -> None:
    """Own blocks of a conversation are kept or dropped together; so every kept request has its whole past."""
    trace = chats(ChatShape(conversations=200, applications=1, edits=0.0))
    sample = Sample(trace, 0.25, seed=3)
    share = len(sample.trace.requests) / len(trace.requests)
    assert 0.1 < share < 0.5
    whole, part = lru_curve(trace), lru_curve(sample.trace)
    repeated = [curve.hits[-1] / curve.accesses for curve in (whole, part)]
    assert repeated[0] == pytest.approx(repeated[1], abs=0.1)


def test_samples_are_drawn_by_seed() -> None:
    trace = chats(ChatShape(conversations=100))
    again = [Sample(trace, 0.3, seed).trace.requests for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_estimates_are_close_and_say_what_lru_was_off_by() -> None:
    trace = chats(ChatShape(conversations=600))
    sample = Sample(trace, 0.4)
    for share in (0.05, 0.2):
        capacity = int(share * trace.unique_blocks)
        found = sample.estimate(capacity, lambda t, c: replay(t, c, LeafFirstLru(c)).hit_rate)
        exact = lru_curve(trace).hit_rate(capacity)
        assert found.hit_rate == pytest.approx(exact, abs=1e-9)
        best = sample.estimate(capacity, lambda t, c: optimum(t, c).hit_rate)
        assert best.hit_rate == pytest.approx(optimum(trace, capacity).hit_rate, abs=0.05)
        assert abs(best.error) < 0.1


def test_there_is_always_something_in_a_sample() -> None:
    trace = random_trace(1, requests=3)
    assert Sample(trace, 0.001).trace.requests

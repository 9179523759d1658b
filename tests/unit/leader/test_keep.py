"""Requests whose blocks are kept only while something outside stays as it is, and those that have no name yet."""

from __future__ import annotations

from kvbm.hashing import split_keys
from kvbm.leader.tracked import Answer
from kvbm.protocol import Commit, Lookup
from rigs.leader import HASHES, Bench, keys


class Outside:
    """What the engine says of it; notes since when it was asked."""

    def __init__(self) -> None:
        self.same = True
        self.asked_s: list[float] = []

    def __call__(self, since_s: float) -> bool:
        self.asked_s.append(since_s)
        return self.same


def test_it_is_asked_after_the_copies_and_before_the_commit(bench: Bench) -> None:
    outside = Outside()
    bench.leader.request_added("r", HASHES[:4], b"adapter", 0, outside)
    bench.manager.said()
    plan = bench.store(complete=2)
    bench.clock.advance(1.0)
    bench.report(plan)
    assert outside.asked_s[-1] == bench.clock()
    assert bench.manager.said() == [Commit(store=plan.store, seconds=0.1)]
    plan = bench.store(complete=4)
    outside.same = False
    bench.report(plan)
    assert bench.manager.said() == [Commit(store=plan.store, failed=(0, 1), seconds=0.1)]


def test_what_may_not_be_kept_any_more_is_not_offered(bench: Bench) -> None:
    outside = Outside()
    bench.leader.request_added("r", HASHES[:4], b"adapter", 0, outside)
    bench.manager.said()
    outside.same = False
    bench.step({"r": 4})
    assert bench.manager.said() == []
    assert set(outside.asked_s) == {0.0}, "a step takes the last look for it"


def test_without_a_name_nothing_is_asked_or_stored(bench: Bench) -> None:
    bench.leader.request_added("r", HASHES[:4], None, 0)
    assert bench.leader.matched("r", 0) == Answer()
    bench.step({"r": 2})
    assert bench.manager.said() == []
    bench.leader.extras_known("r", b"adapter")
    bench.step({"r": 3})
    (reserve,) = bench.manager.said()
    assert split_keys(reserve.keys) == keys(3, b"adapter")
    bench.leader.extras_known("r", b"another")
    bench.step({"r": 4})
    assert split_keys(bench.manager.said()[-1].keys) == [keys(4, b"adapter")[3]], "a name is for good"


def test_a_request_that_is_named_while_it_waits_is_looked_up(bench: Bench) -> None:
    bench.leader.request_added("r", HASHES[:4], None, 0)
    bench.leader.extras_known("r", b"adapter")
    assert bench.leader.matched("r", 0).later
    (lookup,) = bench.manager.said()
    assert isinstance(lookup, Lookup)
    assert split_keys(lookup.keys) == keys(4, b"adapter")


def test_what_ran_without_a_name_through_a_change_of_the_weights_is_not_stored(bench: Bench) -> None:
    bench.leader.request_added("r", HASHES[:4], None, 0)
    bench.step({"r": 2})
    bench.leader.weights_changed()
    bench.leader.extras_known("r", b"adapter")
    bench.step({"r": 4})
    assert bench.manager.said() == []

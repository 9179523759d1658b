"""Resets, and weights that change in memory: which keys the leader has then, and what it keeps under them."""

from __future__ import annotations

import pytest

from kvbm.hashing import split_keys
from kvbm.leader.tracked import Answer, Scheduled
from kvbm.protocol import Commit, Release, Reserve, Reset
from kvbm.step_plan import StepReport
from rigs.leader import TABLE, Bench


def test_after_a_reset_no_key_is_what_it_was(bench: Bench) -> None:
    before = bench.add("a")
    bench.step({"a": 0})
    assert bench.leader.reset(), "whoever holds what in the manager: nothing of it is found any more"
    assert [type(m) for m in bench.manager.said()] == [Release, Reset]
    after = bench.add("b")
    assert not set(split_keys(before.keys)) & set(split_keys(after.keys))
    bench.step({"a": 2})
    assert bench.manager.said() == [], "what ran through the reset may stand on KV of before"
    bench.step({"b": 2})
    (reserve,) = bench.manager.said()
    assert not set(split_keys(before.keys)) & set(split_keys(reserve.keys))


def reset_while_requests_run(bench: Bench) -> None:
    """The engine keeps its device's cache."""
    bench.leader.reset(device_emptied=False)
    bench.manager.said()


def stored_blocks(bench: Bench) -> int:
    """How many blocks the leader has reserved slots for since the last call."""
    return sum(len(split_keys(m.keys)) for m in bench.manager.said() if isinstance(m, Reserve))


def test_nothing_on_the_device_is_stored_after_a_reset_that_the_device_refused(bench: Bench) -> None:
    """Others find blocks of before the reset there."""
    bench.add("ran")
    bench.step({"ran": 2})
    bench.manager.said()
    reset_while_requests_run(bench)
    for request, computed in (("on it", 4), ("afresh", 0), ("on it too", 4)):
        bench.add(request, on_device=computed)
        assert not bench.leader.matched(request, computed).blocks
        bench.step({"ran": 8, request: 8})
        assert stored_blocks(bench) == (0 if computed else 8), request
    bench.leader.device_was_reset(weights_may_change=False)
    bench.manager.said()
    bench.add("later", on_device=4)
    bench.leader.matched("later", 4)
    bench.step({"later": 8})
    assert stored_blocks(bench) == 8


def test_a_second_reset_that_empties_the_device_ends_what_the_first_began(bench: Bench) -> None:
    reset_while_requests_run(bench)
    bench.leader.reset()
    bench.manager.said()
    bench.add("r", on_device=4)
    bench.leader.matched("r", 4)
    bench.step({"r": 8})
    assert stored_blocks(bench) == 8


def test_a_request_that_begins_on_a_part_of_an_old_block_is_not_stored(bench: Bench) -> None:
    """The engine copies the part that matches; it is no whole block, so the match begins at 0."""
    reset_while_requests_run(bench)
    for request, tokens in (("on a part", 3), ("afresh", 0)):
        bench.add(request)
        bench.leader.matched(request, 0)
        bench.leader.step([Scheduled(request, 8, lambda: TABLE, computed_tokens=tokens)], (), 0, False)
        assert stored_blocks(bench) == (0 if tokens else 8), request


def test_nothing_is_loaded_behind_blocks_of_before_a_refused_reset(bench: Bench) -> None:
    """Text computed from a mix of both would be that of no engine."""
    reset_while_requests_run(bench)
    lookup = bench.add("r")
    bench.answer(lookup, 8)
    assert bench.leader.matched("r", 3) == Answer()
    assert bench.leader.matched("r", 0) == Answer(blocks=8), "the device has dropped them"


def test_a_device_that_is_emptied_after_a_refused_reset_may_have_other_weights(bench: Bench) -> None:
    """The refused reset may have come before the weights changed."""
    reset_while_requests_run(bench)
    before = bench.add("a")
    bench.leader.device_was_reset(weights_may_change=True)
    bench.manager.said()
    assert not set(split_keys(before.keys)) & set(split_keys(bench.add("b").keys))


def test_what_was_loaded_before_a_reset_and_is_computed_again_is_stored_from_its_first_block(
    bench: Bench,
) -> None:
    """The manager holds those blocks under other keys."""
    bench.arrive(bench.load(5))
    bench.leader.reset()
    bench.leader.matched("r", 0)
    bench.manager.said()
    bench.step({"r": 8})
    assert stored_blocks(bench) == 8


def test_a_reset_waits_for_nobody_but_says_that_a_load_runs(bench: Bench) -> None:
    plan = bench.load(3)
    assert not bench.leader.reset(), "it writes into device blocks"
    bench.arrive(plan)
    assert bench.leader.reset()
    bench.manager.die()
    bench.step()
    assert bench.leader.reset()


@pytest.mark.parametrize("change", ["reset", "weights_changed"])
def test_what_is_on_its_way_is_not_kept_under_the_old_keys(bench: Bench, change: str) -> None:
    """The device's memory may not hold it any more when it is copied."""
    bench.add("a")
    planned = bench.store("a")
    bench.step({"a": 6})
    (asked,) = bench.manager.said()
    getattr(bench.leader, change)()
    assert bench.step().stores == ()
    given_back = [m for m in bench.manager.said() if isinstance(m, Commit)]
    assert [(m.store, m.failed) for m in given_back] == [(asked.store, (0, 1))]
    bench.report(planned)
    (commit,) = bench.manager.said()
    assert commit.failed == tuple(range(len(planned.slots)))


def test_changed_weights_rise_in_every_plan(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    before = bench.add("a")
    assert bench.step().weights == 0
    bench.leader.weights_changed()
    assert bench.step().weights == 1
    bench.leader.updated(StepReport(weights_changed=True), (), set())
    assert bench.step().weights == 2
    bench.manager.said()
    assert not set(split_keys(before.keys)) & set(split_keys(bench.add("b").keys))
    told = [r for r in caplog.records if "this engine's life only" in r.getMessage()]
    assert len(told) == 1


def test_a_named_version_has_keys_that_others_can_have_too() -> None:
    def keys_of(*words: str, begins_as: str = "") -> list[bytes]:
        bench = Bench(weights_version=begins_as)
        for word in words:
            bench.leader.weights_changed()
            bench.leader.weights_named(word)
        found = split_keys(bench.add("r").keys)
        bench.leader.close()
        bench.manager.close()
        return list(found)

    assert keys_of("one") == keys_of("two", "one") == keys_of(begins_as="one")
    assert not {*keys_of("one")} & {*keys_of("two"), *keys_of()}


def test_naming_the_same_version_again_drops_nothing(bench: Bench) -> None:
    bench.leader.weights_named("one")
    bench.promise(3)
    bench.leader.weights_named("one")
    assert bench.leader.matched("r", 0) == Answer(blocks=3)
    bench.leader.weights_named("two")
    assert bench.leader.matched("r", 0).later, "it is asked again, with other keys"


def test_blocks_of_other_weights_on_the_device_are_not_kept(bench: Bench) -> None:
    """The engine goes on with what its device holds (`pause(clear_cache=False)`): that is not what the keys say."""
    bench.leader.weights_changed()
    bench.leader.weights_named("one")
    for request, computed in (("on it", 3), ("afresh", 0)):
        bench.add(request)
        bench.leader.matched(request, computed)
        bench.step({request: 5})
        asked = [m for m in bench.manager.said() if isinstance(m, Reserve)]
        assert len(asked) == (0 if computed else 1), request
    bench.step(preempted=["on it"])
    bench.leader.matched("on it", 2)
    bench.step({"on it": 5})
    assert not [m for m in bench.manager.said() if isinstance(m, Reserve)]
    bench.leader.device_was_reset(weights_may_change=True)
    bench.add("later")
    bench.leader.matched("later", 3)
    bench.step({"later": 5})
    assert [m for m in bench.manager.said() if isinstance(m, Reserve)]


def test_requests_that_waited_are_kept_and_those_that_ran_are_not(bench: Bench) -> None:
    bench.add("ran")
    bench.add("waited")
    bench.step({"ran": 2})
    bench.manager.said()
    bench.leader.weights_changed()
    bench.manager.said()
    for request in ("ran", "waited"):
        if request == "waited":
            bench.leader.matched(request, 0)
            bench.manager.said()
        bench.step({request: 4})
        assert len(bench.manager.said()) == (request == "waited"), request


def test_a_reset_of_the_device_ends_a_change_and_may_be_one(bench: Bench) -> None:
    numbers = iter(range(100))

    def keys_after(*may_change: bool) -> list[bytes]:
        for each in may_change:
            bench.leader.device_was_reset(each)
        bench.manager.said()
        return list(split_keys(bench.add(str(next(numbers))).keys))

    first = keys_after()
    assert keys_after(False) == first
    second = keys_after(True)
    assert second != first
    assert keys_after(False) == second
    bench.leader.weights_changed()
    changed = keys_after()
    assert changed != second
    assert keys_after(True) == changed, "it belongs to that change"
    assert keys_after(True) != changed
    bench.leader.weights_named("one")
    named = keys_after()
    assert keys_after(True, True) == named, "the trainer has said which weights these are"


def test_a_report_of_changed_weights_puts_its_stores_in_doubt(bench: Bench) -> None:
    """Some rank copied what others had computed with other weights."""
    bench.add("a")
    planned = bench.store("a")
    bench.leader.updated(StepReport(stored={planned.store: (1, (), 0.1)}, weights_changed=True), (), set())
    (commit,) = [m for m in bench.manager.said() if isinstance(m, Commit)]
    assert commit.failed == tuple(range(len(planned.slots)))


def test_a_request_that_is_not_kept_is_neither_loaded_nor_stored(bench: Bench) -> None:
    bench.promise(3)
    bench.leader.unkeep("r")
    assert bench.leader.matched("r", 0) == Answer()
    bench.manager.said()
    bench.step({"r": 4})
    assert bench.manager.said() == []

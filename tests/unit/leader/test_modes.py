"""When copies may run: loads beside the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbm.hashing import split_keys
from kvbm.leader.tracked import Answer
from kvbm.protocol import Commit, Reserve
from kvbm.step_plan import LoadPlan, StepReport
from rigs.leader import TABLE, Bench, ScriptedDevice, keys

# ---- layer by layer


def promised(bench: Bench, before_tail: int, **reply: Any) -> Answer:
    lookup = bench.add()
    bench.answer(lookup, 5, **reply)
    return bench.leader.matched("r", 0, before_tail)


@pytest.mark.parametrize(
    ("before_tail", "reply", "layerwise"),
    [
        (5, {}, True),
        (9, {}, True),
        (4, {}, False),
        (9, {"ready": 3}, False),
        (9, {"ready": 5, "disk": 2}, True),
    ],
    ids=["a tail", "a long tail", "nothing left to compute", "not all there", "came from disk"],
)
def test_which_loads_run_beside_the_forward_pass(
    make_bench: Callable[..., Bench], before_tail: int, reply: dict[str, int], layerwise: bool
) -> None:
    bench = make_bench(layerwise=True, device=ScriptedDevice())
    assert promised(bench, before_tail, **reply) == Answer(blocks=5, layerwise=layerwise)
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step().loads
    assert plan.layerwise == layerwise
    assert not layerwise or plan.ready == len(plan.slots)


def test_a_load_that_others_want_too_is_confirmed_before_their_step(
    make_bench: Callable[..., Bench],
) -> None:
    """Beside its own forward pass it would keep them waiting for that pass as well."""
    bench = make_bench(layerwise=True, device=ScriptedDevice())
    bench.add("other")
    assert promised(bench, 9) == Answer(blocks=5)
    bench.leader.finished("other")
    assert bench.leader.matched("r", 0, 9) == Answer(blocks=5, layerwise=True)


def test_no_load_runs_beside_it_by_default(make_bench: Callable[..., Bench]) -> None:
    assert promised(make_bench(), 9) == Answer(blocks=5)


def loading(bench: Bench) -> LoadPlan:
    assert promised(bench, 9).layerwise
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step({"r": 6}).loads
    return plan


def test_the_ranks_report_its_end(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(layerwise=True, device=ScriptedDevice())
    plan = loading(bench)
    bench.manager.said()
    bench.leader.updated(StepReport(loaded={"r": 0.25}), (), set())
    (release,) = bench.manager.said()
    assert (release.lookup, release.loaded, release.failed) == (plan.lookup, 5, 0)
    bench.leader.updated(StepReport(loaded={"r": 0.25}), (), set())
    assert bench.manager.said() == []


def test_nothing_computed_on_a_failed_layer_is_kept(make_bench: Callable[..., Bench]) -> None:
    """Neither of this request nor of others of that step; and all of it is offered again."""
    device = ScriptedDevice()
    bench = make_bench(layerwise=True, device=device)
    bench.add("other")
    planned = bench.store("other")
    plan = loading(bench)
    (reserve,) = [message for message in bench.manager.said() if isinstance(message, Reserve)]
    bench.leader.updated(StepReport(loaded={"r": 0.25}), (), {plan.device_blocks[1]})
    assert device.holds == {}, "nor may anybody find it on the device"
    given_up = [message for message in bench.manager.said() if isinstance(message, Commit)]
    assert [(commit.store, len(commit.failed)) for commit in given_up] == [(reserve.store, 6)]
    bench.report(planned)
    (commit,) = bench.manager.said()
    assert commit.failed == (0, 1, 2, 3)
    assert bench.step({"r": 6, "other": 4}).stores == ()
    again = [message for message in bench.manager.said() if isinstance(message, Reserve)]
    assert [split_keys(message.keys) for message in again] == [keys(6), keys(4)]


def test_no_other_request_reads_blocks_that_are_not_confirmed(make_bench: Callable[..., Bench]) -> None:
    """The engine shares blocks as soon as it has made room for them. If they fail, only their own request is told."""
    bench = make_bench(layerwise=True, device=ScriptedDevice())
    loading(bench)
    bench.manager.said()
    bench.answer(bench.add("twin", on_device=5), 1)
    assert bench.leader.matched("twin", 5, 9).later, "it found blocks that are being loaded"
    bench.answer(bench.add("apart"), 5)
    assert not bench.leader.matched("apart", 0, 9).later, "it loads its own"
    bench.leader.request_added("stranger", [bytes([200 + i]) * 32 for i in range(8)], b"", 5)
    (lookup,) = bench.manager.said()
    bench.answer(lookup, 1)
    assert not bench.leader.matched("stranger", 5, 9).later
    bench.leader.finished("r")
    assert bench.leader.matched("twin", 5, 9).later, "though it was aborted, its blocks may be found"
    bench.manager.ready(False)
    assert bench.leader.matched("twin", 5, 9).later, "nor does the manager's end confirm them"
    bench.manager.ready()
    bench.step()
    bench.manager.said()
    bench.add("r")  # a client may use the name again
    bench.leader.updated(StepReport(loaded={"r": 0.25}), (), set())
    assert not bench.leader.matched("twin", 5, 9).later


def test_a_failed_load_that_no_forward_pass_has_read_costs_only_itself(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    bench.add("other")
    planned = bench.store("other")
    plan = bench.load()
    bench.manager.said()
    bench.arrive(plan, invalid={plan.device_blocks[0]})
    bench.manager.said()
    bench.report(planned)
    (commit,) = bench.manager.said()
    assert commit.failed == ()

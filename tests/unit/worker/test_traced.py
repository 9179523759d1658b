"""When a rank copied, for the spans of traced loads: on the system's clock, and only where that is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest

from kvbm.clock import ManualClock
from kvbm.step_plan import LoadPlan, StepPlan, StepReport
from rigs.fake_tier import FakeTier
from rigs.mover import Rank, on_disk


def copied(rank: Rank, plan: LoadPlan) -> tuple[int, int] | None:
    """What the rank reports of a load's copies."""
    rank.run_load(plan)
    report = rank.worker.report()
    assert report is not None
    return report.copied.get(plan.request)


def test_a_traced_load_tells_when_its_copies_were(rank: Rank) -> None:
    rank.put_in(18)
    plan = msgspec.structs.replace(rank.lookup(18), traced=True)
    before_ns = time.time_ns()
    spans = copied(rank, plan)
    assert spans is not None
    began_ns, ended_ns = spans
    margin_ns = 1_000_000  # the two clocks are not read at the same moment
    assert before_ns - margin_ns <= began_ns < ended_ns <= time.time_ns() + margin_ns
    rank.judge(plan, ())


def test_a_load_that_is_not_traced_tells_nothing(rank: Rank) -> None:
    rank.put_in(3)
    assert copied(rank, rank.lookup(3)) is None


def test_copies_begin_when_the_first_block_is_there(make_rank: Callable[..., Rank], below: FakeTier) -> None:
    rank = on_disk(make_rank, below, 5)
    clock = ManualClock(100.0)
    rank.worker._clock = rank.mover._clock = rank.mover._loading._clock = clock
    rank.worker._wall_offset_ns = lambda: 7
    plan = msgspec.structs.replace(rank.lookup(5), traced=True)
    rank.worker.load(StepPlan(loads=(plan,)))
    assert rank.worker.finished(StepPlan()) == []
    clock.advance(5.0)
    below.release()
    assert rank.finish().failed == ()
    assert rank.worker.report() == StepReport(
        loaded={plan.request: 5.0}, copied={plan.request: (105_000_000_007, 105_000_000_007)}
    )


def test_a_load_of_which_nothing_comes_has_no_copies(make_rank: Callable[..., Rank], below: FakeTier) -> None:
    rank = on_disk(make_rank, below, 2)
    plan = msgspec.structs.replace(rank.lookup(2), traced=True, epoch=1)
    assert copied(rank, plan) is None


@pytest.mark.parametrize("swap", [False, True])
def test_reports_of_several_ranks_span_them_all(swap: bool) -> None:
    one = StepReport(copied={"r": (10, 20), "q": (1, 2)})
    other = StepReport(copied={"r": (15, 30)})
    both = other.merge(one) if swap else one.merge(other)
    assert both.copied == {"r": (10, 30), "q": (1, 2)}

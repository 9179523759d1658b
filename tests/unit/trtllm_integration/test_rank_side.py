"""The rank's half, where the copies out of a request's blocks take longer than an iteration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.step_plan import StepPlan, StorePlan
from kvbm.trtllm_integration import worker_side
from kvbm.trtllm_integration.errors import PromiseBroken
from kvbm.trtllm_integration.scheduler_side import failing
from kvbm.trtllm_integration.worker_side import HOLD_S_MAX, WorkerSide


class Copies:
    """A worker whose stores end when the test says so."""

    def __init__(self) -> None:
        self.open_stores: frozenset[int] = frozenset()
        self.abandoned: set[int] = set()
        self.plans: list[StepPlan] = []

    def send_report(self) -> None:
        """Nobody listens."""

    def abandon(self, stores: Any) -> None:
        self.abandoned.update(stores)

    def store(self, plan: StepPlan) -> None:
        self.plans.append(plan)


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def side(copies: Copies) -> WorkerSide:
    made = WorkerSide.__new__(WorkerSide)
    made.worker = copies
    made._plan, made._stored, made._saving, made._quiet = StepPlan(), True, {}, False
    made._facts = SimpleNamespace(rank=0)
    return made


def test_blocks_are_given_back_when_their_copies_have_ended(side: WorkerSide, copies: Copies) -> None:
    copies.open_stores = frozenset({1, 2})
    assert side.finished([10]) == []
    copies.open_stores = frozenset({2, 3})
    assert side.finished([11]) == []
    copies.open_stores = frozenset({3})
    assert side.finished([]) == [10], "the later one waits for a copy that began before it ended"
    copies.open_stores = frozenset()
    assert side.finished([]) == [11]
    assert side.finished([]) == []


def test_a_copy_that_never_ends_is_given_up(
    side: WorkerSide, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(worker_side.time, "monotonic", lambda: now_s[0])
    copies.open_stores = frozenset({1})
    assert side.finished([10]) == []
    now_s[0] += HOLD_S_MAX + 1.0
    assert side.finished([]) == [10]
    assert copies.abandoned == {1}, "what it reads from now on is not kept"


def test_a_rank_without_a_cache_gives_ids_back_at_once(side: WorkerSide) -> None:
    side.worker = None
    assert side.finished([10, 11]) == [10, 11]
    side.bind(StepPlan())
    side.load(None)
    side.bind(StepPlan(loads=(failing("7"),)))
    with pytest.raises(PromiseBroken, match="request 7"):
        side.load(None)


def store(number: int) -> StorePlan:
    return StorePlan(store=number, epoch=1, slots=(1,), generations=(1,), device_blocks=(1,))


def test_stores_begin_when_the_forward_pass_has_ended_and_once(side: WorkerSide, copies: Copies) -> None:
    """Those of blocks that are handed out from this step on begin before it."""
    side.bind(StepPlan(stores=(store(1), store(2)), released=(2,)))
    side.load(None)
    assert [[each.store for each in plan.stores] for plan in copies.plans] == [[2]]
    side.store()
    side.store()
    assert [[each.store for each in plan.stores] for plan in copies.plans] == [[2], [1]]

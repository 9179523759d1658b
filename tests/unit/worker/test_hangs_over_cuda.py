"""Copies that stop half-way, by the real worker, mover and copier over the stand-in for a CUDA driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.errors import CopyHung
from kvbm.protocol import CopiesHang
from kvbm.step_plan import StepPlan
from kvbm.worker import hang_watch
from rigs.libcuda.rank import Rank
from rigs.libcuda.torch_cuda import TorchCuda
from rigs.manager_probe import wait_for

DEADLINE_S = 20.0
PlanT = TypeVar("PlanT")
STEPS_MAX = 60


def planned(plan: Callable[[], list[PlanT]]) -> tuple[PlanT, ...]:
    """Some plans; the rank makes none at times."""
    return next(tuple(plans) for _ in range(100) if (plans := plan()))


@pytest.fixture
def rank(torch_cuda: TorchCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """One that has stored and loaded, and whose device does not get on with copies from now on."""
    rank = Rank(torch_cuda, 0, "batch", STEPS_MAX)
    rank.layerwise_share = 0.0

    def stored_and_loaded() -> bool:
        rank.run_step()
        return rank.stored > 0 and rank.loaded > 0

    wait_for(stored_and_loaded, DEADLINE_S, "it neither stored nor loaded")
    assert rank.finish() == []
    monkeypatch.setattr(hang_watch, "COPY_S_MAX", 0.05)
    torch_cuda.libcuda.hold_copies()
    yield rank
    rank.close()
    assert torch_cuda.libcuda.registered_bytes == 0


def test_a_store_that_never_ends_costs_the_rank_its_cache(rank: Rank, torch_cuda: TorchCuda) -> None:
    plan = StepPlan(stores=planned(rank.plan_stores))
    rank.worker.store(plan)
    wait_for(lambda: rank.mover.watches.stores_hang, DEADLINE_S, "the store was waited for without an end")
    wait_for(lambda: not rank.mover.connected, DEADLINE_S, "KVBM stayed on")
    assert rank.lines[0].sent == [CopiesHang()]
    assert not rank.lines[0].closed, "its slots may still be written"
    assert rank.worker.report() is None
    loads = StepPlan(loads=planned(rank.plan_loads), released=tuple(store.store for store in plan.stores))
    rank.worker.store(loads)
    rank.worker.load(loads)
    ended = rank.worker.finished(loads)

    def all_answered() -> bool:
        ended.extend(rank.worker.finished(StepPlan()))
        return len(ended) == len(loads.loads)

    wait_for(all_answered, DEADLINE_S, "a load was not answered")
    assert all(load.failed for load in ended)
    torch_cuda.libcuda.hold_copies(False)
    wait_for(lambda: rank.lines[0].closed, DEADLINE_S, "the slots were not given back")


def test_a_load_that_never_ends_ends_the_engine(rank: Rank, torch_cuda: TorchCuda) -> None:
    plan = StepPlan(loads=planned(rank.plan_loads))
    rank.worker.store(plan)
    rank.worker.load(plan)
    with pytest.raises(CopyHung, match="KVBM ends this engine"):
        wait_for(
            lambda: rank.worker.finished(StepPlan()) != [],
            DEADLINE_S,
            "the load was waited for without an end",
        )
    assert not rank.lines[0].closed
    torch_cuda.libcuda.hold_copies(False)
    wait_for(lambda: rank.lines[0].closed, DEADLINE_S, "the session was not given up")

"""The engine's thread while copies run by themselves: it waits for what it must, and never for ever."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.step_plan import StepPlan, StepReport
from kvbm.worker.jobs import DrainJob, FinishedLoad
from kvbm.worker.mover import Mover
from kvbm.worker.worker import Worker
from rigs.copies_beside import (
    DEADLINE_S,
    LAYERS,
    Device,
    Line,
    load,
    reported,
    step,
    store_job,
    stores,
)

CACHE: Any = SimpleNamespace(layers=dict.fromkeys(LAYERS), device=SimpleNamespace(type="cuda"))


@pytest.fixture
def worker(mover: Mover) -> Worker:
    """A worker whose copies run beside the engine, and whose mover the test drives."""
    return Worker(mover, CACHE)


def report_of(worker: Worker) -> StepReport:
    report = worker.report()
    assert report is not None
    return report


def test_the_engine_waits_for_released_stores_only(worker: Worker, mover: Mover, device: Device) -> None:
    worker.store(StepPlan(stores=stores(1, 2)))
    step(mover)
    assert device.held == []
    worker.store(StepPlan())
    assert device.held == [], "a step with nothing to do does nothing"
    worker.store(StepPlan(released=(2,)))
    assert [copying.pairs for copying in device.held] == [[(2, 2)]]
    for copying in device.begun:
        copying.end()
    step(mover)
    assert report_of(worker).stored.keys() == {1, 2}
    worker.store(StepPlan(released=(1,)))
    assert len(device.held) == 1, "it was reported to be over"


def test_a_store_released_in_its_own_step_is_held(worker: Worker, mover: Mover, device: Device) -> None:
    """The engine's thread waits until it was begun: there is no event to wait for before."""
    device.at_once = True
    engine = threading.Thread(target=worker.store, args=(StepPlan(stores=stores(3), released=(3,)),))
    engine.start()
    while not device.begun:
        mover.turn()
    engine.join(DEADLINE_S)
    assert not engine.is_alive()
    assert device.held == device.begun


def test_a_load_comes_after_the_stores_that_its_step_releases(
    worker: Worker, mover: Mover, device: Device
) -> None:
    """It may go into their blocks, which the engine got back and gave away again before the same step."""
    device.mark = lambda: len(device.held)  # type: ignore[method-assign, assignment, return-value]
    worker.store(StepPlan(stores=stores(1)))
    step(mover)
    plan = StepPlan(released=(1,), loads=(load(),))
    worker.store(plan)
    worker.load(plan)
    step(mover)
    loading = device.begun[-1]
    assert (loading.what, loading.after) == ("load", 1), "the mark lies behind the wait for the store"


def test_a_store_that_does_not_begin_in_time_is_abandoned(
    worker: Worker, mover: Mover, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.worker.worker.STORE_TIMEOUT_S", 0.01)
    device.at_once = True
    worker.store(StepPlan(stores=stores(3), released=(3,)))
    step(mover)
    assert reported(mover) == [(3, (0,))]


def test_a_layer_that_never_comes_is_reported_as_failed(
    worker: Worker, mover: Mover, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mover is stuck: the engine goes on, with blocks that it must compute."""
    monkeypatch.setattr("kvbm.worker.worker.LAYER_TIMEOUT_S", 0.01)
    plan = StepPlan(loads=(load(True, blocks=2),))
    worker.load(plan)
    for layer in LAYERS:
        worker.wait_for_layer(layer)
    (ended,) = worker.finished(plan)
    assert (ended.failed, ended.layerwise) == ((0, 1), True)
    device.at_once = True
    step(mover)
    assert worker.finished(StepPlan()) == [], "it was reported already"
    assert device.begun == [], "and nothing is written behind the engine's back"


def test_without_a_session_no_layer_is_waited_for(worker: Worker, mover: Mover, line: Line) -> None:
    """The copying thread may be busy joining a manager for seconds."""
    line.hang_up()
    step(mover)
    plan = StepPlan(loads=(load(True, blocks=2),))
    worker.load(plan)
    for layer in LAYERS:
        worker.wait_for_layer(layer)
    (failed,) = worker.finished(plan)
    assert (failed.failed, failed.layerwise) == ((0, 1), True)
    assert worker.finished(StepPlan()) == []


def test_a_device_without_events_costs_the_copies(worker: Worker, mover: Mover, device: Device) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    device.mark = lost  # type: ignore[method-assign, assignment]
    worker.store(StepPlan(stores=stores(4)))
    step(mover)
    assert report_of(worker).stored[4][1] == (0,)


# ---- weights that change in memory


@pytest.fixture
def changes() -> list[int]:
    """How often the rank's weights changed, at its end."""
    return [0]


@pytest.fixture
def watched(mover: Mover, changes: list[int]) -> Worker:
    """A worker that knows how often its weights changed."""
    return Worker(mover, CACHE, weights_changes=lambda: changes[-1])


def test_a_plan_that_knows_nothing_of_new_weights_is_refused(
    watched: Worker, mover: Mover, device: Device, changes: list[int]
) -> None:
    changes.append(1)
    plan = StepPlan(stores=stores(1), loads=(load(),))
    watched.store(plan)
    watched.load(plan)
    step(mover)
    assert device.begun == [], "neither the bytes of one nor the name of the other"
    (failed,) = watched.finished(plan)
    assert failed.failed == load().device_blocks
    report = report_of(watched)
    assert report.weights_changed
    assert report.stored[1][1] == tuple(range(len(stores(1)[0].slots)))
    watched.store(StepPlan(stores=stores(3)))
    assert report_of(watched).weights_changed, "until a plan shows that the leader knows"
    watched.store(StepPlan(stores=stores(4), weights=1))
    step(mover)
    assert [copying.what for copying in device.begun] == ["store"]
    assert watched.report() is None


def test_a_replica_that_knows_better_says_so(mover: Mover, changes: list[int]) -> None:
    """It stores nothing itself, and must not vouch for what its peer copies."""
    replica = Worker(mover, CACHE, stores_here=False, weights_changes=lambda: changes[-1])
    replica.store(StepPlan(stores=stores(1)))
    assert report_of(replica).stored[1][1] == ()
    changes.append(1)
    replica.store(StepPlan(stores=stores(2)))
    assert report_of(replica).stored[2][1] == (0,)


def test_a_leader_that_knew_first_is_told_nothing(watched: Worker, changes: list[int]) -> None:
    changes.append(3)
    watched.store(StepPlan(weights=1))
    assert watched.report() is None


def test_a_load_that_began_before_the_change_failed(
    watched: Worker, mover: Mover, device: Device, changes: list[int]
) -> None:
    """Whatever it brought, the request is computed with weights that would have given other KV."""
    plan = load()
    watched.store(StepPlan())
    watched.load(StepPlan(loads=(plan,)))
    changes.append(1)
    watched.store(StepPlan(weights=1))
    mover.loads.put(FinishedLoad(request=plan.request, failed=(), seconds=0.1))
    (over,) = watched.finished(StepPlan(weights=1))
    assert over.failed == plan.device_blocks


def test_nothing_touches_the_device_after_a_drain(mover: Mover, device: Device) -> None:
    mover.put(store_job(device, 1))
    waiting = DrainJob()
    mover.put(waiting)
    thread = threading.Thread(target=mover.turn)
    thread.start()
    assert device.begun_one.wait(DEADLINE_S)
    assert device.begun[0].awaited.wait(DEADLINE_S)
    assert not waiting.done.is_set()
    device.begun[0].end()
    thread.join(DEADLINE_S)
    assert waiting.done.is_set()
    assert mover.stores.get_nowait().failed == ()

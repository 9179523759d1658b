"""The engine's thread while copies run by themselves: it waits for what it must, and never for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.protocol import StepPlan
from kvbm.worker.jobs import DrainJob, FinishedLoad, Mark, StoreJob
from kvbm.worker.worker import Worker
from rigs.copies_beside import DEADLINE_S, HELLO, LAYERS, Device, load, make_mover, stores, told


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def mover(device: Device) -> Iterator[Any]:
    made = make_mover(device)
    line = made._channel
    yield made
    line.close()


@pytest.fixture
def worker(device: Device, mover: Any) -> Iterator[Any]:
    """A worker whose copies run beside the engine, and whose mover the test drives by a thread."""
    cache: Any = SimpleNamespace(layers=dict.fromkeys(LAYERS), device=SimpleNamespace(type="cuda"))
    made: Any = Worker(SimpleNamespace(attempt=lambda: None), HELLO, cache)  # type: ignore[arg-type]
    made._mover = mover
    return made


def test_the_engine_waits_for_released_stores_only(worker: Any, mover: Any, device: Device) -> None:
    worker.store(StepPlan(stores=stores(1, 2)))
    mover._take_jobs()
    assert device.held == []
    worker.store(StepPlan())
    assert device.held == [], "a step with nothing to do does nothing"
    worker.store(StepPlan(released=(2,)))
    assert [copying.pairs for copying in device.held] == [[(2, 2)]]
    for copying in device.begun:
        copying.end()
    mover._storing.collect(wait=False)
    assert worker.report().stored.keys() == {1, 2}
    worker.store(StepPlan(released=(1,)))
    assert len(device.held) == 1, "it was told to be over"
    assert worker._storing == {}


def test_a_store_released_in_its_own_step_is_held(worker: Any, mover: Any, device: Device) -> None:
    """The thread waits until it was begun: there is no event to wait for before."""
    engine = threading.Thread(target=worker.store, args=(StepPlan(stores=stores(3), released=(3,)),))
    engine.start()
    engine.join(0.05)
    assert engine.is_alive()
    mover._take_jobs()
    engine.join(DEADLINE_S)
    assert not engine.is_alive()
    assert device.held == device.begun


def test_a_load_comes_after_the_stores_that_its_step_releases(
    worker: Any, mover: Any, device: Device
) -> None:
    """It may go into their blocks, which the engine got back and gave away again before the same step."""
    device.mark = lambda: len(device.held)  # type: ignore[method-assign, assignment, return-value]
    worker.store(StepPlan(stores=stores(1)))
    mover._take_jobs()
    plan = StepPlan(released=(1,), loads=(load(),))
    worker.store(plan)
    worker.load(plan)
    assert mover._inbox.get_nowait().after.event == 1, "the mark lies behind the wait for the store"


def test_a_store_that_does_not_begin_in_time_is_given_up(
    worker: Any, mover: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.worker.worker.STORE_TIMEOUT_S", 0.01)
    device.at_once = True
    worker.store(StepPlan(stores=stores(3), released=(3,)))
    mover._take_jobs()
    assert told(mover) == [(3, (0,))]


def test_a_layer_that_never_comes_is_given_up_and_told_as_failed(
    worker: Any, mover: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mover is stuck: the engine goes on, with blocks that it must compute."""
    monkeypatch.setattr("kvbm.worker.worker.LAYER_TIMEOUT_S", 0.01)
    plan = StepPlan(loads=(load(True, blocks=2),))
    worker.load(plan)
    for layer in LAYERS:
        worker.wait_for_layer(layer)
    (given_up,) = worker.finished(plan)
    assert (given_up.failed, given_up.layerwise) == ((0, 1), True)
    device.at_once = True
    mover._take_jobs()
    assert worker.finished(StepPlan()) == [], "it was told already"
    assert device.begun == [], "and nothing is written behind the engine's back"


def test_without_a_session_no_layer_is_waited_for(worker: Any, mover: Any, device: Device) -> None:
    """Its thread may be busy joining a manager for seconds."""
    mover._lose("a test")
    plan = StepPlan(loads=(load(True, blocks=2),))
    worker.load(plan)
    for layer in LAYERS:
        worker.wait_for_layer(layer)
    (failed,) = worker.finished(plan)
    assert (failed.failed, failed.layerwise) == ((0, 1), True)
    assert worker.finished(StepPlan()) == []


def test_a_device_without_events_costs_the_copies(worker: Any, mover: Any, device: Device) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    device.mark = lost  # type: ignore[method-assign, assignment]
    worker.store(StepPlan(stores=stores(4)))
    mover._take_jobs()
    assert worker.report().stored[4][1] == (0,)


# ---- weights that change in memory


@pytest.fixture
def changes() -> list[int]:
    """How often the rank's weights changed, at its end."""
    return [0]


@pytest.fixture
def watched(device: Device, mover: Any, changes: list[int]) -> Any:
    """A worker that is told of its weights."""
    cache: Any = SimpleNamespace(layers=dict.fromkeys(LAYERS), device=SimpleNamespace(type="cuda"))
    finder: Any = SimpleNamespace(attempt=lambda: None)
    made: Any = Worker(finder, HELLO, cache, weights_changes=lambda: changes[-1])
    made._mover = mover
    return made


def test_a_plan_that_knows_nothing_of_new_weights_is_refused(
    watched: Any, mover: Any, device: Device, changes: list[int]
) -> None:
    changes.append(1)
    plan = StepPlan(stores=stores(1), loads=(load(),))
    watched.store(plan)
    watched.load(plan)
    mover._take_jobs()
    assert device.begun == [], "neither the bytes of one nor the name of the other"
    (failed,) = watched.finished(plan)
    assert failed.failed == load().device_blocks
    report = watched.report()
    assert report.weights_changed
    assert report.stored[1][1] == tuple(range(len(stores(1)[0].slots)))
    watched.store(StepPlan(stores=stores(3)))
    assert watched.report().weights_changed, "until a plan shows that the leader knows"
    watched.store(StepPlan(stores=stores(4), weights=1))
    mover._take_jobs()
    assert [copying.what for copying in device.begun] == ["store"]
    assert watched.report() is None


def test_a_replica_that_knows_better_says_so(device: Device, mover: Any, changes: list[int]) -> None:
    """It stores nothing itself, and must not vouch for what its peer copies."""
    cache: Any = SimpleNamespace(layers=dict.fromkeys(LAYERS), device=SimpleNamespace(type="cuda"))
    finder: Any = SimpleNamespace(attempt=lambda: None)
    replica: Any = Worker(finder, HELLO, cache, stores_here=False, weights_changes=lambda: changes[-1])
    replica._mover = mover
    replica.store(StepPlan(stores=stores(1)))
    assert replica.report().stored[1][1] == ()
    changes.append(1)
    replica.store(StepPlan(stores=stores(2)))
    assert replica.report().stored[2][1] == (0,)


def test_a_leader_that_knew_first_is_told_nothing(watched: Any, changes: list[int]) -> None:
    changes.append(3)
    watched.store(StepPlan(weights=1))
    assert watched.report() is None


def test_a_load_that_began_before_the_change_failed(
    watched: Any, mover: Any, device: Device, changes: list[int]
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


def test_nothing_touches_the_device_after_a_drain(mover: Any, device: Device) -> None:
    mover.put(StoreJob(stores(1), Mark(device, "mark")))  # type: ignore[arg-type]
    waiting = DrainJob()
    mover.put(waiting)
    engine = threading.Thread(target=mover._take_jobs)
    engine.start()
    while not device.begun:
        engine.join(0.001)
    assert not waiting.done.is_set()
    device.begun[0].end()
    engine.join(DEADLINE_S)
    assert waiting.done.is_set()
    assert mover.stores.get_nowait().failed == ()

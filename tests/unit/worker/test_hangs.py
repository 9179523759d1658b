"""Copies that never end, and calls that never return: nothing waits for them, and nothing gets the memory that they may
still write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.clock import ManualClock
from kvbm.errors import CopyHung
from kvbm.protocol import CopiesHang, Fence
from kvbm.step_plan import StepPlan
from kvbm.transfer.copier import COPY_S_MAX
from kvbm.worker.hang_watch import LATE_S, Watches
from kvbm.worker.jobs import DrainJob
from kvbm.worker.mover import Mover
from kvbm.worker.worker import Worker
from rigs.copies_beside import (
    FIRST_BLOCKS,
    LAYERS,
    Device,
    Finder,
    Line,
    load,
    make_mover,
    reported,
    step,
    store_job,
    stores,
)

CACHE: Any = SimpleNamespace(layers=dict.fromkeys(LAYERS), device=SimpleNamespace(type="cuda"))
LOAD = load(blocks=FIRST_BLOCKS)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10.0)


@pytest.fixture
def mover(device: Device, line: Line, clock: ManualClock) -> Mover:
    return make_mover(Finder(line), device, clock=clock)


@pytest.fixture
def worker(mover: Mover, clock: ManualClock) -> Worker:
    return Worker(mover, CACHE, clock=clock)


def test_a_store_that_hangs_turns_the_rank_off_and_keeps_its_slots(
    worker: Worker,
    mover: Mover,
    device: Device,
    line: Line,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker.store(StepPlan(stores=stores(1)))
    step(mover)
    line.say(Fence(fence=5, stores=(1,)))
    step(mover)
    clock.advance(COPY_S_MAX + 1.0)
    with caplog.at_level(logging.INFO, logger="kvbm.worker"):
        step(mover, turns=3)
    assert len(caplog.records) == 1
    assert "KVBM is off in this rank from now on: a store has not ended within 120 s" in caplog.text
    assert line.sent == [CopiesHang()], "the fence is not answered: the slot may still be written"
    assert not line.closed
    assert reported(mover) == [], "it is not known to have failed: its slot would be given to another block"
    plan = StepPlan(stores=stores(2), loads=(LOAD,), released=(1, 2))
    worker.store(plan)
    worker.load(plan)
    step(mover)
    (failed,) = worker.finished(plan)
    assert failed.failed == LOAD.device_blocks
    assert worker.report().stored.keys() == {2}  # type: ignore[union-attr]
    assert (len(device.begun), device.held) == (1, []), "the engine's stream would wait for ever"
    device.begun[0].end()
    step(mover)
    assert line.closed, "it ended after all: the manager has its slots back"
    assert reported(mover) == [(1, (0,))]
    step(mover)
    mover.put(store_job(device, 3))
    step(mover)
    assert reported(mover) == [(3, (0,))], "but no copy is begun any more"


def test_the_device_does_not_wait_for_a_store_that_may_hang(
    worker: Worker, mover: Mover, device: Device, clock: ManualClock
) -> None:
    """The engine's thread does, with a limit."""
    for number in (1, 2, 3):
        worker.store(StepPlan(stores=stores(number)))
    step(mover)
    worker.store(StepPlan(released=(1,)))
    assert device.held == device.begun[:1]
    clock.advance(LATE_S + 1.0)
    step(mover)
    device.begun[1].patient = device.begun[2].hangs = True
    worker.store(StepPlan(released=(2, 3)))
    assert (len(device.held), device.begun[1].over) == (1, True)
    device.begun[2].hangs = False
    device.end_all()
    step(mover)
    assert reported(mover) == [(1, ()), (2, ()), (3, (0,))]
    worker.store(StepPlan(stores=stores(4)))
    step(mover)
    worker.store(StepPlan(released=(4,)))
    assert len(device.held) == 2, "copies end again"
    device.end_all()


def test_copies_that_wait_for_others_do_not_hang(mover: Mover, device: Device, clock: ManualClock) -> None:
    """They end in order: the time of each begins with the end of the one before."""
    mover.put(store_job(device, 1, 2))
    step(mover)
    clock.advance(COPY_S_MAX - 1.0)
    device.begun[0].end()
    step(mover)
    clock.advance(COPY_S_MAX - 1.0)
    step(mover)
    assert not mover.watches.stores_hang
    clock.advance(2.0)
    step(mover)
    assert mover.watches.stores_hang


def test_a_load_that_hangs_ends_the_engine(
    worker: Worker, mover: Mover, device: Device, line: Line, clock: ManualClock
) -> None:
    """Its request cannot be computed: the load may write into whatever blocks that takes, and into others' later."""
    plan = StepPlan(loads=(LOAD,))
    worker.load(plan)
    step(mover)
    assert worker.finished(plan) == []
    clock.advance(COPY_S_MAX + 1.0)
    step(mover, turns=2)
    assert mover.loads.empty(), "its blocks would be given to others"
    assert line.sent == [CopiesHang()]
    for _ in range(2):
        with pytest.raises(CopyHung, match="KVBM ends this engine: a load has not ended within 120 s"):
            worker.finished(StepPlan())


def test_copies_of_both_kinds_that_hang_are_logged_once(
    worker: Worker, mover: Mover, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    plan = StepPlan(stores=stores(1), loads=(LOAD,))
    worker.store(plan)
    step(mover)
    clock.advance(COPY_S_MAX / 2)
    worker.load(plan)
    step(mover)
    for _ in range(2):
        clock.advance(COPY_S_MAX / 2 + 1.0)
        step(mover)
    assert mover.watches.stores_hang and mover.watches.loads_hang
    assert caplog.text.count("KVBM is off in this rank from now on") == 1


class AskedWatches(Watches):
    """The copying thread takes its turns whenever the engine's asks whether loads hang."""

    def __init__(self, mover: Mover, between: Callable[[], object]) -> None:
        self._watches, self._turn = mover.watches, lambda: (between(), step(mover))
        mover.watches = self

    @property
    def is_stuck(self) -> bool:
        return self._watches.is_stuck

    @property
    def loads_hang(self) -> bool:
        self._turn()
        return self._watches.loads_hang


@pytest.fixture
def by_layer(worker: Worker, mover: Mover, monkeypatch: pytest.MonkeyPatch) -> StepPlan:
    """A load by layer that the forward pass has gone through, and whose copies are under way."""
    monkeypatch.setattr("kvbm.worker.worker.LAYER_TIMEOUT_S", 0.0)
    monkeypatch.setattr("kvbm.worker.worker.HANG_POLL_S", 0.0)
    plan = StepPlan(loads=(load(layerwise=True, blocks=2),))
    worker.load(plan)
    step(mover)
    for layer in LAYERS:
        worker.wait_for_layer(layer)
    return plan


def test_a_load_by_layer_that_hangs_ends_the_engine(
    worker: Worker, mover: Mover, device: Device, clock: ManualClock, by_layer: StepPlan
) -> None:
    device.begun[0].end()
    AskedWatches(mover, lambda: clock.advance(COPY_S_MAX / 2 + 1.0))
    with pytest.raises(CopyHung, match="KVBM ends this engine"):
        worker.finished(by_layer)


def test_a_load_by_layer_that_gets_on_is_waited_for(
    worker: Worker, mover: Mover, device: Device, clock: ManualClock, by_layer: StepPlan
) -> None:
    """Each of its copies has a time of its own."""
    copies = iter(device.begun)

    def end_next() -> None:
        clock.advance(COPY_S_MAX - 1.0)
        next(copies).end()

    AskedWatches(mover, end_next)
    (ended,) = worker.finished(by_layer)
    assert ended.failed == ()
    assert next(copies, None) is None


def test_a_load_by_layer_that_has_not_begun_is_reported_once(
    worker: Worker, mover: Mover, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.worker.worker.LAYER_TIMEOUT_S", 0.0)
    plan = StepPlan(loads=(load(layerwise=True, blocks=2),))
    worker.load(plan)
    (ended,) = worker.finished(plan)
    assert ended.failed == (0, 1)
    step(mover)
    assert device.begun == []
    assert worker.finished(StepPlan()) == []


def test_a_load_beside_a_store_that_hangs_ends_by_itself(
    worker: Worker, mover: Mover, device: Device, clock: ManualClock
) -> None:
    worker.store(StepPlan(stores=stores(1)))
    step(mover)
    clock.advance(COPY_S_MAX / 2)
    worker.load(StepPlan(loads=(LOAD,)))
    step(mover)
    clock.advance(COPY_S_MAX / 2 + 1.0)
    step(mover)
    assert mover.watches.stores_hang
    device.begun[1].end()
    step(mover)
    (ended,) = worker.finished(StepPlan())
    assert ended.failed == ()


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_call_that_does_not_return_costs_no_step_its_time(
    worker: Worker, mover: Mover, device: Device, clock: ManualClock, what: str
) -> None:
    """The copying thread is inside of it, and answers nothing."""
    first = StepPlan(stores=stores(1)) if what == "store" else StepPlan(loads=(LOAD,))

    def inside() -> None:
        device.when_begun = lambda: None
        clock.advance(COPY_S_MAX - 1.0)
        assert not mover.watches.is_stuck
        clock.advance(2.0)
        if what == "load":
            with pytest.raises(CopyHung, match="KVBM ends this engine"):
                worker.finished(StepPlan())
        else:
            plan = StepPlan(stores=stores(2), loads=(LOAD,), released=(2,))
            worker.store(plan)
            worker.load(plan)
            assert [each.failed for each in worker.finished(plan)] == [LOAD.device_blocks]
            assert worker.report().stored == {2: (1, (0,), 0.0)}  # type: ignore[union-attr]
        checked.append(what)

    checked: list[str] = []
    device.when_begun = inside
    worker.store(first)
    worker.load(first)
    step(mover)
    assert checked == [what]


def test_a_load_behind_a_call_that_does_not_return_ends_the_engine(
    worker: Worker, mover: Mover, device: Device, clock: ManualClock
) -> None:
    """Nothing answers for it."""

    def inside() -> None:
        device.when_begun = lambda: None
        worker.load(StepPlan(loads=(LOAD,)))
        clock.advance(COPY_S_MAX + 1.0)
        with pytest.raises(CopyHung, match="KVBM ends this engine"):
            worker.finished(StepPlan())
        checked.append(True)

    checked: list[bool] = []
    device.when_begun = inside
    worker.store(StepPlan(stores=stores(1)))
    step(mover)
    assert checked == [True]


def test_a_session_that_is_lost_while_a_store_hangs_stays_open(
    mover: Mover, device: Device, line: Line
) -> None:
    """Its end would say that nothing is written any more."""
    mover.put(store_job(device, 1))
    step(mover)
    device.begun[0].hangs = True
    line.hang_up()
    step(mover, turns=3)
    assert not line.closed
    assert mover.watches.stores_hang
    assert reported(mover) == []
    mover.stop()
    assert not line.closed
    assert not device.closed, "the device may use the memory until the process ends"


def test_an_engine_that_goes_to_sleep_is_told_that_copies_hang(mover: Mover, device: Device) -> None:
    mover.put(store_job(device, 1))
    step(mover)
    device.begun[0].hangs = True
    job = DrainJob()
    mover.put(job)
    step(mover)
    assert not job.done.is_set()
    again = DrainJob()
    mover.put(again)
    step(mover)
    assert not again.done.is_set()


def test_stores_that_do_not_begin_are_waited_for_once(
    worker: Worker, mover: Mover, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps would take a minute each while the copying thread is stuck."""
    monkeypatch.setattr("kvbm.worker.worker.STORE_TIMEOUT_S", 0.01)
    worker.store(StepPlan(stores=stores(1), released=(1,)))
    monkeypatch.setattr("kvbm.worker.worker.STORE_TIMEOUT_S", "no time")
    worker.store(StepPlan(stores=stores(2), released=(2,)))
    device.at_once = True
    step(mover)
    assert reported(mover) == [(1, (0,)), (2, (0,))]
    with pytest.raises(TypeError):
        worker.store(StepPlan(stores=stores(3), released=(3,)))


def test_the_engine_waits_for_nothing_that_is_not_released(
    worker: Worker, mover: Mover, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for copies to begin nor for their ends."""
    monkeypatch.setattr("kvbm.worker.worker.STORE_TIMEOUT_S", "no time")
    worker.store(StepPlan(stores=stores(1)))
    worker.store(StepPlan(stores=stores(2)))
    assert device.begun == []
    step(mover)
    worker.store(StepPlan())
    assert (len(device.begun), device.held) == (2, [])
    device.end_all()

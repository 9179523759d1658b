"""Copies that run by themselves, as on a GPU: what waits for what, and what is told when."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.errors import DeviceLost
from kvbm.protocol import PROTOCOL_VERSION, Fence, FenceDone, Hello, LoadPlan, StepPlan, StorePlan
from kvbm.worker.jobs import PIECE_BLOCKS, PIECES_UNDER_WAY, LayerGate, LoadJob, Mark, StoreJob
from kvbm.worker.mover import Mover
from kvbm.worker.worker import Worker

BLOCKS = 4 * PIECE_BLOCKS
LAYERS = ("a", "b", "c")
DEADLINE_S = 20.0
HELLO = Hello(version=PROTOCOL_VERSION, role="worker", engine="e")


class Copying:
    """A copy that ends when the test says so."""

    def __init__(self, what: str, pairs: list[tuple[int, int]], layer: str | None = None) -> None:
        self.what, self.pairs, self.layer = what, pairs, layer
        self.error: Exception | None = None
        self._over = threading.Event()

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self._over.set()

    def done(self) -> bool:
        if self._over.is_set() and self.error:
            raise self.error
        return self._over.is_set()

    def wait(self) -> None:
        assert self._over.wait(DEADLINE_S), "waits for a copy that the test has not ended"
        if self.error:
            raise self.error


class Device:
    """A mapping and its copier: everything that was begun, and what the engine's stream was told to wait for."""

    epoch = 1
    layers = LAYERS

    def __init__(self) -> None:
        self.copier = self
        self.begun: list[Copying] = []
        self.held: list[Copying] = []
        self.changed: set[int] = set()
        self.at_once = False

    def mark(self) -> str:
        return "mark"

    def intact(self, slots: tuple[int, ...], generations: tuple[int, ...]) -> int:
        return next((i for i, slot in enumerate(slots) if slot in self.changed), len(slots))

    def begin_store(self, pairs: Any, after: Any) -> Copying:
        return self._begin("store", pairs)

    def begin_load(self, pairs: Any, after: Any, layer: str | None = None) -> Copying:
        return self._begin("load", pairs, layer)

    def hold(self, copying: Copying) -> None:
        self.held.append(copying)

    def close(self) -> None:
        assert all(copying.done() for copying in self.begun)

    def _begin(self, what: str, pairs: Any, layer: str | None = None) -> Copying:
        self.begun.append(Copying(what, list(pairs), layer))
        if self.at_once:
            self.begun[-1].end()
        return self.begun[-1]


class Line:
    """A session that takes what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.incoming: list[Any] = []
        self.closed = False
        self.fds: list[int] = []
        self._descriptor = os.eventfd(0)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> list[Any]:
        messages, self.incoming = self.incoming, []
        return messages

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        self.closed = True


def stores(*numbers: int) -> tuple[StorePlan, ...]:
    return tuple(
        StorePlan(store=n, epoch=1, slots=(n,), generations=(0,), device_blocks=(n,)) for n in numbers
    )


def load(layerwise: bool = False, blocks: int = BLOCKS) -> LoadPlan:
    numbers = tuple(range(blocks))
    return LoadPlan(
        request="r",
        lookup=1,
        epoch=1,
        slots=numbers,
        generations=(0,) * blocks,
        device_blocks=numbers,
        offset=0,
        ready=blocks,
        layerwise=layerwise,
    )


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def mover(device: Device) -> Iterator[Any]:
    """A mover that no thread runs: the test takes its turns."""
    made: Any = Mover(SimpleNamespace(attempt=lambda: None), HELLO, lambda *_: device, lambda: 0.0)  # type: ignore[arg-type, return-value]
    line = made._channel = Line()
    made._mapping = device
    yield made
    line.close()


def job_of(device: Device, plan: LoadPlan, gate: LayerGate | None = None) -> LoadJob:
    mark = Mark(device, None)  # type: ignore[arg-type]
    return LoadJob(plan, mark, ready=plan.ready, started_s=0.0, heard_s=0.0, layers=gate)


def told(mover: Any) -> list[tuple[int, tuple[int, ...]]]:
    """The stores reported so far: (number, failed)."""
    found = []
    while not mover.stores.empty():
        store = mover.stores.get_nowait()
        found.append((store.store, store.failed))
    return found


# ---- stores


def test_a_store_is_told_when_it_is_over_and_not_before(mover: Any, device: Device) -> None:
    job = StoreJob(stores(1, 2), Mark(device, None))  # type: ignore[arg-type]
    mover._store(job)
    assert job.begun.is_set()
    assert told(mover) == []
    device.begun[1].end()
    mover._collect_stores(wait=False)
    assert told(mover) == [], "in order: the first one still runs"
    device.begun[0].end()
    mover._collect_stores(wait=False)
    assert told(mover) == [(1, ()), (2, ())]


def test_a_fence_is_answered_when_nothing_is_under_way(mover: Any, device: Device) -> None:
    mover._store(StoreJob(stores(1), Mark(device, None)))  # type: ignore[arg-type]
    line = mover._channel
    line.incoming = [Fence(fence=5, stores=(7,))]
    thread = threading.Thread(target=mover._listen, args=(line,))
    thread.start()
    thread.join(0.05)
    assert line.sent == []
    device.begun[0].end()
    thread.join(DEADLINE_S)
    assert line.sent == [FenceDone(fence=5)]
    assert told(mover) == [(1, ())]


def test_a_session_is_closed_when_nothing_is_under_way(mover: Any, device: Device) -> None:
    """A manager that lives takes the end of the session as word that nobody writes any more."""
    mover._store(StoreJob(stores(1), Mark(device, None)))  # type: ignore[arg-type]
    line = mover._channel
    thread = threading.Thread(target=mover._lose, args=("a test",))
    thread.start()
    thread.join(0.05)
    assert not line.closed
    device.begun[0].end()
    thread.join(DEADLINE_S)
    assert line.closed


def test_a_copy_that_fails_on_its_way_fails_its_store_alone(mover: Any, device: Device) -> None:
    mover._store(StoreJob(stores(1, 2), Mark(device, None)))  # type: ignore[arg-type]
    device.begun[0].end(RuntimeError("device-side error\nand a long story"))
    device.begun[1].end()
    mover._collect_stores(wait=False)
    assert told(mover) == [(1, (0,)), (2, ())]


def test_a_lost_device_is_told_once_and_ends_the_session(
    mover: Any, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    line = mover._channel
    mover._store(StoreJob(stores(1, 2), Mark(device, None)))  # type: ignore[arg-type]
    for copying in device.begun:
        copying.end(DeviceLost("cuMemcpyBatchAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700)"))
    mover._turn()
    assert [failed for _, failed in told(mover)] == [(0,), (0,)]
    assert line.closed
    mover.put(job_of(device, load()))
    mover._turn()
    assert mover.loads.get_nowait().failed == tuple(range(BLOCKS))
    assert [copying.what for copying in device.begun] == ["store", "store"], "nothing is begun any more"
    lines = [record for record in caplog.records if "KVBM is off" in record.message]
    assert len(lines) == 1


# ---- loads


def test_the_next_piece_is_begun_while_one_is_copied(mover: Any, device: Device) -> None:
    mover._begin_load(job_of(device, load()))
    for _ in range(PIECES_UNDER_WAY):
        mover._copy_pieces()
    assert len(device.begun) == PIECES_UNDER_WAY
    for index in range(BLOCKS // PIECE_BLOCKS):
        device.begun[index].end()
        mover._copy_pieces()  # ends one
        if len(device.begun) * PIECE_BLOCKS < BLOCKS:
            mover._copy_pieces()  # begins one
    assert mover.loads.get_nowait().failed == ()
    assert [pair for copying in device.begun for pair in copying.pairs] == [(i, i) for i in range(BLOCKS)]


def test_what_follows_a_piece_that_failed_failed_too(mover: Any, device: Device) -> None:
    """And it has ended before the engine hears of it: it computes these blocks anew."""
    mover._begin_load(job_of(device, load()))
    for _ in range(PIECES_UNDER_WAY):
        mover._copy_pieces()
    device.begun[0].end(RuntimeError("device-side error"))
    thread = threading.Thread(target=mover._copy_pieces)
    thread.start()
    thread.join(0.05)
    assert mover.loads.empty(), "the second piece still writes to the device"
    device.begun[1].end()
    thread.join(DEADLINE_S)
    assert mover.loads.get_nowait().failed == tuple(range(BLOCKS))


def test_a_slot_that_changes_under_a_later_piece_costs_that_piece(mover: Any, device: Device) -> None:
    device.at_once = True
    mover._begin_load(job_of(device, load()))
    for _ in range(PIECES_UNDER_WAY):
        mover._copy_pieces()
    device.changed = {PIECE_BLOCKS + 3}
    for _ in range(BLOCKS // PIECE_BLOCKS + 2):
        mover._copy_pieces()
    assert mover.loads.get_nowait().failed == tuple(range(PIECE_BLOCKS + 3, BLOCKS))


# ---- layer by layer


def test_layers_come_in_order_and_each_is_announced_at_once(mover: Any, device: Device) -> None:
    gate = LayerGate(dict.fromkeys(LAYERS))
    thread = threading.Thread(target=mover._begin_load, args=(job_of(device, load(True), gate),))
    thread.start()
    mark = Mark(device, None)  # type: ignore[arg-type]
    for layer in LAYERS:
        assert gate.pass_through(layer, mark, DEADLINE_S)
    assert [copying.layer for copying in device.begun] == list(LAYERS)
    assert device.held == device.begun, "the device waits for them, the thread did not"
    assert not gate.over.is_set()
    for copying in device.begun:
        copying.end()
    thread.join(DEADLINE_S)
    assert gate.over.is_set()
    assert mover.loads.get_nowait().failed == ()
    assert gate.pass_through("a layer that shares another one's KV", mark, 0.0)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_layer_that_fails_fails_the_load_and_nobody_waits(mover: Any, device: Device, failing: int) -> None:
    def begin(pairs: Any, after: Any, layer: str | None = None) -> Copying:
        copying = Copying("load", list(pairs), layer)
        device.begun.append(copying)
        copying.end(RuntimeError("device-side error") if layer == LAYERS[failing] else None)
        if failing == 0:
            raise RuntimeError("refused")
        return copying

    device.begin_load = begin  # type: ignore[method-assign]
    gate = LayerGate(dict.fromkeys(LAYERS))
    mover._begin_load(job_of(device, load(True), gate))
    load_told = mover.loads.get_nowait()
    assert load_told.layerwise
    assert load_told.failed == tuple(range(BLOCKS))
    for layer in LAYERS:
        assert gate.pass_through(layer, None, 0.0)


def test_a_layerwise_load_of_another_life_opens_the_gate(mover: Any, device: Device) -> None:
    gate = LayerGate(dict.fromkeys(LAYERS))
    job = job_of(device, load(True), gate)
    job.after = None
    mover._begin_load(job)
    assert mover.loads.get_nowait().failed == tuple(range(BLOCKS))
    assert gate.over.is_set()


# ---- the engine's thread


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
    mover._collect_stores(wait=False)
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

"""Copies that run by themselves, as on a GPU: when they are begun, what waits for their end, and what is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.errors import DeviceLost
from kvbm.protocol import Fence, FenceDone
from kvbm.worker.jobs import PIECE_BLOCKS, PIECES_UNDER_WAY, Mark, StoreJob
from kvbm.worker.layers import LayerGate
from rigs.copies_beside import (
    BLOCKS,
    DEADLINE_S,
    LAYERS,
    Copying,
    Device,
    job_of,
    load,
    make_mover,
    stores,
    told,
)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def mover(device: Device) -> Iterator[Any]:
    made = make_mover(device)
    line = made._channel
    yield made
    line.close()


# ---- stores


def test_a_store_is_told_when_it_is_over_and_not_before(mover: Any, device: Device) -> None:
    job = StoreJob(stores(1, 2), Mark(device, None))  # type: ignore[arg-type]
    mover._store(job)
    assert job.begun.is_set()
    assert told(mover) == []
    device.begun[1].end()
    mover._storing.collect(wait=False)
    assert told(mover) == [], "in order: the first one still runs"
    device.begun[0].end()
    mover._storing.collect(wait=False)
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
    mover._storing.collect(wait=False)
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


def test_the_copying_thread_introduces_itself_once_to_each_copier(mover: Any, device: Device) -> None:
    later = Device()
    mover._channel.close()
    mover._channel = None
    mover.start()
    mover.put(StoreJob((), None))
    while not device.adopted_by:
        assert mover._thread.is_alive()
        time.sleep(0.001)
    mover._mapping = later
    mover.put(StoreJob((), None))
    while not later.adopted_by:
        assert mover._thread.is_alive()
        time.sleep(0.001)
    mover.stop()
    assert device.adopted_by == later.adopted_by == ["kvbm-mover"]

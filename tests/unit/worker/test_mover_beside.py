"""Copies that run by themselves, as on a GPU: when they are begun, what waits for their end, and what is reported."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.errors import DeviceLost
from kvbm.protocol import Fence, FenceDone, Progress, Watch
from kvbm.step_plan import LoadPlan
from kvbm.worker.jobs import LoadJob, StoreJob
from kvbm.worker.layers import LayerGate
from kvbm.worker.mapping import Mark
from kvbm.worker.mover import Mover
from rigs.copies_beside import (
    BLOCKS,
    DEADLINE_S,
    FIRST_BLOCKS,
    LAYERS,
    PIECE_BLOCKS,
    WINDOW_BLOCKS,
    Copying,
    Device,
    Finder,
    Line,
    job_of,
    load,
    make_mover,
    reported,
    step,
    store_job,
)


def turn_beside(mover: Mover) -> threading.Thread:
    """A turn that waits, in a thread."""
    thread = threading.Thread(target=mover.turn)
    thread.start()
    return thread


# ---- stores


def test_a_store_is_reported_when_it_is_over_and_not_before(mover: Mover, device: Device) -> None:
    job = store_job(device, 1, 2)
    mover.put(job)
    step(mover)
    assert job.begun.is_set()
    assert reported(mover) == []
    device.begun[1].end()
    step(mover)
    assert reported(mover) == [], "in order: the first one still runs"
    device.begun[0].end()
    step(mover)
    assert reported(mover) == [(1, ()), (2, ())]


def test_a_fence_is_answered_when_what_was_under_way_is_over(
    mover: Mover, device: Device, line: Line
) -> None:
    mover.put(store_job(device, 1))
    step(mover)
    line.say(Fence(fence=5, stores=(7,)), Fence(fence=6, stores=()))
    step(mover)
    mover.put(store_job(device, 2))
    step(mover)
    assert line.sent == [], "a copy still writes to slots that the manager wants back"
    device.begun[0].end()
    step(mover)
    assert line.sent == [FenceDone(fence=5), FenceDone(fence=6)], "the later store is none of theirs"
    assert reported(mover) == [(1, ())]
    device.begun[1].end()


def test_no_turn_waits_for_a_copy(mover: Mover, device: Device, line: Line) -> None:
    """A store waits for the step that writes its blocks. Loads and fences go on meanwhile, and other stores begin."""
    mover.put(store_job(device, 1))
    mover.turn()
    mover.put(job_of(device, load(blocks=FIRST_BLOCKS)))
    mover.turn()
    line.say(Fence(fence=5, stores=(7,)))
    mover.turn()
    late = store_job(device, 2)
    mover.put(late)
    mover.turn()
    assert late.begun.is_set()
    store, piece, later = device.begun
    piece.end()
    mover.turn()
    assert mover.loads.get_nowait().failed == ()
    assert not any(copying.awaited.is_set() for copying in device.begun)
    store.end()
    mover.turn()
    assert line.sent == [FenceDone(fence=5)]
    later.end()


def test_a_store_that_a_fence_names_does_not_begin(mover: Mover, device: Device, line: Line) -> None:
    """Another rank may not have answered, so nothing in the shared memory says that the reservation is over."""
    line.say(Fence(fence=99, stores=(7,)))
    step(mover)
    mover.put(store_job(device, 7, 8))
    step(mover)
    assert reported(mover) == [(7, (0,))]
    assert [copying.pairs for copying in device.begun] == [[(8, 8)]]
    device.begun[0].end()


def test_a_session_is_closed_when_nothing_is_under_way(mover: Mover, device: Device, line: Line) -> None:
    """To a manager that lives, the end of the session means that nobody writes any more."""
    mover.put(store_job(device, 1))
    step(mover)
    line.hang_up()
    thread = turn_beside(mover)
    assert device.begun[0].awaited.wait(DEADLINE_S)
    assert not line.closed
    device.begun[0].end()
    thread.join(DEADLINE_S)
    assert line.closed


@pytest.mark.swallows("^RuntimeError: device-side error")
def test_a_copy_that_fails_on_its_way_fails_its_store_alone(mover: Mover, device: Device) -> None:
    mover.put(store_job(device, 1, 2))
    step(mover)
    device.begun[0].end(RuntimeError("device-side error\nand a long story"))
    device.begun[1].end()
    step(mover)
    assert reported(mover) == [(1, (0,)), (2, ())]


@pytest.mark.swallows("^DeviceLost: .*CUDA_ERROR_ILLEGAL_ADDRESS")
def test_a_lost_device_is_logged_once_and_ends_the_session(
    mover: Mover, device: Device, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    mover.put(store_job(device, 1, 2))
    step(mover)
    for copying in device.begun:
        copying.end(DeviceLost("cuMemcpyBatchAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700)"))
    step(mover)
    assert [failed for _, failed in reported(mover)] == [(0,), (0,)]
    assert line.closed
    mover.put(job_of(device, load()))
    step(mover)
    assert mover.loads.get_nowait().failed == tuple(range(BLOCKS))
    assert [copying.what for copying in device.begun] == ["store", "store"], "nothing is begun any more"
    lines = [record for record in caplog.records if "KVBM is off" in record.message]
    assert len(lines) == 1


# ---- loads


def pieces(device: Device) -> list[int]:
    """Blocks of each copy that was begun."""
    return [len(copying.pairs) for copying in device.begun]


def test_all_that_is_ready_is_begun_at_once_within_the_window(mover: Mover, device: Device) -> None:
    mover.put(job_of(device, load()))
    step(mover)
    assert pieces(device) == [FIRST_BLOCKS, *[PIECE_BLOCKS] * (WINDOW_BLOCKS // PIECE_BLOCKS)]
    for copying in device.begun[:3]:
        copying.end()
    step(mover)
    assert sum(pieces(device)) == BLOCKS, "what has ended made room"
    device.end_all()
    step(mover)
    assert mover.loads.get_nowait().failed == ()
    assert [pair for copying in device.begun for pair in copying.pairs] == [(i, i) for i in range(BLOCKS)]


def test_the_window_is_one_for_all_loads(mover: Mover, device: Device) -> None:
    for request in "ab":
        plan = msgspec.structs.replace(load(blocks=WINDOW_BLOCKS - 1), request=request)
        mover.put(job_of(device, plan))
    step(mover)
    assert sum(pieces(device)) == WINDOW_BLOCKS - 1 + PIECE_BLOCKS
    while mover.loads.empty():
        next(copying for copying in device.begun if not copying.over).end()
        step(mover)
    assert mover.loads.get_nowait().request == "a"
    assert sum(pieces(device)) == 2 * (WINDOW_BLOCKS - 1)
    device.end_all()


def test_a_store_that_is_put_while_pieces_are_begun_comes_next(mover: Mover, device: Device) -> None:
    job = store_job(device, 1)
    device.when_begun = lambda: device.begun[1:] or mover.put(job)
    mover.put(job_of(device, load()))
    step(mover, 2)
    assert [copying.what for copying in device.begun[:3]] == ["load", "store", "load"]
    assert job.begun.is_set()
    device.end_all()


def test_copies_that_end_as_they_begin_leave_room_for_others_between_them(
    mover: Mover, device: Device
) -> None:
    """As on a CPU, where beginning a piece takes as long as copying it."""
    device.at_once = True
    mover.put(job_of(device, load()))
    step(mover)
    assert len(device.begun) == 1
    step(mover, BLOCKS // FIRST_BLOCKS - 1)
    assert pieces(device) == [FIRST_BLOCKS] * (BLOCKS // FIRST_BLOCKS), "small ones: stores wait for each"
    assert mover.loads.get_nowait().failed == ()


@pytest.mark.swallows("^RuntimeError: device-side error$")
def test_what_follows_a_piece_that_failed_failed_too(mover: Mover, device: Device) -> None:
    """And it has ended before it is reported to the engine, which computes these blocks anew."""
    mover.put(job_of(device, load(blocks=FIRST_BLOCKS + 2 * PIECE_BLOCKS)))
    step(mover)
    device.begun[0].end()
    device.begun[1].end(RuntimeError("device-side error"))
    step(mover)
    assert mover.loads.empty(), "the third piece still writes to the device"
    device.begun[2].end(RuntimeError("device-side error"))
    step(mover)
    assert mover.loads.get_nowait().failed == tuple(range(FIRST_BLOCKS, FIRST_BLOCKS + 2 * PIECE_BLOCKS))


@pytest.mark.swallows("^RuntimeError: refused$")
def test_pieces_before_one_that_could_not_be_begun_arrive(mover: Mover, device: Device) -> None:
    mover.put(job_of(device, load()))
    device.refused_from = 2
    step(mover)
    assert len(device.begun) == 2
    assert mover.loads.empty()
    device.end_all()
    step(mover)
    assert mover.loads.get_nowait().failed == tuple(range(FIRST_BLOCKS + PIECE_BLOCKS, BLOCKS))


def test_a_slot_that_changes_under_a_later_piece_costs_that_piece(mover: Mover, device: Device) -> None:
    mover.put(job_of(device, load()))
    step(mover)
    device.changed = {FIRST_BLOCKS + 3}
    device.end_all()
    step(mover)
    assert mover.loads.get_nowait().failed == tuple(range(FIRST_BLOCKS + 3, BLOCKS))


def late_load(device: Device) -> LoadJob:
    """Of blocks 2, 3 and 4 of a lookup, none of which lies in host memory yet."""
    numbers = (2, 3, 4)
    plan = LoadPlan(
        request="r",
        lookup=1,
        epoch=1,
        slots=numbers,
        generations=(0, 0, 0),
        device_blocks=numbers,
        offset=2,
        ready=0,
    )
    return job_of(device, plan)


def test_progress_counts_from_the_first_block_of_the_lookup(mover: Mover, device: Device, line: Line) -> None:
    """The device has the first two already: that these have come begins no copy."""
    device.at_once = True
    mover.put(late_load(device))
    step(mover)
    assert line.sent == [Watch(lookup=1)]
    line.say(Progress(lookup=1, ready=2, final=False))
    step(mover, 2)
    assert device.begun == []
    line.say(Progress(lookup=1, ready=4, final=False))
    step(mover, 2)
    assert [pair for copying in device.begun for pair in copying.pairs] == [(2, 2), (3, 3)]
    line.say(Progress(lookup=1, ready=5, final=True))
    step(mover, 2)
    assert mover.loads.get_nowait().failed == ()


def test_a_job_that_ends_the_session_leaves_none_behind_it_waiting(device: Device, line: Line) -> None:
    """A load that needs the manager ends the turn, and the wake-up of both jobs is gone by then."""
    finder = Finder(line)
    mover = make_mover(finder, device)
    line.hang_up()
    step(mover)
    load_job, job = late_load(device), store_job(device, 1)

    def put_both() -> None:
        finder.attempt = lambda: None  # type: ignore[method-assign]
        mover.put(load_job)
        mover.put(job)

    finder.attempt = put_both  # type: ignore[method-assign, assignment]
    step(mover, 2)
    assert job.begun.is_set(), "the engine waits for a store that nobody looks at"
    assert reported(mover) == [(1, (0,))]
    assert mover.loads.get_nowait().failed == (2, 3, 4)


# ---- layer by layer


def test_layers_come_in_order_and_each_is_announced_at_once(mover: Mover, device: Device) -> None:
    gate = LayerGate(dict.fromkeys(LAYERS))
    mover.put(job_of(device, load(True), gate))
    step(mover)
    mark = Mark(device, None)  # type: ignore[arg-type]
    for layer in LAYERS:
        assert gate.pass_through(layer, mark, DEADLINE_S)
    assert [copying.layer for copying in device.begun] == list(LAYERS)
    assert device.held == device.begun, "the device waits for them, the thread did not"
    for copying in device.begun[:-1]:
        copying.end()
    step(mover)
    assert not gate.over.is_set()
    device.end_all()
    step(mover)
    assert gate.over.is_set()
    assert mover.loads.get_nowait().failed == ()
    assert gate.pass_through("a layer that shares another one's KV", mark, 0.0)


@pytest.mark.swallows("^RuntimeError: (refused|device-side error)$")
@pytest.mark.parametrize("failing", [0, 2])
def test_a_layer_that_fails_fails_the_load_and_nobody_waits(
    mover: Mover, device: Device, failing: int
) -> None:
    def begin(pairs: Any, after: Any, layer: str | None = None) -> Copying:
        copying = Copying("load", list(pairs), layer)
        device.begun.append(copying)
        copying.end(RuntimeError("device-side error") if layer == LAYERS[failing] else None)
        if failing == 0:
            raise RuntimeError("refused")
        return copying

    device.begin_load = begin  # type: ignore[method-assign]
    gate = LayerGate(dict.fromkeys(LAYERS))
    mover.put(job_of(device, load(True), gate))
    step(mover, 2)
    ended = mover.loads.get_nowait()
    assert ended.layerwise
    assert ended.failed == tuple(range(BLOCKS))
    for layer in LAYERS:
        assert gate.pass_through(layer, None, 0.0)


def test_a_layerwise_load_of_another_life_opens_the_gate(mover: Mover, device: Device) -> None:
    gate = LayerGate(dict.fromkeys(LAYERS))
    job = job_of(device, load(True), gate)
    job.after = None
    mover.put(job)
    step(mover)
    assert mover.loads.get_nowait().failed == tuple(range(BLOCKS))
    assert gate.over.is_set()


def test_the_copying_thread_introduces_itself_once_to_each_copier() -> None:
    lines, devices = [Line(1), Line(2)], [Device(1), Device(2)]
    mover = make_mover(Finder(*lines), *devices)
    mover.start()
    assert devices[0].adopted.wait(DEADLINE_S)
    mover.put(StoreJob((), None))
    lines[0].hang_up()
    assert devices[1].adopted.wait(DEADLINE_S)
    mover.put(StoreJob((), None))
    mover.stop()
    assert devices[0].adopted_by == devices[1].adopted_by == ["kvbm-mover"]

"""The CUDA copier beside its copies: page locks, and what goes wrong."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

from kvbm import numa
from kvbm.errors import CopyHung, DeviceLost, KvbmError
from kvbm.testing.kv_views import SLOTS, scramble, separate
from kvbm.transfer import arena_tensor
from kvbm.transfer.cuda import copier as cuda
from kvbm.transfer.cuda import page_lock, staging
from kvbm.transfer.cuda.copier import CudaCopier
from kvbm.transfer.cuda.driver import CudaError
from rigs.cuda_bench import check_loads, check_stores, lose, new_bench, wait_for_lock_call, warnings
from rigs.cuda_model import DEADLINE_S, LOST_TEXT, PAGE, Model

PIECE_SLOTS = 2
STAGED_SLOTS = 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two slots and a buffer for three each way: the arena here has slots of a page."""
    monkeypatch.setattr(page_lock, "PIECE_BYTES", PIECE_SLOTS * PAGE + 1)
    monkeypatch.setattr(staging, "STAGING_BYTES_MAX", 2 * (STAGED_SLOTS * PAGE + 1))


# Page locks


def test_the_arena_is_locked_piece_by_piece_in_slot_order() -> None:
    bench = new_bench(Model()).prepared()
    starts = range(0, SLOTS, PIECE_SLOTS)
    expected = {bench.arena[slot].data_ptr(): min(PIECE_SLOTS, SLOTS - slot) * PAGE for slot in starts}
    assert list(bench.model.locked.items()) == list(expected.items())
    bench.close()


def test_nothing_is_locked_before_the_engine_runs() -> None:
    """A start captures graphs and measures memory: locking would stand in its way."""
    model = Model()
    bench = new_bench(model, running=False)
    bench.copier._locking.join(0.05)
    assert (model.lock_calls, bench.copier._locking.is_alive()) == (0, True)
    check_stores(bench)  # the first copy goes through the buffer
    bench.prepared()
    assert model.lock_calls == -(-SLOTS // PIECE_SLOTS)
    bench.close()


def test_a_copier_that_never_copied_can_be_closed() -> None:
    model = Model()
    bench = new_bench(model, running=False)
    bench.close()
    assert model.lock_calls == 0


@pytest.mark.parametrize("method", ["batch", "rows"])
def test_slots_that_are_not_locked_yet_are_copied_through_the_buffer(method: str) -> None:
    model = Model()
    model.lock_gate = threading.Semaphore(2)
    bench = new_bench(model, method)
    wait_for_lock_call(model, 3)
    assert len(model.locked) == 2
    check_stores(bench)  # of slots on both sides of the frontier, more of them than the buffer has rows
    check_loads(bench)
    model.lock_gate.release(SLOTS)
    bench.prepared()
    check_stores(bench)
    check_loads(bench)
    bench.close()


def test_copies_of_slots_that_are_not_locked_keep_nobody_waiting() -> None:
    """They wait for the engine's step, through few rows, and for one another; who begins them does not."""
    model = Model()
    model.refuse_locks_from = 2
    bench = new_bench(model).prepared()
    unlocked = [(block, 4 + block) for block in range(7)]
    scramble(bench.views, seed=3)
    before = bench.copier.mark()
    gate = model.hold_up()
    behind = bench.copier.mark()
    staged = bench.copier.begin_store(unlocked, behind)
    later = bench.copier.begin_store([(7, 3)], before)
    later.wait()
    assert not staged.done()
    gate.set()
    bench.copier.hold(staged)
    assert staged.done()
    for region in bench.cache.regions:
        for block, slot in [*unlocked, (7, 3)]:
            assert torch.equal(region.slots(bench.arena)[slot], region.device[block])
    bench.close()


def test_when_copies_through_the_buffer_fail_the_others_are_over_before_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever hears of it overwrites the blocks: a copy that still ran would write into what comes next."""
    model = Model()
    model.refuse_locks_from = 2
    bench = new_bench(model).prepared()

    def fail(*_: object, **__: object) -> None:
        raise CudaError("cuMemcpyBatchAsync", 1, "CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(bench.copier._staging, "_copy", fail)
    gate = model.hold_up()
    mixed = bench.copier.begin_load([(0, 0), (1, 7)], bench.copier.mark())
    assert mixed.staged is not None
    assert mixed.staged.exception(DEADLINE_S) is not None
    assert mixed.done() is False, "the slot that is locked is being copied"
    gate.set()
    with pytest.raises(CudaError):
        mixed.wait()
    assert not model.copies_under_way()
    with pytest.raises(CudaError):
        mixed.done()
    bench.close()


def test_the_engine_waits_for_the_buffer_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "COPY_S_MAX", 0.0)
    model = Model()
    model.refuse_locks_from = 0
    bench = new_bench(model).prepared()
    gate = model.hold_up()
    staged = bench.copier.begin_store([(0, 0)], bench.copier.mark())
    with pytest.raises(CopyHung, match="not page-locked have not ended within 0 s"):
        bench.copier.hold(staged)
    monkeypatch.undo()
    gate.set()
    staged.wait()
    bench.copier.hold(staged)
    bench.close()


@pytest.mark.parametrize("locked", [True, False])
def test_a_copy_that_does_not_end_is_waited_for_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """Neither a wait nor the end of the copier waits longer; what is under way is not taken for ended."""
    model = Model()
    model.refuse_locks_from = None if locked else 0
    bench = new_bench(model).prepared()
    gate = model.hold_up()
    store = bench.copier.begin_store([(0, 0)], bench.copier.mark())
    monkeypatch.setattr(cuda, "COPY_S_MAX", 0.0)
    monkeypatch.setattr(staging, "COPY_S_MAX", 0.0)
    with pytest.raises(CopyHung, match="have not ended within 0 s"):
        store.wait()
    with pytest.raises(CopyHung, match="have not ended within 0 s"):
        bench.copier.close()
    assert bench.copier.locks.locked_slots == (SLOTS if locked else 0), "the device may still use these pages"
    monkeypatch.undo()
    gate.set()
    store.wait()


def test_layers_are_loaded_through_the_buffer_too() -> None:
    model = Model()
    model.refuse_locks_from = 0
    bench = new_bench(model).prepared()
    bench.cpu.store([(block, block) for block in range(9)])
    scramble(bench.views, seed=3)
    bench.cpu.load([(block, 8 - block) for block in range(9)])
    expected = bench.device_bytes()
    scramble(bench.views, seed=4)
    rows = bench.copier._staging._sides[True].rows
    for name in bench.views:
        rows.fill_(0xEE)
        bench.copier.begin_load([(block, 8 - block) for block in range(9)], layer=name).wait()
        touched = (rows != 0xEE).any(0).sum().item()
        assert 0 < touched <= bench.cache.layers[name].bytes_per_block, "no other layer's bytes are staged"
    assert all(torch.equal(a, b) for a, b in zip(bench.device_bytes(), expected, strict=True))
    bench.close()


def test_pages_that_locking_brings_forth_lie_next_to_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = sorted(os.sched_getaffinity(0))
    (tmp_path / "node3").mkdir()
    (tmp_path / "node3" / "cpulist").write_text(f"{own[0]}\n")
    monkeypatch.setattr(numa, "NODES", tmp_path)
    model = Model()
    seen: list[set[int]] = []
    lock_pages = model.driver.lock_pages

    def seen_from(address: int, size: int) -> None:
        seen.append(os.sched_getaffinity(0))
        lock_pages(address, size)

    monkeypatch.setattr(model.driver, "lock_pages", seen_from)
    bench = new_bench(model).prepared()
    arena = arena_tensor(mmap.mmap(-1, PAGE), 1, PAGE)
    near = CudaCopier(bench.cache, arena, "batch", model.driver, model.device, numa_node=3)
    assert near.prepared(DEADLINE_S)
    near.close()
    bench.close()
    assert seen == [set(own)] * (len(seen) - 1) + [{own[0]}]
    assert os.sched_getaffinity(0) == set(own), "nobody else moves"


def test_the_buffer_is_bounded() -> None:
    model = Model()
    model.refuse_locks_from = 0
    bench = new_bench(model).prepared()
    check_stores(bench)
    assert model.pinned_asked == [STAGED_SLOTS * PAGE] * 2
    bench.close()


def test_a_slot_larger_than_the_buffer_may_be_still_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES_MAX", 1)
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 1)
    model = Model()
    model.refuse_locks_from = 4
    bench = new_bench(model).prepared()
    assert len(model.locked) == 4
    check_stores(bench)
    check_loads(bench)
    assert model.pinned_asked == [PAGE] * 2
    bench.close()


def test_a_refusal_half_way_is_one_warning_and_copies_go_on(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.refuse_locks_from = 2
    bench = new_bench(model).prepared()
    (line,) = warnings(caplog)
    assert "7 of 11 slots" in line
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in line
    assert "the container, may have no memory left" in line
    assert "ulimit" not in line, "no limit of locked pages applies to the driver"
    check_stores(bench)
    check_loads(bench)
    bench.close()
    bench.copier.close()
    assert len(warnings(caplog)) == 1


def test_close_while_pages_are_being_locked_unlocks_what_was_locked() -> None:
    model = Model()
    model.lock_gate = threading.Semaphore(2)
    bench = new_bench(model)
    wait_for_lock_call(model, 3)
    closing = threading.Thread(target=bench.copier.close)
    closing.start()
    assert bench.copier._locks._closing.wait(DEADLINE_S)
    model.lock_gate.release(SLOTS)
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert model.locked == {}
    assert model.lock_calls == 3
    bench.close()


def test_a_piece_that_cannot_be_unlocked_does_not_keep_the_others(caplog: pytest.LogCaptureFixture) -> None:
    bench = new_bench(Model()).prepared()
    del bench.model.locked[bench.arena[PIECE_SLOTS].data_ptr()]
    bench.close()
    (line,) = warnings(caplog)
    assert "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED" in line


def test_the_thread_that_locks_pages_ends_with_the_copier() -> None:
    before = set(threading.enumerate())
    bench = new_bench(Model()).prepared()
    bench.close()
    assert set(threading.enumerate()) <= before


# What goes wrong


@pytest.mark.parametrize("refused", [False, True], ids=["locked", "staged"])
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("method", ["batch", "rows"])
def test_a_copy_that_fails_half_way_raises_when_nothing_is_under_way(
    method: str, direction: str, refused: bool
) -> None:
    model = Model(seed=8)
    model.refuse_locks_from = 0 if refused else None
    bench = new_bench(model, method, separate((9, 2, 4, 8), torch.float32)).prepared()
    model.failing[method] = 4 * 3 + 2
    begin = getattr(bench.copier, f"begin_{direction}")
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE") as caught:
        begin([(block, block) for block in range(9)]).wait()
    assert len(model.calls) > 0
    assert not caught.value.lost
    assert not model.copies_under_way()
    model.failing = {}
    check_stores(bench)
    check_loads(bench)
    bench.close()


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("pair", [(9, 0), (-1, 0), (0, SLOTS), (0, -1)])
def test_a_pair_out_of_range_is_refused(direction: str, pair: tuple[int, int]) -> None:
    bench = new_bench(Model()).prepared()
    with pytest.raises(KvbmError, match="accepted are blocks 0 to 8 and slots 0 to 10"):
        getattr(bench.copier, direction)([(1, 1), pair])
    assert bench.model.calls == []
    bench.close()


@pytest.mark.parametrize("refused", [False, True], ids=["locked", "staged"])
def test_a_lost_context_is_one_line_at_the_copy_and_one_at_the_end(
    caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    model = Model()
    model.refuse_locks_from = 1 if refused else None
    bench = new_bench(model).prepared()
    caplog.clear()
    under_way = bench.copier.begin_load([(1, 1)])
    lose(model, "batch")
    with pytest.raises(DeviceLost) as caught:
        bench.copier.store([(0, 0), (2, 8)])
    assert str(caught.value) == "batch: CUDA_ERROR_ILLEGAL_ADDRESS (700); the device's context is lost"
    for answer in (under_way.done, under_way.wait, lambda: bench.copier.store([(0, 0)])):
        with pytest.raises((DeviceLost, RuntimeError)) as told:
            answer()
        assert "\n" not in str(told.value) or not isinstance(told.value, DeviceLost)
    bench.copier.close()
    bench.copier.close()
    assert warnings(caplog) == [f"waiting for copies under way: {LOST_TEXT.splitlines()[0]}"]
    assert model.complaints == []


def test_a_buffer_that_cannot_be_had_is_an_error_in_one_line() -> None:
    model = Model()
    model.refuse_pinned = True
    with pytest.raises(KvbmError) as caught:
        new_bench(model)
    size = STAGED_SLOTS * PAGE
    assert str(caught.value) == f"page-locking a buffer of {size} bytes for copies: CUDA error: out of memory"
    assert model.locked == {}


def test_without_a_driver_there_is_no_copier(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    bench = new_bench(Model()).prepared()
    with pytest.raises(KvbmError) as caught:
        CudaCopier(bench.cache, bench.arena)
    assert str(caught.value) == "loading the CUDA driver: libcuda.so.1: cannot open shared object file"
    bench.close()

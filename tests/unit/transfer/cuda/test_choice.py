"""Which way of copying a layout gets: the fastest by what was measured, the one that is named, or what is left."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from kvbm.errors import KvbmError, SettingsError
from kvbm.testing.kv_views import SLOTS, separate, stacked
from kvbm.transfer.copier import Pairs
from kvbm.transfer.cuda import choice as cuda_choice
from kvbm.transfer.cuda.device import Stream
from kvbm.transfer.cuda.pieces import Pieces, SlotRows, pieces_of
from rigs.cuda_bench import (
    BLOCKS,
    Bench,
    check_loads,
    check_stores,
    lose,
    new_bench,
    wait_for_lock_call,
    warnings,
)
from rigs.cuda_model import DEADLINE_S, Model


def chosen(bench: Bench) -> tuple[str, str]:
    choice = bench.prepared().copier.choice
    return choice.store.name, choice.load.name


@pytest.mark.parametrize("store", ["batch", "rows", "each"])
@pytest.mark.parametrize("load", ["batch", "rows", "each"])
def test_auto_takes_the_fastest_for_each_direction(store: str, load: str) -> None:
    model = Model()
    model.seconds = {
        name: (1.0 if name == store else 2.0, 1.0 if name == load else 2.0)
        for name in ("batch", "rows", "each")
    }
    bench = new_bench(model, cuda_choice.AUTO)
    assert chosen(bench) == (store, load)
    model.calls.clear()
    check_stores(bench)
    assert {call.name for call in model.calls} == {store}
    model.calls.clear()
    check_loads(bench)
    assert {call.name for call in model.calls} == {load}
    bench.close()


class _Kernel:
    """Stands for the kernel, which needs an interpreter here: what it was asked for, directions as `to_device`."""

    name = "kernel"

    def __init__(self) -> None:
        self.learned: list[Pieces] = []
        self.begun: list[bool] = []

    def learn(self, layouts: Sequence[Pieces], stream: Stream) -> None:
        self.learned += layouts

    def begin(
        self, pieces: Pieces, pairs: Pairs, slots: SlotRows, *, to_device: bool, stream: Stream
    ) -> None:
        assert any(known is pieces for known in self.learned)
        self.begun.append(to_device)
        stream.run(lambda: None)


def offer_kernel(model: Model, monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    """A device on which the kernel is twice as fast as what else is offered."""
    kernel, methods = _Kernel(), cuda_choice.methods
    monkeypatch.setattr(
        cuda_choice, "methods", lambda driver, device: {**methods(driver, device), "kernel": kernel}
    )
    model.seconds = {"kernel": (0.5, 0.5)}
    return kernel


@pytest.mark.parametrize(("kernel", "taken"), [(1.19, "rows"), (1.21, "kernel")])
def test_the_kernel_is_taken_for_loads_where_it_is_clearly_faster(kernel: float, taken: str) -> None:
    """It takes compute units from the engine's step."""
    batch, rows, own = (
        cuda_choice.Measured(cast("cuda_choice.Method", SimpleNamespace(name=name)), store, load)
        for name, store, load in (("batch", 2.0, 0.5), ("rows", 1.0, 1.0), ("kernel", None, kernel))
    )
    choice = cuda_choice.best([batch, own, rows], cuda_choice.everywhere(batch.method))
    assert [method.name for method in choice] == ["batch", taken, "rows"]


def test_where_only_the_kernel_could_be_measured_nothing_changes() -> None:
    kernel = cuda_choice.Measured(_Kernel(), None, 9.0)
    before = cuda_choice.everywhere(cast("cuda_choice.Method", SimpleNamespace(name="batch")))
    assert cuda_choice.best([kernel], before) == before


def test_the_kernel_is_measured_for_loads_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    kernel = offer_kernel(model, monkeypatch)
    with caplog.at_level(logging.INFO, "kvbm"):
        bench = new_bench(model, cuda_choice.AUTO).prepared()
    assert kernel.begun
    assert all(kernel.begun)
    assert [method.name for method in bench.copier.choice] == ["batch", "kernel", "batch"]
    (line,) = (record.getMessage() for record in caplog.records if "copies by" in record.getMessage())
    assert line.startswith("copies by batch down and kernel up; pieces from ")
    assert re.search(r"kernel –/\d+\.\d$", line)
    bench.close()


@pytest.mark.parametrize(("piece_bytes", "tried"), [(28 * 1024 - 8, True), (28 * 1024, False)])
def test_the_kernel_is_tried_for_small_pieces_alone(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, tried: bool
) -> None:
    """Of several sizes the largest counts."""
    model = Model()
    kernel = offer_kernel(model, monkeypatch)
    views = {
        "layer.0": torch.zeros(BLOCKS, 1, 1, piece_bytes, dtype=torch.uint8),
        "layer.1": torch.zeros(BLOCKS, 1, 1, 64, dtype=torch.uint8),
    }
    bench = Bench(views, model, cuda_choice.AUTO).prepared()
    assert bool(kernel.learned) == bool(kernel.begun) == tried
    assert (bench.copier.choice.load.name == "kernel") == tried
    bench.close()


def test_a_load_of_few_pieces_goes_by_the_copy_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its blocks' pieces count; of one layer that layer's alone."""
    model = Model()
    kernel = offer_kernel(model, monkeypatch)
    bench = new_bench(model, cuda_choice.AUTO, separate((BLOCKS, 1, 4, 16), torch.float32)).prepared()
    assert len(bench.copier._pieces.size) == 3
    for blocks, layer, by_kernel in ((5, None, False), (6, None, True), (6, "layer.0", False)):
        kernel.begun.clear()
        bench.copier.begin_load([(block, block) for block in range(blocks)], layer=layer).wait()
        assert bool(kernel.begun) == by_kernel
    kernel.begun.clear()
    bench.copier.store([(block, block) for block in range(9)])
    assert kernel.begun == []
    bench.close()


def test_the_kernel_that_is_named_copies_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    kernel = offer_kernel(model, monkeypatch)
    views = {"layer.0": torch.zeros(BLOCKS, 1, 1, 64 * 1024, dtype=torch.uint8)}
    bench = Bench(views, model, "kernel").prepared()
    bench.copier.store([(0, 0)])
    bench.copier.load([(0, 0)])
    bench.copier.begin_load([(0, 0)], layer="layer.0").wait()
    assert kernel.begun == [False, True, True]
    assert model.calls == []
    bench.close()


def test_a_kernel_without_room_for_its_tables_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    kernel = offer_kernel(model, monkeypatch)

    def learn(*_: object) -> None:
        raise KvbmError("memory for the copy kernel's tables: CUDA out of memory")

    monkeypatch.setattr(kernel, "learn", learn)
    bench = new_bench(model, cuda_choice.AUTO)
    assert chosen(bench) == ("batch", "batch")
    (line,) = warnings(caplog)
    assert line == "copies by kernel are not used: memory for the copy kernel's tables: CUDA out of memory"
    bench.close()
    with pytest.raises(KvbmError, match="memory for the copy kernel's tables"):
        new_bench(Model(), "kernel")


@pytest.mark.swallows("^CudaError: each: CUDA_ERROR_INVALID_VALUE")
def test_a_way_that_fails_is_left_out_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.seconds = {"batch": (3.0, 3.0), "rows": (2.0, 2.0), "each": (1.0, 1.0)}
    model.failing["each"] = 7  # the copies that it began must be over before their memory is given back
    bench = new_bench(model, cuda_choice.AUTO)
    assert chosen(bench) == ("rows", "rows")
    (line,) = warnings(caplog)
    assert line == "copies by each are not used: each: CUDA_ERROR_INVALID_VALUE (1)"
    model.drain()
    bench.close()


@pytest.mark.swallows("^NotImplementedError: $")
def test_a_way_that_fails_without_a_word_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()

    def copy_batch(*args: object, **more: object) -> None:
        raise NotImplementedError

    model.driver.copy_batch = copy_batch  # type: ignore[method-assign]
    bench = new_bench(model, cuda_choice.AUTO).prepared()
    assert warnings(caplog) == ["copies by batch are not used: NotImplementedError"]
    bench.close()


@pytest.mark.swallows("^CudaError: (batch|each|rows): CUDA_ERROR_INVALID_VALUE")
def test_where_every_way_fails_the_first_one_stays() -> None:
    model = Model()
    model.failing = {"batch": 0, "rows": 0, "each": 0}
    bench = new_bench(model, cuda_choice.AUTO)
    assert chosen(bench) == ("batch", "batch")
    model.failing = {}
    check_stores(bench)
    bench.close()


def test_nothing_is_measured_before_the_first_copy() -> None:
    """A start measures memory and captures graphs: scratch memory would stand in its way."""
    model = Model()
    model.seconds = {"rows": (0.5, 0.5)}
    bench = new_bench(model, cuda_choice.AUTO, running=False)
    bench.copier._preparation.join(0.05)
    assert (model.calls, "cudaMalloc" in model.unsafe_calls) == ([], False)
    bench.copier.load([(0, 0)])
    assert chosen(bench) == ("rows", "rows")
    bench.close()


def test_a_copier_that_never_copied_has_measured_nothing() -> None:
    model = Model()
    new_bench(model, cuda_choice.AUTO, running=False).close()
    assert (model.calls, "cudaMalloc" in model.unsafe_calls) == ([], False)


def test_pages_are_locked_when_all_is_measured() -> None:
    """Locking holds the driver's locks, and would be measured with the copies."""
    model = Model()
    model.seconds = {"rows": (0.5, 0.5)}
    model.lock_gate = threading.Semaphore(0)
    bench = new_bench(model, cuda_choice.AUTO)
    wait_for_lock_call(model, 1)
    assert bench.copier.choice.load.name == "rows"
    model.lock_gate.release(SLOTS)
    bench.prepared()
    bench.close()


def test_copies_need_not_wait_for_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    go = threading.Event()
    measure = cuda_choice.measure

    def late(*args: object) -> list[cuda_choice.Measured]:
        assert go.wait(DEADLINE_S)
        return measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda_choice, "measure", late)
    model.seconds = {"rows": (0.5, 0.5)}
    bench = new_bench(model, cuda_choice.AUTO)
    assert not bench.copier.prepared(0)
    check_stores(bench)
    check_loads(bench)
    assert {call.name for call in model.calls} == {"batch"}
    go.set()
    assert chosen(bench) == ("rows", "rows")
    bench.close()


@pytest.mark.parametrize("name", ["batch", "rows", "each"])
def test_a_way_that_is_named_is_used_and_nothing_is_measured(name: str) -> None:
    model = Model()
    model.seconds = {name: (9.0, 9.0)}
    bench = new_bench(model, name)
    assert chosen(bench) == (name, name)
    assert model.calls == []
    bench.close()


def test_a_way_that_is_not_offered_is_refused_with_those_that_are() -> None:
    model = Model()
    model.driver.has_batch = False
    with pytest.raises(SettingsError) as caught:
        new_bench(model, "batch")
    assert str(caught.value) == (
        "DYN_KVBM_CUDA_COPY='batch' cannot be used: "
        "auto, rows, each (what this driver and installation offer)"
    )
    with pytest.raises(SettingsError, match="'kernel' cannot be used"):
        new_bench(Model(), "kernel")


@pytest.mark.parametrize("method", ["auto", "rows", "each"])
def test_a_driver_without_batches_copies_too(method: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.driver.has_batch = False
    bench = new_bench(model, method).prepared()
    check_stores(bench)
    check_loads(bench)
    bench.close()
    assert warnings(caplog) == []


def test_the_sample_is_cut_into_rows_as_the_layout_is() -> None:
    """Else rows would be measured as one contiguous copy, and lose in earnest what they won."""
    for views in (stacked("BHLNC", torch.float32), separate((2, 9, 4, 2, 8), torch.float32)):
        bench = new_bench(Model(), "rows", views).prepared()
        pieces = pieces_of(bench.cache.regions)
        bench.copier.store([(0, 0)])
        real = [call.pieces for call in bench.model.calls]
        bench.model.calls.clear()
        method = {"rows": bench.copier.choice.store}
        cuda_choice.measure(pieces, method, bench.model.device)
        sample = bench.model.calls[: len(real)]
        assert [call.pieces for call in sample] == real
        width = int(pieces.size[0])
        assert all(call.pitch > width for call in sample if call.pieces > 1)
        bench.close()


def test_scratch_is_not_written_before_the_engine_has_done_with_it() -> None:
    """It may be memory that the engine gave back a moment ago, with work under way that uses it."""
    for seed in range(6):
        bench = new_bench(Model(seed), "each").prepared()
        copied: list[int] = []
        bench.model.engine.work(lambda copied=copied, model=bench.model: copied.append(model.pieces_copied))
        method = {"each": bench.copier.choice.store}
        cuda_choice.measure(pieces_of(bench.cache.regions), method, bench.model.device)
        assert copied == [0]
        bench.close()


def test_a_context_lost_while_measuring_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    lose(model, "rows")
    bench = new_bench(model, cuda_choice.AUTO).prepared()
    (line,) = warnings(caplog)
    assert line == (
        "the ways of copying could not be measured "
        "(rows: CUDA_ERROR_ILLEGAL_ADDRESS (700); the device's context is lost): batch is used"
    )
    bench.copier.close()
    assert model.complaints == []


def test_scratch_that_cannot_be_had_leaves_the_choice_unmeasured(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()

    def scratch(size: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    model.device.scratch = scratch  # type: ignore[method-assign]
    bench = new_bench(model, cuda_choice.AUTO)
    assert chosen(bench) == ("batch", "batch")
    assert warnings(caplog) == [
        "the ways of copying could not be measured (CUDA out of memory. Tried to allocate): batch is used"
    ]
    check_stores(bench)
    bench.close()

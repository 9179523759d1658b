"""Which way of copying a layout gets: the fastest by what was measured, the one that is named, or what is left."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch

from kvbm.errors import SettingsError
from kvbm.testing.kv_views import separate, stacked
from kvbm.transfer.cuda import choice as cuda_choice
from kvbm.transfer.cuda.pieces import pieces_of
from rigs.cuda_bench import Bench, check_loads, check_stores, lose, new_bench, warnings
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


class _Named(NamedTuple):
    name: str

    def begin(self, *args: object, **more: object) -> None:
        raise AssertionError("nothing is copied here")


@pytest.mark.parametrize(("kernel", "taken"), [(1.04, "batch"), (1.06, "kernel")])
def test_the_kernel_is_taken_where_it_is_clearly_faster(kernel: float, taken: str) -> None:
    """It takes compute units from the engine's step."""
    engines, own = (
        cuda_choice.Measured(_Named(name), rate, rate) for name, rate in (("batch", 1.0), ("kernel", kernel))
    )
    choice = cuda_choice.best([engines, own], cuda_choice.Choice(engines.method, engines.method))
    assert (choice.store.name, choice.load.name) == (taken, taken)


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


def test_a_way_that_fails_without_a_word_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()

    def copy_batch(*args: object) -> None:
        raise NotImplementedError

    model.driver.copy_batch = copy_batch  # type: ignore[method-assign]
    bench = new_bench(model, cuda_choice.AUTO).prepared()
    assert warnings(caplog) == ["copies by batch are not used: NotImplementedError"]
    bench.close()


def test_where_every_way_fails_the_first_one_stays() -> None:
    model = Model()
    model.failing = {"batch": 0, "rows": 0, "each": 0}
    bench = new_bench(model, cuda_choice.AUTO)
    assert chosen(bench) == ("batch", "batch")
    model.failing = {}
    check_stores(bench)
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

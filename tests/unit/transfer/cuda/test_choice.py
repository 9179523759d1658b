"""Which way a copy takes: by the rule, by the name that is set, or by what this machine has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import pytest
import torch

from kvbm.errors import KvbmError, SettingsError
from kvbm.testing.kv_views import Views, separate
from kvbm.transfer.copier import Pairs
from kvbm.transfer.cuda import choice as cuda_choice
from kvbm.transfer.cuda.choice import AUTO, KERNEL_PIECES_MIN
from kvbm.transfer.cuda.device import Stream
from kvbm.transfer.cuda.pieces import Pieces, SlotRows
from rigs.cuda_bench import BLOCKS, Bench, check_loads, check_stores, new_bench, warnings
from rigs.cuda_model import Model


class _Kernel:
    """Stands for the kernel, which needs an interpreter here: what it was asked for, directions as `to_device`."""

    name = "kernel"

    def __init__(self) -> None:
        self.layouts: list[Pieces] = []
        self.compiled: list[bool] = []
        self.begun: list[bool] = []

    def compile(self, *, to_device: bool, stream: Stream) -> None:
        self.compiled.append(to_device)

    def begin(
        self, pieces: Pieces, pairs: Pairs, slots: SlotRows, *, to_device: bool, stream: Stream
    ) -> None:
        assert any(known is pieces for known in self.layouts)
        self.begun.append(to_device)
        stream.run(lambda: None)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    """Stands for the kernel wherever one is made."""
    pytest.importorskip("triton", reason="triton is not installed")
    kernel = _Kernel()

    def made(driver: object, device: object, layouts: Sequence[Pieces], *_: object) -> _Kernel:
        kernel.layouts += layouts
        return kernel

    monkeypatch.setattr("kvbm.transfer.cuda.kernel.KernelCopy", made)
    return kernel


def of_pieces(*sizes: int, offset: int = 0) -> Views:
    """A layer for each size, whose blocks are one piece of so many bytes."""
    room = -(-max(sizes) // 16) * 16 + 16
    return {
        f"layer.{number}": torch.zeros(BLOCKS * room, dtype=torch.uint8).as_strided(
            (BLOCKS, size), (room, 1), offset
        )
        for number, size in enumerate(sizes)
    }


SMALL = 4096


@pytest.mark.parametrize(
    ("views", "loads_by"),
    [
        (of_pieces(SMALL), "kernel"),
        (of_pieces(28 * 1024 - 8, 64), "kernel"),
        (of_pieces(28 * 1024, 64), "batch"),
        (of_pieces(SMALL, SMALL + 4), "batch"),
        (of_pieces(SMALL, offset=4), "batch"),
    ],
    ids=["small", "just under", "one too large", "size not of 8", "address not of 8"],
)
def test_loads_of_small_aligned_pieces_go_by_the_kernel_and_all_else_by_batches(
    kernel: _Kernel, views: Views, loads_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvbm"):
        bench = Bench(views, Model(), AUTO).prepared()
    choice = bench.copier.choice
    assert choice.choose_method(KERNEL_PIECES_MIN, to_device=True).name == loads_by
    assert choice.choose_method(KERNEL_PIECES_MIN - 1, to_device=True).name == "batch"
    assert choice.choose_method(10**6, to_device=False).name == "batch"
    assert bool(kernel.layouts) == (loads_by == "kernel")
    assert f"stores by batch, loads by {loads_by}" in [record.getMessage() for record in caplog.records]
    assert warnings(caplog) == []
    bench.close()


def test_a_load_of_few_pieces_goes_by_the_copy_engines(kernel: _Kernel) -> None:
    """All its blocks' pieces count; of one layer that layer's alone."""
    bench = new_bench(Model(), AUTO, separate((BLOCKS, 1, 4, 16), torch.float32)).prepared()
    for blocks, layer, by_kernel in ((5, None, False), (6, None, True), (6, "layer.0", False)):
        kernel.begun.clear()
        bench.copier.begin_load([(block, block) for block in range(blocks)], layer=layer).wait()
        assert bool(kernel.begun) == by_kernel
    kernel.begun.clear()
    bench.copier.store([(block, block) for block in range(9)])
    assert kernel.begun == []
    bench.close()


def test_what_the_rule_never_launches_is_not_compiled(kernel: _Kernel) -> None:
    Bench(of_pieces(SMALL), Model(), AUTO).close()
    assert kernel.compiled == [True]


def test_the_kernel_that_is_named_copies_everything(kernel: _Kernel) -> None:
    model = Model()
    bench = Bench(of_pieces(64 * 1024), model, "kernel").prepared()
    assert sorted(kernel.compiled) == [False, True]
    bench.copier.store([(0, 0)])
    bench.copier.load([(0, 0)])
    bench.copier.begin_load([(0, 0)], layer="layer.0").wait()
    assert kernel.begun == [False, True, True]
    assert model.calls == []
    bench.close()


def test_where_the_kernel_cannot_be_compiled_loads_go_by_batches(
    kernel: _Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: object) -> None:
        raise KvbmError("compiling the copy kernel: no C compiler")

    monkeypatch.setattr(kernel, "compile", fail)
    bench = Bench(of_pieces(SMALL), Model(), AUTO).prepared()
    assert warnings(caplog) == [
        "loads of small pieces go by batch, which is slower: compiling the copy kernel: no C compiler"
    ]
    check_stores(bench)
    check_loads(bench)
    bench.close()
    with pytest.raises(KvbmError, match="no C compiler"):
        Bench(of_pieces(SMALL), Model(), "kernel")


@pytest.mark.parametrize("name", ["batch", "rows"])
def test_a_way_that_is_named_is_used_for_all_copies(kernel: _Kernel, name: str) -> None:
    model = Model()
    bench = Bench(of_pieces(SMALL), model, name).prepared()
    check_stores(bench)
    check_loads(bench)
    assert {call.name for call in model.calls} == {name}
    assert kernel.layouts == []
    bench.close()


def test_a_driver_without_batches_copies_in_rows(kernel: _Kernel, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.driver.has_batch = False
    bench = Bench(of_pieces(64 * 1024), model, AUTO).prepared()
    check_stores(bench)
    check_loads(bench)
    assert {call.name for call in model.calls} == {"rows"}
    assert warnings(caplog) == []
    bench.close()


def test_a_way_that_is_not_offered_is_refused_with_those_that_are() -> None:
    model = Model()
    model.driver.has_batch = model.driver.host_pointers = False
    for name in ("batch", "kernel"):
        with pytest.raises(SettingsError) as caught:
            new_bench(model, name)
        assert str(caught.value) == (
            f"DYN_KVBM_CUDA_COPY={name!r} cannot be used: auto, rows (offered by this driver and installation)"
        )


def test_without_triton_the_kernel_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kvbm.transfer.cuda.kernel", None)
    model = Model()
    assert cuda_choice.list_methods(model.driver, model.device) == ["batch", "rows"]
    bench = Bench(of_pieces(SMALL), model, AUTO)
    assert bench.copier.choice.kernel is None
    assert warnings(caplog) == []
    bench.close()

"""CUDA copies, layout by layout, on a model of a device: the same bytes as on a CPU, and no other one touched."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from kvbm.testing.kv_views import PADDING, scramble, stacked
from kvbm.transfer import DeviceCache
from kvbm.transfer.cuda.driver import BATCH_PIECES_MAX, CudaError
from kvbm.transfer.cuda.engines import BatchCopy
from kvbm.transfer.cuda.pieces import SlotRows, common_alignment, pieces_of
from rigs.cuda_bench import (
    BFLOAT16,
    BLOCKS,
    LAYOUTS,
    Bench,
    check_layers,
    check_loads,
    check_stores,
    same,
)
from rigs.cuda_model import Model


class Case(NamedTuple):
    """A layout and a way of copying it."""

    layout: str
    method: str


CASES = [Case(layout, method) for layout in LAYOUTS for method in ("batch", "rows")]


@pytest.fixture(params=CASES, ids="-".join)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(LAYOUTS[request.param.layout](), Model(seed=5), request.param.method).prepared()
    yield made
    made.close()


def test_stores_give_the_same_slots_as_on_a_cpu(bench: Bench) -> None:
    check_stores(bench)
    assert {call.name for call in bench.model.calls} == {bench.copier.choice.engines.name}


def test_loads_give_the_same_blocks_as_on_a_cpu(bench: Bench) -> None:
    check_loads(bench)


def test_layers_loaded_one_by_one_make_a_whole_load(bench: Bench) -> None:
    check_layers(bench, seed=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_cut_where_they_lie_too_far_apart(layout: str) -> None:
    model = Model(seed=6)
    views = LAYOUTS[layout]()
    pieces = pieces_of(DeviceCache.from_tensors(views, BLOCKS).regions)
    model.driver.pitch_limit = int(pieces.size.max())  # only pieces that touch may be rows of one copy
    bench = Bench(views, model, "rows").prepared()
    check_stores(bench)
    check_loads(bench)
    bench.close()


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "LHBNC", "BLNHC"])
def test_all_layers_of_one_allocation_take_few_calls_by_rows(order: str) -> None:
    bench = Bench(stacked(order, BFLOAT16), Model(), "rows").prepared()
    bench.copier.store([(4, 2)])
    pieces = len(pieces_of(bench.cache.regions).size)
    assert sum(call.pieces for call in bench.model.calls) == pieces
    assert len(bench.model.calls) <= (1 if order != "LHBNC" else 3)
    bench.close()


def test_pieces_say_how_they_are_aligned() -> None:
    assert common_alignment(32, 48) == 16
    assert common_alignment(32, 40) == 8
    assert common_alignment(3) == 1
    page = torch.zeros(BLOCKS * 64, dtype=torch.uint8)
    odd = page.as_strided((BLOCKS, 20), (64, 1), 4)
    start = page.data_ptr()
    assert start % 16 == 0
    assert pieces_of(DeviceCache.from_tensors({"a": odd}, BLOCKS).regions).alignment == 4
    assert pieces_of(DeviceCache.from_tensors({"a": page.view(BLOCKS, 64)}, BLOCKS).regions).alignment == 16


def wide_pair(model: Model) -> Bench:
    """Nine blocks of 8,192 pieces each, and nine slots: a chunk of a prompt has as many in a deep model."""
    view = torch.zeros(BLOCKS, 8192, 2, dtype=torch.int8)[:, :, :1]
    return Bench({"layer.0": view}, model, "batch", slot_count=BLOCKS).prepared()


@pytest.mark.parametrize("to_device", [False, True], ids=["store", "load"])
def test_a_batch_call_takes_a_bounded_number_of_pieces(to_device: bool) -> None:
    """48,128 pieces: what 8,192 tokens of a model of 94 layers come to. Drivers crash on that many in a call."""
    model = Model()
    view = torch.zeros(BLOCKS, 188, 2, dtype=torch.int8)[:, :, :1]
    bench = Bench({"layer.0": view}, model, "batch", slot_count=BLOCKS).prepared()
    begun: list[int] = []
    pieces = pieces_of(bench.cache.regions)
    assert len(pieces.size) == 188
    pairs = [(number, number) for number in range(256)]
    driver = SimpleNamespace(
        has_batch=True, copy_batch=lambda t, s, n, stream, read_early: begun.append(len(n))
    )
    slots = SlotRows(bench.arena.data_ptr(), bench.arena.stride(0))
    stream = model.new_stream()
    BatchCopy(driver).begin(pieces, pairs, slots, to_device=to_device, stream=stream)  # type: ignore[arg-type]
    assert sum(begun) == 48_128
    assert max(begun) <= BATCH_PIECES_MAX == model.batch_pieces_max
    assert len(begun) <= 13
    bench.close()


def test_blocks_of_more_pieces_than_a_call_takes_are_copied_whole() -> None:
    bench = wide_pair(Model(seed=4))
    pairs = [(2, 1), (4, 3), (5, 8)]
    bench.cpu.store(pairs)
    expected = bench.arena.clone()
    bench.arena.fill_(PADDING)
    bench.copier.store(pairs)
    assert torch.equal(bench.arena, expected)
    assert [call.pieces for call in bench.model.calls] == [4096] * 6
    scramble(bench.views, seed=3)
    before = bench.device_bytes()
    bench.cpu.load(pairs)
    loaded = bench.device_bytes()
    bench.put_device_bytes(before)
    bench.copier.load(pairs)
    assert same(bench.device_bytes(), loaded)
    bench.close()


def test_one_event_ends_all_calls_and_a_later_call_that_fails_fails_the_copy() -> None:
    bench = wide_pair(Model(seed=4))
    copying = bench.copier.begin_store([(2, 1), (4, 3)])
    stream = bench.copier._store_stream
    assert [kind for kind in stream.kinds if kind in ("copy", "record")][-5:] == ["copy"] * 4 + ["record"]
    copying.wait()
    bench.model.failing["batch"] = 3 * 4096 + 5
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        bench.copier.begin_store([(2, 1), (4, 3)])
    assert not bench.model.copies_under_way(), "the caller may free what was begun"
    bench.close()

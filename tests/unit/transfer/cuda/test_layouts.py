"""CUDA copies, layout by layout, on a model of a device: the same bytes as on a CPU, and no other one touched."""

from __future__ import annotations

import functools
import mmap
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from kvbm.layout import round_up
from kvbm.transfer import CpuCopier, DeviceCache, arena_tensor
from kvbm.transfer.cuda.copier import CudaCopier
from kvbm.transfer.cuda.driver import BATCH_PIECES_MAX, CudaError
from kvbm.transfer.cuda.engines import BatchCopy
from kvbm.transfer.cuda.pieces import SlotRows, common_alignment, pieces_of
from rigs.cuda_model import DEADLINE_S, PAGE, Model
from unit.transfer.test_cpu import PADDING, PAIRS, SLOTS, Views, scramble, separate, stacked

BLOCKS = 9
MOVED = [(5, 9), (6, 10), (0, 4), (8, 3), (2, 5)]
BFLOAT16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def neighbours() -> Views:
    """An allocation per layer, each right behind the one before: as allocators place them when nothing is freed."""
    count = 2 * BLOCKS * 4 * 2 * 8
    memory = bytearray(3 * count * 2)
    return {
        f"layer.{index}": torch.frombuffer(
            memory, dtype=BFLOAT16, offset=index * count * 2, count=count
        ).view(2, BLOCKS, 4, 2, 8)
        for index in range(3)
    }


def mamba() -> Views:
    """State of one size in pages of another: not contiguous from block to block."""
    whole = torch.zeros(2 * BLOCKS * 512, dtype=torch.int8)
    return {
        f"mamba.{index}": whole.as_strided((BLOCKS, 1, 1, 268), (512, 268, 268, 1), index * BLOCKS * 512)
        for index in range(2)
    }


def overlaid() -> Views:
    """Groups of a hybrid model on the same bytes: equal views, and one that is a part of another."""
    whole = torch.zeros(2, BLOCKS, 512, dtype=torch.int8)
    full = {f"full.{index}": whole[index].view(BLOCKS, 2, 4, 64) for index in range(2)}
    sliding = {f"sliding.{index}": whole[index].view(BLOCKS, 2, 4, 64) for index in range(2)}
    state = whole.as_strided((BLOCKS, 1, 1, 268), (512, 268, 268, 1))
    return {**full, **sliding, "mamba.0": state}


def gaps(dtype: torch.dtype) -> Views:
    """No axis neighbours another one: pieces of one word each."""
    return {"layer.0": torch.zeros(2000, dtype=dtype).as_strided((BLOCKS, 2, 3, 2), (200, 90, 20, 3), 7)}


LAYOUTS: dict[str, Callable[[], Views]] = {
    **{
        order: (lambda order=order: stacked(order, BFLOAT16))
        for order in ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    },
    "separate": lambda: separate((BLOCKS, 2, 4, 16), BFLOAT16),
    "neighbours": neighbours,
    "kv-first": lambda: separate((2, BLOCKS, 4, 2, 8), BFLOAT16),
    "mla": lambda: separate((BLOCKS, 1, 4, 576), BFLOAT16),
    "mla-fp8": lambda: separate((BLOCKS, 1, 4, 656), torch.uint8),
    "fp8": lambda: stacked("LBNHC", FP8),
    "trtllm-pool": lambda: {"pool": torch.zeros(BLOCKS, 3, 2, 2 * 4 * 16, dtype=BFLOAT16)},
    "mamba": mamba,
    "overlaid": overlaid,
    "kernel-blocks": lambda: {"layer.0": torch.zeros(2 * BLOCKS, 2, 4, 6).transpose(1, 2)},
    "two-sizes": lambda: {
        **separate((BLOCKS, 2, 4, 16), BFLOAT16),
        "indexer": torch.zeros(BLOCKS, 4, 33, dtype=torch.uint8),
    },
    "whole-chunks": lambda: {"layer.0": torch.zeros(BLOCKS, 1, 8, 1024, dtype=BFLOAT16)},
    "part-of-a-chunk": lambda: {"layer.0": torch.zeros(BLOCKS, 1, 9, 520, dtype=BFLOAT16)},
    "words-of-4": lambda: separate((BLOCKS, 1, 3, 5), torch.float32),
    "words-of-2": lambda: separate((BLOCKS, 1, 3, 5), BFLOAT16),
    "words-of-1": lambda: separate((BLOCKS, 1, 3, 5), FP8),
    "gaps": lambda: gaps(BFLOAT16),
}


class Bench:
    """A copier on a model of a device, with scrambled KV of one layout."""

    def __init__(self, views: Views, model: Model, method: str, slot_count: int = SLOTS) -> None:
        self.views, self.model = views, model
        scramble(views, seed=1)
        self.cache = DeviceCache.from_tensors(views, BLOCKS)
        slot_bytes = round_up(self.cache.shard_bytes + 1, PAGE)
        self.arena = arena_tensor(mmap.mmap(-1, slot_count * slot_bytes), slot_count, slot_bytes)
        self.arena.fill_(PADDING)
        self.model.own(views.values())
        self.copier = CudaCopier(self.cache, self.arena, method, model.driver, model.device)

    @functools.cached_property
    def cpu(self) -> CpuCopier:
        """What copies are compared with."""
        return CpuCopier(self.cache, self.arena, threads=1)

    def prepared(self) -> Bench:
        """Wait until all pages are locked and everything is measured."""
        assert self.copier.prepared(DEADLINE_S)
        return self

    def close(self) -> None:
        """Close, and see that the model has nothing to complain of."""
        self.copier.close()
        if "cpu" in vars(self):
            self.cpu.close()
        assert self.model.complaints == []
        assert self.model.locked == {}

    def device_bytes(self) -> list[torch.Tensor]:
        """All bytes of the storages, gaps included."""
        return [
            torch.empty(0, dtype=torch.uint8).set_(storage).clone() for storage in self._storages().values()
        ]

    def put_device_bytes(self, content: list[torch.Tensor]) -> None:
        """Undo everything since `device_bytes`."""
        for storage, old in zip(self._storages().values(), content, strict=True):
            torch.empty(0, dtype=torch.uint8).set_(storage).copy_(old)

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        storages = [view.untyped_storage() for view in self.views.values()]
        return {storage.data_ptr(): storage for storage in storages}

    def moved_by_cpu(self, layer: str | None = None) -> list[torch.Tensor]:
        """What the device holds after a load of `MOVED`, as the CPU copier does it; the device is left as it was."""
        before = self.device_bytes()
        self.cpu.begin_load(MOVED, layer=layer).wait()
        after = self.device_bytes()
        self.put_device_bytes(before)
        return after


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def check_stores(bench: Bench) -> None:
    """Slots hold what the CPU copier puts there, and nothing else is written."""
    before = bench.device_bytes()
    bench.arena.fill_(PADDING)
    bench.cpu.store(PAIRS)
    expected = bench.arena.clone()
    bench.arena.fill_(PADDING)
    bench.copier.store(PAIRS)
    assert torch.equal(bench.arena, expected)
    assert same(bench.device_bytes(), before)


def check_loads(bench: Bench) -> None:
    """Blocks hold what the CPU copier puts there, and nothing else is written."""
    bench.cpu.store(PAIRS)
    scramble(bench.views, seed=2)
    expected, arena_before = bench.moved_by_cpu(), bench.arena.clone()
    assert not same(bench.device_bytes(), expected)
    bench.copier.load(MOVED)
    assert same(bench.device_bytes(), expected)
    assert torch.equal(bench.arena, arena_before)


def check_layers(bench: Bench, seed: int) -> None:
    """One layer's load writes that layer's bytes alone; those of all layers make a whole load."""
    bench.cpu.store(PAIRS)
    scramble(bench.views, seed=2)
    before, whole = bench.device_bytes(), bench.moved_by_cpu()
    names = random.Random(seed).sample(list(bench.views), len(bench.views))
    for name in names:
        one = bench.moved_by_cpu(layer=name)
        bench.copier.begin_load(MOVED, layer=name).wait()
        assert same(bench.device_bytes(), one), name
        bench.put_device_bytes(before)
    copyings = [bench.copier.begin_load(MOVED, layer=name) for name in names]
    copyings[-1].wait()
    assert all(copying.done() for copying in copyings), "loads are over in the order in which they were begun"
    assert same(bench.device_bytes(), whole)


class Case(NamedTuple):
    """A layout and a way of copying it."""

    layout: str
    method: str


CASES = [Case(layout, method) for layout in LAYOUTS for method in ("batch", "rows", "each")]


@pytest.fixture(params=CASES, ids="-".join)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(LAYOUTS[request.param.layout](), Model(seed=5), request.param.method).prepared()
    yield made
    made.close()


def test_stores_give_the_same_slots_as_on_a_cpu(bench: Bench) -> None:
    check_stores(bench)
    assert {call.name for call in bench.model.calls} == {bench.copier.choice.store.name}


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


def wide_pair(model: Model, method: str) -> Bench:
    """Nine blocks of 8,192 pieces each, and nine slots: a chunk of a prompt has as many in a deep model."""
    view = torch.zeros(BLOCKS, 8192, 2, dtype=torch.int8)[:, :, :1]
    return Bench({"layer.0": view}, model, method, slot_count=BLOCKS).prepared()


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
    driver = SimpleNamespace(has_batch=True, copy_batch=lambda t, s, n, stream: begun.append(len(n)))
    slots = SlotRows(bench.arena.data_ptr(), bench.arena.stride(0))
    BatchCopy(driver).begin(pieces, pairs, slots, to_device=to_device, stream=1)  # type: ignore[arg-type]
    assert sum(begun) == 48_128
    assert max(begun) <= BATCH_PIECES_MAX == model.batch_pieces_max
    assert len(begun) <= 13
    bench.close()


@pytest.mark.parametrize("method", ["batch", "each"])
def test_blocks_of_more_pieces_than_a_call_takes_are_copied_whole(method: str) -> None:
    bench = wide_pair(Model(seed=4), method)
    pairs = [(2, 1), (4, 3), (5, 8)]
    bench.cpu.store(pairs)
    expected = bench.arena.clone()
    bench.arena.fill_(PADDING)
    bench.copier.store(pairs)
    assert torch.equal(bench.arena, expected)
    sizes = [call.pieces for call in bench.model.calls]
    assert sum(sizes) == 3 * 8192
    assert method == "each" or sizes == [4096] * 6
    scramble(bench.views, seed=3)
    before = bench.device_bytes()
    bench.cpu.load(pairs)
    loaded = bench.device_bytes()
    bench.put_device_bytes(before)
    bench.copier.load(pairs)
    assert same(bench.device_bytes(), loaded)
    bench.close()


def test_one_event_ends_all_calls_and_a_later_call_that_fails_fails_the_copy() -> None:
    bench = wide_pair(Model(seed=4), "batch")
    copying = bench.copier.begin_store([(2, 1), (4, 3)])
    stream = bench.copier._store_stream
    assert [kind for kind in stream.kinds if kind in ("copy", "record")][-5:] == ["copy"] * 4 + ["record"]
    copying.wait()
    bench.model.failing["batch"] = 3 * 4096 + 5
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        bench.copier.begin_store([(2, 1), (4, 3)])
    assert not bench.model.copies_under_way(), "the caller may free what was begun"
    bench.close()

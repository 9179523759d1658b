"""A CUDA copier on a model of a device, beside the CPU copier that it must agree with, and the layouts of both."""

from __future__ import annotations

import functools
import logging
import mmap
import random
from collections.abc import Callable

import pytest
import torch

from kvbm.layout import round_up
from kvbm.testing.kv_views import PADDING, PAIRS, SLOTS, Views, scramble, separate, stacked
from kvbm.transfer import CpuCopier, DeviceCache, arena_tensor
from kvbm.transfer.cuda.copier import CudaCopier
from rigs.cuda_model import DEADLINE_S, PAGE, Model

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
        """The bytes that copies are compared with."""
        return CpuCopier(self.cache, self.arena, threads=1)

    def prepared(self) -> Bench:
        """Wait until all pages are locked, or refused."""
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
    """Whether two lists of tensors hold the same bytes."""
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


def new_bench(model: Model, method: str = "batch", views: Views | None = None, running: bool = True) -> Bench:
    """A bench whose slots take a page each, of an engine that is `running` already."""
    bench = Bench(views or stacked("LBNHC", torch.float32), model, method)
    assert bench.arena.stride(0) == PAGE
    if running:
        bench.copier.locks.begin()
    return bench


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as a warning or worse; each must be one line."""
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not any("\n" in line for line in lines)
    return lines


def wait_for_lock_call(model: Model, count: int) -> None:
    """Until the `count`th call is at the gate: by then the copier knows of all pieces before it."""
    with model.lock_called:
        assert model.lock_called.wait_for(lambda: model.lock_calls >= count, DEADLINE_S)


def lose(model: Model, method: str) -> None:
    """The next copy finds the context gone, and so does everything after it."""
    model.failing[method] = 0
    model.fails_with = (700, "CUDA_ERROR_ILLEGAL_ADDRESS")

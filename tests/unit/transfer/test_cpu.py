"""Copies on a CPU, beyond the contract of every copier (tests/contract/test_copiers.py)."""

from __future__ import annotations

import mmap
import os
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.errors import KvbmError
from kvbm.layout import round_up
from kvbm.testing.kv_views import (
    LAYOUTS,
    PADDING,
    SLOTS,
    block_bytes,
    scramble,
    separate,
    stacked,
    whole_bytes,
)
from kvbm.transfer import CpuCopier, DeviceCache, arena_tensor, cpu, make_copier
from kvbm.transfer.copier import Run, runs
from rigs.property_tests import scale_examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn]


def new_arena(cache: DeviceCache, slot_count: int = SLOTS, padding_bytes: int = 16) -> torch.Tensor:
    """Slots that begin anywhere, not at pages as those of `kv_views.new_arena`."""
    slot_bytes = round_up(cache.shard_bytes, 8) + padding_bytes
    fd = os.memfd_create("arena")
    os.ftruncate(fd, slot_count * slot_bytes)
    memory = mmap.mmap(fd, slot_count * slot_bytes)
    os.close(fd)
    arena = arena_tensor(memory, slot_count, slot_bytes)
    arena.fill_(PADDING)
    return arena


def test_the_line_of_a_wrong_pair_names_what_is_accepted() -> None:
    cache = DeviceCache.from_tensors(separate((9, 2, 4, 8), torch.float32), 9)
    copier = CpuCopier(cache, new_arena(cache))
    with pytest.raises(KvbmError, match=r"^copying block 9 and slot 0: .* blocks 0 to 8 and slots 0 to 10$"):
        copier.store([(1, 1), (9, 0)])
    copier.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_makes_the_round_trip(layout: str, dtype: torch.dtype) -> None:
    views = LAYOUTS[layout](dtype)
    scramble(views, seed=3)
    cache = DeviceCache.from_tensors(views, 9)
    copier = CpuCopier(cache, new_arena(cache))
    before = [block_bytes(views, block, 9) for block in range(9)]
    copier.store([(block, block + 1) for block in range(9)])
    scramble(views, seed=4)
    assert block_bytes(views, 0, 9) != before[0]
    copier.load([(block, 9 - block) for block in range(9)])
    assert [block_bytes(views, block, 9) for block in range(9)] == before[::-1]
    copier.close()


@settings(max_examples=scale_examples(60), deadline=None)
@given(data=st.data())
def test_any_shape_order_and_pairs(data: st.DataObject) -> None:
    sizes = {axis: data.draw(st.integers(1, 6), axis) for axis in "LHNC"}
    sizes["B"] = data.draw(st.integers(1, 9), "B")
    order = "".join(data.draw(st.permutations("LBHN"), "order")) + "C"
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    threads = data.draw(st.integers(1, 3), "threads")
    views = stacked(order, dtype, sizes)
    scramble(views, seed=5)
    try:
        cache = DeviceCache.from_tensors(views, sizes["B"])
    except KvbmError as error:
        # Interleaved inside a block's own heads or tokens: outside what engines do, refused, never mixed up.
        assert "lie on other blocks" in str(error)  # noqa: PT017
        return
    copier = CpuCopier(cache, new_arena(cache), threads=threads)
    blocks = data.draw(st.lists(st.integers(0, sizes["B"] - 1), unique=True, max_size=9), "blocks")
    slots = data.draw(st.permutations(range(SLOTS)), "slots")[: len(blocks)]
    targets = data.draw(st.permutations(range(sizes["B"])), "targets")[: len(blocks)]
    stored = [block_bytes(views, block, sizes["B"]) for block in blocks]
    copier.store(list(zip(blocks, slots, strict=True)))
    scramble(views, seed=6)
    before = [block_bytes(views, block, sizes["B"]) for block in range(sizes["B"])]
    copier.load(list(zip(targets, slots, strict=True)))
    copier.close()
    after = dict(zip(targets, stored, strict=True))
    for block in range(sizes["B"]):
        assert block_bytes(views, block, sizes["B"]) == after.get(block, before[block])


def test_layers_over_and_in_blocks_give_a_slot_the_same_bytes() -> None:
    rows = []
    for order in ("LBHNC", "BLHNC", "LHBNC"):
        views = stacked(order, torch.float32)
        for index, view in enumerate(views.values()):
            view.copy_(torch.arange(view.numel()).view(view.shape) + 10_000 * index)
        cache = DeviceCache.from_tensors(views, 9)
        arena = new_arena(cache)
        copier = CpuCopier(cache, arena)
        copier.store([(5, 3)])
        copier.close()
        rows.append(arena[3].tolist())
    assert rows[0] == rows[1] == rows[2]


def test_large_batches_use_every_thread() -> None:
    views = {"a": torch.zeros(64, 1, 64, 256)}
    scramble(views, seed=7)
    cache = DeviceCache.from_tensors(views, 64)
    copier = CpuCopier(cache, new_arena(cache, 64), threads=3)
    assert sum(thread.name.startswith("kvbm-copy") for thread in threading.enumerate()) == 3
    before = whole_bytes(views)
    order = random.Random(1).sample(range(64), 64)
    copier.store(list(enumerate(order)))
    scramble(views, seed=8)
    copier.load(list(enumerate(order)))
    assert whole_bytes(views) == before
    copier.close()
    assert copier._chunk_bounds(64) == [0, 21, 42, 64]
    assert copier._chunk_bounds(2) == [0, 2]  # too few bytes to wake a second thread
    assert not any(thread.name.startswith("kvbm-copy") for thread in threading.enumerate())
    copier.close()


def test_an_error_is_passed_on_after_every_chunk_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DeviceCache.from_tensors({"a": torch.zeros(64, 1, 64, 256)}, 64)
    copier = CpuCopier(cache, new_arena(cache, 64))
    failed, ended = threading.Event(), threading.Event()

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if targets[0].data_ptr() == copier._slots.views(0, 32)[0].data_ptr():
            failed.set()
            raise RuntimeError("this chunk cannot be copied")
        failed.wait(10)
        ended.set()

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    with pytest.raises(RuntimeError, match="this chunk"):
        copier.store([(block, block) for block in range(64)])
    assert ended.is_set()
    copier.close()


def test_views_kept_from_earlier_copies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_KEPT_VIEWS_MAX", 12)
    views = separate((9, 2, 4, 8), torch.float32)
    cache = DeviceCache.from_tensors(views, 9)
    copier = CpuCopier(cache, new_arena(cache))
    for turn in range(4):
        scramble(views, seed=20 + turn)
        before = [block_bytes(views, block, 9) for block in range(9)]
        copier.store([(block, (block * 2 + turn) % SLOTS) for block in range(9)])
        assert len(copier._device._kept) * 3 <= 12
        scramble(views, seed=30 + turn)
        copier.load([(8 - block, (block * 2 + turn) % SLOTS) for block in range(9)])
        assert [block_bytes(views, block, 9) for block in range(9)] == before[::-1]
    copier.close()


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], []),
        ([(4, 2)], [Run(4, 2, 1)]),
        ([(0, 0), (1, 1), (2, 2)], [Run(0, 0, 3)]),
        ([(0, 0), (1, 2), (2, 3)], [Run(0, 0, 1), Run(1, 2, 2)]),
        ([(0, 5), (1, 4)], [Run(0, 5, 1), Run(1, 4, 1)]),
        ([(0, 0), (2, 1)], [Run(0, 0, 1), Run(2, 1, 1)]),
        ([(0, 0), (2, 2)], [Run(0, 0, 1), Run(2, 2, 1)]),
        ([(0, 3), (1, 4), (2, 0), (3, 1)], [Run(0, 3, 2), Run(2, 0, 2)]),
    ],
)
def test_runs_join_exactly_what_goes_on_in_both(pairs: list[tuple[int, int]], expected: list[Run]) -> None:
    assert list(runs(pairs)) == expected


def test_tensors_of_inference_mode_are_written_from_other_threads() -> None:
    with torch.inference_mode():
        views = separate((9, 2, 4, 8), torch.float32)
        scramble(views, seed=10)
        cache = DeviceCache.from_tensors(views, 9)
        arena = new_arena(cache)
        copier = make_copier(cache, arena)
        copier.store([(0, 0)])
        copier.load([(1, 0)])
    arena[1].zero_()
    copier.load([(2, 0)])
    assert block_bytes(views, 1, 9) == block_bytes(views, 2, 9) == block_bytes(views, 0, 9)
    copier.close()


def test_layers_at_uneven_distances_are_not_taken_for_a_stack() -> None:
    page = 9 * 64
    whole = torch.zeros(5 * page, dtype=torch.uint8)
    views = {str(place): whole[place * page :][:page].view(9, 64) for place in (0, 1, 3, 4)}
    scramble(views, seed=11)
    cache = DeviceCache.from_tensors(views, 9)
    arena = new_arena(cache)
    copier = CpuCopier(cache, arena)
    copier.store([(4, 2)])
    copier.close()
    assert arena[2].numpy().tobytes()[: cache.shard_bytes] == block_bytes(views, 4, 9)
    assert len(cache.regions) == 2


def test_the_arena_is_the_memory_itself() -> None:
    memory = mmap.mmap(-1, 8192)
    arena = arena_tensor(memory, 2, 4096)
    arena[1, 7] = 42
    assert memory[4096 + 7] == 42


def test_a_device_without_a_copier_is_refused() -> None:
    cache = DeviceCache.from_tensors({"a": torch.zeros(9, 8, device="meta")}, 9)
    with pytest.raises(KvbmError, match="accepted are cpu and cuda"):
        make_copier(cache, torch.zeros(2, 64, dtype=torch.uint8))

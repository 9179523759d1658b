"""Copies on a CPU: byte-exact both ways for every layout, and nothing else is touched."""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.errors import KvbmError
from kvbm.layout import round_up
from kvbm.transfer import CpuCopier, DeviceCache, arena_tensor, cpu, make_copier
from kvbm.transfer.copier import Run, runs
from rigs.kv_tensors import PADDING, PAIRS, SLOTS, Views, scramble, separate, stacked


def padded(dtype: torch.dtype) -> Views:
    """Blocks apart, heads apart, and no axis that neighbours another one."""
    whole = torch.zeros(2000, dtype=dtype)
    return {"layer.0": whole.as_strided((9, 2, 4, 5), (200, 90, 20, 3), 7)}


def split_kernel_blocks(dtype: torch.dtype) -> Views:
    return {"layer.0": torch.zeros(18, 2, 4, 6, dtype=dtype).transpose(1, 2)}


LAYOUTS = {
    **{order: (lambda dtype, order=order: stacked(order, dtype)) for order in ("LBHNC", "LBNHC", "LHBNC")},
    **{order: (lambda dtype, order=order: stacked(order, dtype)) for order in ("BLHNC", "BLNHC", "BHLNC")},
    "columns first": lambda dtype: stacked("LBCNH", dtype),
    "blocks innermost": lambda dtype: stacked("LHNCB", dtype),
    "separate": lambda dtype: separate((9, 2, 4, 16), dtype),
    "keys and values first": lambda dtype: separate((2, 9, 4, 2, 8), dtype),
    "keys and values second": lambda dtype: separate((9, 2, 4, 2, 8), dtype),
    "mla": lambda dtype: separate((9, 1, 4, 18), dtype),
    "odd sizes": lambda dtype: separate((9, 1, 3, 5), dtype),
    "padded": padded,
    "kernel blocks": split_kernel_blocks,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn]


def block_axis(view: torch.Tensor, block_count: int) -> int:
    return 1 if view.dim() == 5 and view.shape[0] == 2 and view.shape[1] % block_count == 0 else 0


def block_bytes(views: Views, block: int, block_count: int) -> bytes:
    """What a slot must hold, made the slow way: layers in order, axes in the order of memory."""
    out = b""
    for view in views.values():
        axis = block_axis(view, block_count)
        each = view.shape[axis] // block_count
        part = view.narrow(axis, block * each, each)
        axes = sorted((a for a in range(part.dim()) if part.shape[a] > 1), key=lambda a: -part.stride(a))
        rest = [a for a in range(part.dim()) if part.shape[a] == 1]
        out += part.permute(rest + axes).contiguous().view(torch.uint8).numpy().tobytes()
    return out


def block_parts(views: Views, block: int) -> dict[str, bytes]:
    """`block_bytes`, layer by layer."""
    return {name: block_bytes({name: view}, block, 9) for name, view in views.items()}


def whole_bytes(views: Views) -> list[bytes]:
    """All bytes of the storages, gaps included."""
    return [
        torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()).numpy().tobytes()
        for view in views.values()
    ]


def new_arena(cache: DeviceCache, slot_count: int = SLOTS, padding_bytes: int = 16) -> torch.Tensor:
    slot_bytes = round_up(cache.shard_bytes, 8) + padding_bytes
    fd = os.memfd_create("arena")
    os.ftruncate(fd, slot_count * slot_bytes)
    memory = mmap.mmap(fd, slot_count * slot_bytes)
    os.close(fd)
    arena = arena_tensor(memory, slot_count, slot_bytes)
    arena.fill_(PADDING)
    return arena


@pytest.fixture(params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def views(request: pytest.FixtureRequest) -> Views:
    made: Views = LAYOUTS[request.param](torch.float32)
    scramble(made, seed=1)
    return made


@pytest.fixture
def cache(views: Views) -> DeviceCache:
    return DeviceCache.from_tensors(views, 9)


@pytest.fixture
def arena(cache: DeviceCache) -> torch.Tensor:
    return new_arena(cache)


@pytest.fixture
def copier(cache: DeviceCache, arena: torch.Tensor) -> Iterator[CpuCopier]:
    made = CpuCopier(cache, arena)
    yield made
    made.close()


def test_a_slot_holds_layers_in_order_and_nothing_else_is_written(
    views: Views, cache: DeviceCache, arena: torch.Tensor, copier: CpuCopier
) -> None:
    device_before = whole_bytes(views)
    copier.store(PAIRS)
    expected = {slot: block_bytes(views, block, 9) for block, slot in PAIRS}
    for slot in range(SLOTS):
        row = arena[slot].numpy().tobytes()
        body = expected.get(slot, bytes([PADDING]) * cache.shard_bytes)
        assert row == body + bytes([PADDING]) * (len(row) - cache.shard_bytes), slot
    assert whole_bytes(views) == device_before


def test_a_load_into_other_blocks_restores_the_bytes_and_leaves_the_rest(
    views: Views, cache: DeviceCache, arena: torch.Tensor, copier: CpuCopier
) -> None:
    stored = {slot: block_bytes(views, block, 9) for block, slot in PAIRS}
    copier.store(PAIRS)
    scramble(views, seed=2)
    before = [block_bytes(views, block, 9) for block in range(9)]
    gaps_before = whole_bytes(views)
    arena_before = arena.clone()
    moved = [(5, 9), (6, 10), (0, 4), (8, 3)]
    copier.load(moved)
    loaded = dict(moved)
    for block in range(9):
        expected = stored[loaded[block]] if block in loaded else before[block]
        assert block_bytes(views, block, 9) == expected, block
    assert torch.equal(arena, arena_before)
    # Put the old blocks back: then even the gaps between blocks must be as they were.
    for block, slot in moved:
        arena[slot, : cache.shard_bytes] = torch.frombuffer(bytearray(before[block]), dtype=torch.uint8)
    copier.load(moved)
    assert whole_bytes(views) == gaps_before


def test_a_layers_load_brings_that_layers_bytes_alone(
    views: Views, cache: DeviceCache, arena: torch.Tensor, copier: CpuCopier
) -> None:
    copier.store(PAIRS)
    stored = {slot: block_parts(views, block) for block, slot in PAIRS}
    scramble(views, seed=2)
    arena_before = arena.clone()
    moved = [(5, 9), (6, 10), (0, 4), (8, 2)]
    expected = [block_parts(views, block) for block in range(9)]
    for name in reversed(list(views)):
        copying = copier.begin_load(moved, layer=name)
        assert copying.done()
        copying.wait()
        copier.hold(copying)
        for block, slot in moved:
            expected[block][name] = stored[slot][name]
        assert [block_parts(views, block) for block in range(9)] == expected, name
    assert torch.equal(arena, arena_before)


def test_all_layers_loaded_one_by_one_make_a_whole_load(
    views: Views, arena: torch.Tensor, copier: CpuCopier
) -> None:
    copier.store(PAIRS)
    scramble(views, seed=2)
    moved = [(5, 9), (6, 10), (0, 4), (8, 2)]
    for name in views:
        copier.begin_load(moved, layer=name)
    one_by_one = whole_bytes(views)
    scramble(views, seed=2)
    assert whole_bytes(views) != one_by_one
    copier.load(moved)
    assert whole_bytes(views) == one_by_one  # gaps too


def test_a_layer_that_is_not_there_is_a_programmers_error(copier: CpuCopier) -> None:
    with pytest.raises(KeyError):
        copier.begin_load([(0, 0)], layer="another model's")


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


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize("pair", [(9, 0), (-1, 0), (0, SLOTS), (0, -1)])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_pair_out_of_range_is_refused_and_nothing_is_copied(pair: tuple[int, int], direction: str) -> None:
    views = separate((9, 2, 4, 8), torch.float32)
    scramble(views, seed=9)
    cache = DeviceCache.from_tensors(views, 9)
    arena = new_arena(cache)
    copier = CpuCopier(cache, arena)
    before = whole_bytes(views)
    with pytest.raises(KvbmError, match=r"blocks 0 to 8 and slots 0 to 10"):
        getattr(copier, direction)([(1, 1), pair])
    assert whole_bytes(views) == before
    assert bool((arena == PADDING).all())
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


def test_no_pairs_is_no_copy(copier: CpuCopier, arena: torch.Tensor) -> None:
    copier.store([])
    copier.load([])
    assert bool((arena == PADDING).all())


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

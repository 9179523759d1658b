"""Blocks down and up beside one contiguous copy of as many bytes: every way of copying, and both ways at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from gpu_rig import Rig, Trial, shared_arena, views
from gpu_rows import Result
from kvbm.transfer import Copier, DeviceCache
from kvbm.transfer.cuda.copier import CudaCopier
from kvbm.transfer.cuda.pieces import pieces_of

OTHER_WAYS = "the rows of the other ways say whether DYN_KVBM_CUDA_COPY helps"
LAYOUTS = (
    ("64 KiB", "LBNHC", 0.95, 0.9, OTHER_WAYS),
    ("4 KiB", "LHBNC", 0.85, 0.7, "DYN_KVBM_KV_LAYOUT=block makes one long piece of each block"),
    ("one run", "BLNHC", 0.95, 0.9, OTHER_WAYS),
)
"""How blocks lie, what is asked by the device's clock and with the host's part, and what helps where it is missed."""


def time_copies(trial: Trial) -> None:
    """64 blocks down and up, in large and in small pieces, by every method, beside one contiguous copy.

    By the device's clock, with the host's part hidden, as between pieces of a long copy; and from begin to end, which
    is what users of a short one wait for.
    """
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    total = sizes.blocks * sizes.block_bytes
    flat, host = torch.zeros(total, dtype=torch.uint8, device=rig.device), rig.pinned(total)
    plain_down, plain_up = (
        partial(there.copy_, here, non_blocking=True) for there, here in ((host, flat), (flat, host))
    )
    for name, order, device_bar, felt_bar, advice in LAYOUTS:
        cache = DeviceCache.from_tensors(views(rig, order, sizes, 2 * sizes.blocks), 2 * sizes.blocks)
        arena = shared_arena(2 * sizes.blocks, sizes.block_bytes)
        pairs = [((37 * i) % (2 * sizes.blocks), i) for i in range(sizes.blocks)]
        for method in (*rig.methods, "auto"):
            with rig.copier(cache, arena, method) as copier:
                works = (plain_down, *both(copier, pairs), plain_up)
                title = (method, method)
                if method == "auto":
                    title = ("chosen (cpu)", "chosen (cpu)")
                    if isinstance(copier, CudaCopier):
                        pieces = sizes.blocks * len(pieces_of(cache.regions).size)
                        down_by, up_by = (
                            copier.choice.choose_method(pieces, to_device=up) for up in (False, True)
                        )
                        title = (f"chosen ({down_by.name})", f"chosen ({up_by.name})")
                bar = device_bar if method == "auto" else None
                alone_down, down, up, alone_up = rig.median_device_s(*works)
                for by, ratio in (
                    (f"{title[0]}, down", alone_down / down),
                    (f"{title[1]}, up", alone_up / up),
                ):
                    result.add(f"{name} pieces, {by}", ratio, "of one copy", bar, advice=advice)
                if method != "auto":
                    continue
                alone_down, down, up, alone_up = rig.median_s(*works)
                what = f"{name} pieces, chosen, with the host's part"
                result.add(f"{what}, down", alone_down / down, "of one copy", felt_bar, advice=advice)
                result.add(f"{what}, up", alone_up / up, "of one copy", felt_bar, advice=advice)
                if name == "one run":
                    time_plain(rig, result, flat, host, arena.view(-1)[:total])
        time_gather(rig, result, name, cache, host, pairs)


def both(copier: Copier, pairs: list[tuple[int, int]]) -> tuple[Callable[[], None], Callable[[], None]]:
    """A store and a load of the pairs, for the end of which the present stream waits."""
    return (
        lambda: copier.hold(copier.begin_store(pairs, copier.mark())),
        lambda: copier.hold(copier.begin_load(pairs, copier.mark())),
    )


def time_plain(
    rig: Rig, result: Result, flat: torch.Tensor, host: torch.Tensor, locked: torch.Tensor
) -> None:
    """The ceiling itself, and the same copy to and from the arena: memory may lie nearer or farther."""
    down, arena_down, up, arena_up = rig.median_device_s(
        lambda: host.copy_(flat, non_blocking=True),
        lambda: locked.copy_(flat, non_blocking=True),
        lambda: flat.copy_(host, non_blocking=True),
        lambda: flat.copy_(locked, non_blocking=True),
    )
    result.add("one copy, down", flat.nbytes / down / 1e9, "GB/s")
    result.add("one copy, up", flat.nbytes / up / 1e9, "GB/s")
    result.add("one copy to the arena", down / arena_down, "of one copy")
    result.add("one copy from the arena", up / arena_up, "of one copy")


def time_gather(
    rig: Rig, result: Result, name: str, cache: DeviceCache, host: torch.Tensor, pairs: list[tuple[int, int]]
) -> None:
    """The same blocks with torch alone: gathered on the device, then one copy; and back."""
    region = cache.regions[0].device
    blocks = torch.tensor([block for block, _ in pairs], device=rig.device)
    staged = torch.empty_like(region[: len(pairs)], memory_format=torch.contiguous_format)
    there = host[: staged.nbytes].view(region.dtype).view(staged.shape)

    def down() -> None:
        torch.index_select(region, 0, blocks, out=staged)
        there.copy_(staged, non_blocking=True)

    def up() -> None:
        staged.copy_(there, non_blocking=True)
        region.index_copy_(0, blocks, staged)

    flat, target = staged.view(-1), there.view(-1)
    plain_down, down_s, plain_up, up_s = rig.median_device_s(
        lambda: target.copy_(flat, non_blocking=True), down, lambda: flat.copy_(target, non_blocking=True), up
    )
    result.add(f"{name} pieces, torch index_select/index_copy_, down", plain_down / down_s, "of one copy")
    result.add(f"{name} pieces, torch index_select/index_copy_, up", plain_up / up_s, "of one copy")


def time_both_ways(trial: Trial) -> None:
    """Stores and loads at once, beside two contiguous copies at once."""
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    total = sizes.blocks * sizes.block_bytes
    sides = [(torch.zeros(total, dtype=torch.uint8, device=rig.device), rig.pinned(total)) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if rig.cuda else [None, None]

    def plain() -> None:
        for index, ((device, host), stream) in enumerate(zip(sides, streams, strict=True)):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                (host if index else device).copy_(device if index else host, non_blocking=True)
        for stream in streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

    cache = DeviceCache.from_tensors(views(rig, "LBNHC", sizes, 2 * sizes.blocks), 2 * sizes.blocks)
    arena = shared_arena(2 * sizes.blocks, sizes.block_bytes)
    down = [(i, i) for i in range(sizes.blocks)]
    up = [(i, i) for i in range(sizes.blocks, 2 * sizes.blocks)]
    with rig.copier(cache, arena, "auto") as copier:

        def ours() -> None:
            mark = copier.mark()
            for copying in (copier.begin_store(down, mark), copier.begin_load(up, mark)):
                copier.hold(copying)

        plain_s, ours_s = rig.median_device_s(plain, ours)
        all_plain_s, all_ours_s = rig.median_s(plain, ours)
    advice = "loads wait for stores: DYN_KVBM_OFFLOAD_MODE=lazy makes fewer stores"
    result.add("both ways at once", plain_s / ours_s, "of two copies", 0.9, advice=advice)
    felt = all_plain_s / all_ours_s
    result.add("both ways at once, with the host's part", felt, "of two copies", 0.85, advice=advice)
    result.add("two copies at once", 2 * total / plain_s / 1e9, "GB/s")

"""Copies between device and host in one way: every byte of every layout, the order of work, and the speed.

The comparison is one page-locked copy of as many
bytes, timed in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_kit.device import PAGE, SMALL, Device, make_cache, make_layers, touched_arena
from benchmarks.gpu_kit.ledger import LEFT_OUT, Row, make_row
from kvbm.transfer import Copier, DeviceCache
from kvbm.transfer.cuda.copier import CudaCopier

BLOCKS, SLOTS = 24, 20
PATTERNS = 32
UNTOUCHED = 0xA5
ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
TIMED = (("64 KiB", "LBNHC", 0.9), ("4 KiB", "LHBNC", 0.7), ("one a block", "BLNHC", 0.9))
"""Pieces, the order of axes, and the expected share of one copy's speed."""


def measure(request: dict[str, Any]) -> Row:
    """The row of one way: whether its bytes and its order are right, or how fast it is."""
    way, device = request["options"]["way"], Device(request["rehearse"])
    if why := device.why_unusable(way):
        return make_row([], why=why, state=LEFT_OUT)
    if request["options"]["what"] == "times":
        return make_row([], title="Copies", rows=time_copies(device, way))
    return make_row([*check_layouts(device, way), *check_order(device, way)])


def make_special_layouts(device: Device) -> dict[str, dict[str, torch.Tensor]]:
    """Caches that are not of equal pieces in one allocation."""

    def make(*shape: int, dtype: torch.dtype = torch.uint8) -> dict[str, torch.Tensor]:
        return {f"layers.{i}": torch.zeros(shape, dtype=dtype, device=device.torch) for i in range(4)}

    padded = torch.zeros(BLOCKS, 5000, dtype=torch.uint8, device=device.torch)
    pool = torch.zeros(BLOCKS, 4, 2, 8 * 16 * 128, dtype=torch.float16, device=device.torch)
    return {
        "own allocations": make(BLOCKS, 8, 16, 256),
        "K and V first": make(2, BLOCKS, 16, 8, 128, dtype=torch.bfloat16),
        "MLA bf16": make(BLOCKS, 1, 16, 576, dtype=torch.bfloat16),
        "MLA fp8, 656 bytes": make(BLOCKS, 1, 16, 656),
        "fp8": make(BLOCKS, 8, 16, 256, dtype=torch.float8_e4m3fn),
        "TensorRT-LLM pool": {"pool": pool},
        "padded, odd sizes": {"state": padded[:, :4321].view(BLOCKS, 1, 1, 4321)},
    }


def check_layouts(device: Device, way: str) -> list[str]:
    """The layouts whose bytes are wrong: out and back, all layers at once and one by one."""
    layouts = {order: make_layers(device, order, SMALL, BLOCKS) for order in ORDERS}
    wrong = []
    for name, layers in {**layouts, **make_special_layouts(device)}.items():
        print(name, flush=True)  # if the process ends in it, its log says where
        cache = DeviceCache.from_tensors(layers, BLOCKS)
        arena = touched_arena(SLOTS, -(-cache.shard_bytes // PAGE) * PAGE)
        with device.copier(cache, arena, way) as copier:
            if not copies_are_right(device, copier, cache, arena):
                wrong.append(f"bytes of {name} differ")
            if isinstance(copier, CudaCopier) and name == "own allocations":
                copier.locks.close()  # from here on all goes through the staging buffer
                if not copies_are_right(device, copier, cache, arena):
                    wrong.append("bytes without page locks differ")
    return wrong


def copies_are_right(device: Device, copier: Copier, cache: DeviceCache, arena: torch.Tensor) -> bool:
    """Random bytes go to slots and back into other blocks; nothing else may change."""
    pairs, back = [(3, 7), (4, 8), (20, 0), (11, 19)], [(9, 7), (1, 8), (5, 0), (23, 19)]
    arena.fill_(UNTOUCHED)
    regions = [region.device for region in cache.regions]
    for region in regions:
        shape = (*region.shape, region.element_size())
        fresh = torch.randint(-128, 127, shape, dtype=torch.int8, device=device.torch)
        region.copy_(fresh.view(region.dtype).squeeze(-1))
    before = [region.cpu() for region in regions]
    copier.begin_store(pairs, copier.mark()).wait()
    right = all(
        torch.equal(region.slots(arena)[slot], kept[block])
        for region, kept in zip(cache.regions, before, strict=True)
        for block, slot in pairs
    )
    others = [slot for slot in range(SLOTS) if slot not in dict(back).values()]
    right &= bool((arena[others] == UNTOUCHED).all() and (arena[:, cache.shard_bytes :] == UNTOUCHED).all())
    for layers in ([None], list(cache.layers)):
        for region, kept in zip(regions, before, strict=True):
            region.copy_(kept)
        for layer in layers:
            copying = copier.begin_load(back, copier.mark(), layer)
        copying.wait()
        for region, kept in zip(regions, before, strict=True):
            expected = kept.clone()
            for (block, _), (target, _) in zip(pairs, back, strict=True):
                expected[target] = kept[block]
            right &= torch.equal(region.cpu(), expected)
    return right


def check_order(device: Device, way: str) -> list[str]:
    """The engine writes, stores and overwrites at once: slots must hold the bytes from before the mark.

    On a card the engine's work begins late, so a copy that does not wait for it is wrong. The last check is the
    negative control: with a mark from before that work, the bytes must be those from before it.
    """
    layers = make_layers(device, "LBNHC", SMALL, BLOCKS)
    cache = DeviceCache.from_tensors(layers, BLOCKS)
    arena, pairs = touched_arena(SLOTS, cache.shard_bytes), [(block, 19 - block) for block in range(16)]

    def fill(value: int) -> None:
        for layer in layers.values():
            layer.fill_(value)

    def copy(begin: Callable[..., Any], before: int, after: int) -> bool:
        """Copy behind a late fill with `before`, then fill with `after`; whether the host did not wait for it."""
        device.delay()
        fill(before)
        is_pending = device.record_pending()
        copying = begin(pairs, copier.mark())
        late = is_pending()
        copier.hold(copying)
        if begin == copier.begin_store:
            fill(after)
            copying.wait()
        return late

    right = late = True
    with device.copier(cache, arena, way) as copier:
        copier.store(pairs)  # tables and compilers are made once, at the first copies
        copier.load(pairs)
        for pattern in range(PATTERNS):
            late &= copy(copier.begin_store, pattern, 255)
            right &= bool((arena[4:] == pattern).all())
            late &= copy(copier.begin_load, 254, 254)
            right &= all(bool((layer[:16] == pattern).all()) for layer in layers.values())
        noticed = True
        if device.cuda:
            fill(1)
            device.synchronize()
            mark = copier.mark()
            device.delay()
            fill(2)
            copier.begin_store(pairs, mark).wait()
            noticed = not bool((arena[4:] == 2).all())
    found = (
        (right, "copies ran before the engine's work or after it was overwritten"),
        (late, "the host waited for the device when it began a copy"),
        (noticed, "a store that did not wait was not noticed: the order was not tested"),
    )
    return [what for ok, what in found if not ok]


def time_copies(device: Device, way: str) -> list[dict[str, Any]]:
    """A table row for each size of pieces and direction."""
    sizes = device.sizes
    total = sizes.blocks * sizes.block_bytes
    flat = torch.zeros(total, dtype=torch.uint8, device=device.torch)
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.cuda)
    rows = []
    for pieces, order, expected in TIMED:
        cache = make_cache(device, order, sizes, 2 * sizes.blocks)
        arena = touched_arena(2 * sizes.blocks, sizes.block_bytes)
        pairs = [((37 * i) % (2 * sizes.blocks), i) for i in range(sizes.blocks)]
        with device.copier(cache, arena, way) as copier:
            for up, begin, target, source in (
                (False, copier.begin_store, host, flat),
                (True, copier.begin_load, flat, host),
            ):
                plain = partial(target.copy_, source, non_blocking=True)
                alone_s, ours_s = device.measure_s(plain, partial(copy_blocks, copier, begin, pairs))
                rows.append(
                    {
                        "pieces": pieces,
                        "direction": "load" if up else "store",
                        "way": name_way(copier, way, len(pairs), up),
                        "GB/s": total / ours_s / 1e9,
                        "of one copy": alone_s / ours_s,
                        "expected": f"≥ {expected}" if way == "auto" else "",
                    }
                )
    return rows


def copy_blocks(copier: Copier, begin: Callable[..., Any], pairs: list[tuple[int, int]]) -> None:
    """One copy, whose end the current stream waits for."""
    copier.hold(begin(pairs, copier.mark()))


def name_way(copier: Copier, way: str, pieces: int, up: bool) -> str:
    """The way, and which one `auto` takes."""
    if way != "auto" or not isinstance(copier, CudaCopier):
        return way
    return f"auto ({copier.choice.of(pieces, to_device=up).name})"

"""Is every byte right: all layouts by one way of copying, both directions, and the order of work on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_rig import PAGE, Rig, Sizes, Trial, shared_arena, views
from kvbm.transfer import Copier, DeviceCache
from kvbm.transfer.cuda.copier import CudaCopier

PATTERNS = 32


def special_layouts(rig: Rig) -> dict[str, dict[str, torch.Tensor]]:
    """Caches that are not of equal pieces in one allocation."""

    def made(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> dict[str, torch.Tensor]:
        return {f"layers.{i}": torch.zeros(shape, dtype=dtype, device=rig.device) for i in range(count)}

    padded = torch.zeros(24, 5000, dtype=torch.uint8, device=rig.device)
    return {
        "own allocations": made(4, (24, 8, 16, 256)),
        "K and V first": made(4, (2, 24, 16, 8, 128), torch.bfloat16),
        "MLA bf16": made(4, (24, 1, 16, 576), torch.bfloat16),
        "MLA fp8, 656 bytes": made(4, (24, 1, 16, 656)),
        "fp8": made(4, (24, 8, 16, 256), torch.float8_e4m3fn),
        "TensorRT-LLM pool": {
            "pool": torch.zeros(24, 4, 2, 8 * 16 * 128, dtype=torch.float16, device=rig.device)
        },
        "padded, odd sizes": {"state": padded[:, :4321].view(24, 1, 1, 4321)},
    }


def usable(trial: Trial) -> bool:
    """Whether the trial's way of copying can be used here. If not it is left out, or wrong where it should work."""
    rig, way = trial.rig, f"copies by {trial.method}"
    if trial.method == "auto" or (trial.method in rig.offered and rig.works(trial.method)):
        return True
    if trial.method in rig.offered and trial.method != "kernel":
        trial.result.check(f"{way} ({rig.refused.pop(way)})", right=False)
    else:
        # Triton or a compiler for it may be missing. What the driver offers has to work.
        trial.result.leave_out(way, rig.refused.pop(way, "this driver or installation does not offer it"))
    return False


def check_bytes(trial: Trial, small: Sizes) -> None:
    """Every layout: out and back, block by block and layer by layer, and nothing else touched."""
    if not usable(trial):
        return
    rig, result, method = trial.rig, trial.result, trial.method
    cases = {
        order: views(rig, order, small, 24)
        for order in ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    }
    cases.update(special_layouts(rig))
    for name, caches in cases.items():
        cache = DeviceCache.from_tensors(caches, 24)
        arena = shared_arena(20, -(-cache.shard_bytes // PAGE) * PAGE)
        arena.fill_(0xA5)
        result.begin(name)
        with rig.copier(cache, arena, method) as copier:
            result.check(f"{name}, {method}", round_trip(rig, copier, cache, arena))
            if isinstance(copier, CudaCopier) and name == "own allocations":
                result.begin(f"{name}, without page locks")
                copier.locks.close()  # all goes through the small buffer from here on
                arena.fill_(0xA5)
                result.check(f"without page locks, {method}", round_trip(rig, copier, cache, arena))


def round_trip(rig: Rig, copier: Copier, cache: DeviceCache, arena: torch.Tensor) -> bool:
    """Random bytes to slots and back into other blocks: first all layers at once, then one by one."""
    pairs = [(3, 7), (4, 8), (20, 0), (11, 19)]
    back = [(9, 7), (1, 8), (5, 0), (23, 19)]
    regions = [region.device for region in cache.regions]
    for region in regions:
        fresh = torch.randint(
            -128, 127, (*region.shape, region.element_size()), dtype=torch.int8, device=rig.device
        )
        region.copy_(fresh.view(region.dtype).squeeze(-1))
    before = [region.cpu() for region in regions]
    copier.begin_store(pairs, copier.mark()).wait()
    right = all(
        torch.equal(region.slots(arena)[slot], kept[block])
        for region, kept in zip(cache.regions, before, strict=True)
        for block, slot in pairs
    )
    untouched = [slot for slot in range(len(arena)) if slot not in {slot for _, slot in pairs}]
    right = (
        right
        and bool((arena[untouched] == 0xA5).all())
        and bool((arena[:, cache.shard_bytes :] == 0xA5).all())
    )
    for layers in ([None], list(cache.layers)):
        for region, kept in zip(regions, before, strict=True):
            region.copy_(kept)
        for layer in layers:
            copying = copier.begin_load(back, copier.mark(), layer)
        copying.wait()
        for region, kept in zip(regions, before, strict=True):
            wanted = kept.clone()
            for (block, _), (target, _) in zip(pairs, back, strict=True):
                wanted[target] = kept[block]
            right = right and torch.equal(region.cpu(), wanted)
    return right


def check_order(trial: Trial, small: Sizes) -> None:
    """The engine writes, stores, and overwrites at once: the slots hold what was there at the mark.

    On a card the engine's work begins late: a copy that did not wait for it would be over before, and wrong.
    """
    if not usable(trial):
        return
    rig, result, method = trial.rig, trial.result, trial.method
    caches = views(rig, "LBNHC", small, 24)
    cache = DeviceCache.from_tensors(caches, 24)
    arena = shared_arena(20, cache.shard_bytes)
    pairs = [(block, 19 - block) for block in range(16)]

    def fill(value: int) -> None:
        for view in caches.values():
            view.fill_(value)

    with rig.copier(cache, arena, method) as copier:
        # What a way of copying does once (tables, a compiler) is no part of what is looked at.
        copier.store(pairs)
        copier.load(pairs)
        right = late = True
        for pattern in range(PATTERNS):
            result.begin(f"pattern {pattern}")
            rig.delay()
            fill(pattern)
            under_way = rig.under_way()
            copying = copier.begin_store(pairs, copier.mark())
            late = late and under_way()
            copier.hold(copying)
            fill(255)
            copying.wait()
            right = right and bool((arena[4:] == pattern).all())
            rig.delay()
            fill(254)
            under_way = rig.under_way()
            loading = copier.begin_load(pairs, copier.mark())
            late = late and under_way()
            copier.hold(loading)
            right = right and all(bool((view[:16] == pattern).all()) for view in caches.values())
        result.check(f"order on the device, {method}", right)
        result.check(f"copies begin without the host waiting for the device, {method}", late)
        if rig.cuda:
            result.check(
                f"a store that does not wait is noticed, {method}", hasty(rig, copier, fill, arena, pairs)
            )


def hasty(
    rig: Rig, copier: Copier, fill: Callable[[int], None], arena: torch.Tensor, pairs: list[tuple[int, int]]
) -> bool:
    """The negative control: a mark from before the engine's work, and so the bytes from before it."""
    fill(1)
    rig.synchronize()
    mark = copier.mark()
    rig.delay()
    fill(2)
    copier.begin_store(pairs, mark).wait()
    return not bool((arena[4:] == 2).all())

"""Many pieces in one call, again and again: drivers have crashed on batches of copies, and none promises any number."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from gpu_bytes import usable
from gpu_rig import Trial, shared_arena, views
from kvbm.transfer import Copying, DeviceCache
from kvbm.transfer.cuda.driver import BATCH_PIECES_MAX

PIECES = (4096, 16384, 65536)
"""Bytes."""
LAYERS = 16


def sweep_descriptors(trial: Trial) -> None:
    """Pieces of three sizes, few and as many in one call as we ever give, 100 times each down and up; then the bytes.

    One copy is begun while the one before is under way, as when loads are long. The host's part is what the thread that
    begins them has to do for each call.
    """
    if not usable(trial):
        return
    rig, result, method = trial.rig, trial.result, trial.method
    for size in PIECES:
        for count in (BATCH_PIECES_MAX // 16, BATCH_PIECES_MAX) if rig.cuda else (64,):
            blocks = count // LAYERS
            form = replace(trial.sizes, layers=LAYERS, heads=1, piece=size)
            cache = DeviceCache.from_tensors(views(rig, "LBNHC", form, blocks), blocks)
            kv, arena = cache.regions[0].device, shared_arena(blocks, cache.shard_bytes)
            pairs = [((37 * i) % blocks, i) for i in range(blocks)]
            kv.copy_(torch.randint(0, 255, kv.shape, dtype=torch.uint8, device=rig.device))
            before = kv.clone()
            what = f"{count} pieces of {size // 1024} KiB, {method}"
            with rig.copier(cache, arena, method) as copier:
                for direction, begin in (
                    ("down", partial(copier.begin_store, pairs)),
                    ("up", partial(copier.begin_load, pairs)),
                ):
                    title = f"{what}, {direction}"
                    result.begin(title)
                    host_s, whole_s = begun_again_and_again(begin, trial.sizes.repeats)
                    copied = trial.sizes.repeats * blocks * cache.shard_bytes
                    result.add(f"{title}, the host's part", host_s * 1e6, "µs a call")
                    result.add(title, copied / whole_s / 1e9, "GB/s")
                    if direction == "down":
                        kv.zero_()
                        rig.synchronize()
            result.check(f"the bytes of {what}", torch.equal(kv, before))


def begun_again_and_again(begin: Callable[[], Copying], times: int) -> tuple[float, float]:
    """The median of the seconds that beginning a copy takes, and the seconds of them all, begin to end."""
    host_s, earlier = [], []
    begun_s = time.perf_counter()
    for _ in range(times):
        call_s = time.perf_counter()
        earlier.append(begin())
        host_s.append(time.perf_counter() - call_s)
        if len(earlier) > 1:
            earlier.pop(0).wait()
    for copying in earlier:
        copying.wait()
    return statistics.median(host_s), time.perf_counter() - begun_s

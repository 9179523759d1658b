"""Preparing a large arena beside the engine: its start, the capture of its graphs, and its first steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from gpu_beside import Steps, kv_of, large_model, step_of
from gpu_rig import PREPARED_S, Sizes, Trial, shared_arena, untouched_arena, views
from gpu_rows import Result
from kvbm.transfer import Copier, DeviceCache
from kvbm.transfer.cuda.copier import CudaCopier

REPLAYS = 1000
"""So many steps are timed alone. Beside page locks it is as many as there are until all is locked, at most so many."""
LOCKING_REPLAYS_MAX = 20_000


def time_arena(trial: Trial) -> None:
    """What a large arena costs the engine's start, and how long its pages take to be locked behind it."""
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    cache = DeviceCache.from_tensors(views(rig, "LBNHC", sizes, 4), 4)
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()  # an engine that starts has no page-locked memory to use again
    begun_s = time.perf_counter()
    arena = shared_arena(sizes.arena_bytes // sizes.block_bytes, sizes.block_bytes)
    result.add("arena, pages touched", time.perf_counter() - begun_s, "s")
    begun_s = time.perf_counter()
    with rig.copier(cache, arena, prepared=False) as copier:
        result.add(
            "arena, the engine's start waits",
            time.perf_counter() - begun_s,
            "s",
            0.2,
            at_most=True,
            advice="every start of the engine is so much longer; no setting changes it",
        )
        copier.begin_store([(1, len(arena) - 1)], copier.mark()).wait()
        if isinstance(copier, CudaCopier):
            result.check("all pages are locked in time", copier.prepared(PREPARED_S))
            result.add("arena, all pages locked after", time.perf_counter() - begun_s, "s")


def check_captures(trial: Trial, small: Sizes) -> None:
    """A CUDA graph is captured in torch's default mode, which forbids every thread what may be unsafe, and in the
    midst of it a thread of ours does all that it ever does: prepares, locks pages, copies, gives everything back."""
    arena = shared_arena(2 * small.blocks, small.block_bytes)
    live_within_a_capture(trial, arena, small, "our preparation")


def check_untouched_captures(trial: Trial) -> None:
    """The same over a larger memory that nobody has touched: its pages come into being and are locked meanwhile, and
    the first copies go through the small buffer."""
    sizes = trial.sizes
    arena = untouched_arena(sizes.untouched_bytes // sizes.block_bytes, sizes.block_bytes)
    begun_s = time.perf_counter()
    live_within_a_capture(trial, arena, sizes, "the preparation of untouched memory")
    trial.result.add(
        "captured beside the preparation of untouched memory", time.perf_counter() - begun_s, "s"
    )


def live_within_a_capture(trial: Trial, arena: torch.Tensor, sizes: Sizes, beside: str) -> None:
    """Capture a graph. In its midst a thread makes a copier, uses it before and after all is locked, and closes it.

    The blocks go to the last slots: those are locked last.
    """
    rig, result = trial.rig, trial.result
    blocks = min(2 * sizes.blocks, len(arena))
    cache = DeviceCache.from_tensors(views(rig, "LBNHC", sizes, blocks), blocks)
    kv = cache.regions[0].device
    pairs = [(block, len(arena) - 1 - block) for block in range(blocks)]
    locked = [not rig.cuda]

    def live() -> None:
        with rig.copier(cache, arena, "auto", prepared=False) as copier:
            copier.adopt_thread()
            copier.store(pairs[:1])
            if isinstance(copier, CudaCopier):
                locked[0] = copier.prepared(PREPARED_S)
            copier.store(pairs)
            kv.zero_()  # no waiting for the device: that ends a capture in any mode
            copier.load(pairs)

    kv.copy_(torch.randint(0, 255, kv.shape, dtype=torch.uint8, device=rig.device))
    before, numbers = kv.clone(), torch.ones(1000, device=rig.device)
    rig.synchronize()
    graph = torch.cuda.CUDAGraph() if rig.cuda else None
    capture = torch.cuda.graph(graph, capture_error_mode="global") if graph else nullcontext()
    with ThreadPoolExecutor(1) as ours, capture:
        doubled = numbers * 2
        ours.submit(live).result()
        doubled += 1
    if graph is not None:
        doubled.zero_()
        graph.replay()
        rig.synchronize()
    result.check(f"a graph that was captured beside {beside}", bool((doubled == 3).all()))
    result.check(f"what was copied beside a capture, {beside}", torch.equal(kv, before))
    result.check(f"all pages are locked in time, {beside}", locked[0])


def time_replays(trial: Trial) -> None:
    """Decode steps, replayed as CUDA graphs: alone, and while pages that nobody has touched are being locked.

    That is what users of an engine feel that has just started: nearly every step may meet a lock.
    """
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    model = large_model(rig, sizes)
    step = step_of(rig, 4, sizes.tokens - 1, 1)
    steps = Steps(rig, model, kv_of(model, rig, int(step.tables.max()) + 1), step)
    cache = DeviceCache.from_tensors(views(rig, "LBNHC", sizes, 4), 4)
    arena = untouched_arena(sizes.arena_bytes // sizes.block_bytes, sizes.block_bytes)
    replays = REPLAYS if rig.cuda else 20
    alone = seconds_of(steps, replays, lambda: False)
    tell_steps(result, "alone", alone)
    with rig.copier(cache, arena, rig.methods[0], prepared=False) as copier:
        copier.begin_store([(0, 0)], copier.mark()).wait()
        begun_s = time.perf_counter()
        beside = seconds_of(steps, LOCKING_REPLAYS_MAX if rig.cuda else replays, all_locked(copier))
        took_s = time.perf_counter() - begun_s
        if isinstance(copier, CudaCopier):
            if copier.locks.refusal:
                result.leave_out("decode steps beside page locks", copier.locks.refusal)
                return
            result.add("steps beside page locks, that took", took_s, "s")
            result.add("steps beside page locks, locked", copier.locks.locked_slots, f"of {len(arena)} slots")
            result.check("there were steps while pages were locked", len(beside) > 10)
    if not beside:
        return
    tell_steps(result, "beside page locks", beside)
    result.add(
        "decode step beside page locks, median", quantile(beside, 0.5) / quantile(alone, 0.5), "× alone"
    )
    result.add(
        "decode step beside page locks, 99th percentile",
        quantile(beside, 0.99) / quantile(alone, 0.99),
        "× alone",
        1.5,
        at_most=True,
        advice="tokens come late for the first seconds after a start, until all of host memory is locked; "
        "less of it (DYN_KVBM_CPU_CACHE_GB) is locked sooner",
    )


def all_locked(copier: Copier) -> Callable[[], bool]:
    """Ask whether there are pages left to lock; a CPU has none, and is never through."""
    return copier.locks.settled.is_set if isinstance(copier, CudaCopier) else lambda: False


def seconds_of(steps: Steps, most: int, over: Callable[[], bool]) -> list[float]:
    """The time of each step, until it is over or there were so many."""
    times: list[float] = []
    while len(times) < most and not over():
        begun_s = time.perf_counter()
        steps.run(1)
        times.append(time.perf_counter() - begun_s)
    return times


def tell_steps(result: Result, title: str, times: Sequence[float]) -> None:
    """What the steps took."""
    result.add(f"decode step {title}, median", quantile(times, 0.5) * 1e3, "ms")
    result.add(f"decode step {title}, 99th percentile", quantile(times, 0.99) * 1e3, "ms")
    result.add(f"decode step {title}, slowest", max(times) * 1e3, "ms")


def quantile(times: Sequence[float], share: float) -> float:
    """The time that this share of them does not exceed."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]

"""Page-locking host memory: what it costs an engine's start, and whether it disturbs the capture of a CUDA graph."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.gpu_kit.device import LOCKED_S_MAX, Device, make_cache, touched_arena, untouched_arena
from benchmarks.gpu_kit.ledger import LEFT_OUT, Row, make_row
from kvbm.transfer import Copier
from kvbm.transfer.cuda.copier import CudaCopier

START_S_MAX = 0.2
CAPTURED_BYTES = 1 << 30


class RefusedLocksError(Exception):
    """Something refuses to lock pages: copies go through a buffer, and there is nothing to measure."""


def measure(request: dict[str, Any]) -> Row:
    """The row of one question."""
    answer = {"start": measure_start, "captures": check_captures}
    try:
        return answer[request["options"]["what"]](request["rehearse"])
    except RefusedLocksError as refused:
        return make_row([], why=f"page locks are refused: {refused}", state=LEFT_OUT)


def wait_until_locked(copier: Copier) -> bool:
    """Whether all pages are locked in time; a CPU has none to lock. Raises RefusedLocksError."""
    if not isinstance(copier, CudaCopier):
        return True
    locked = copier.prepared(LOCKED_S_MAX)
    if copier.locks.refusal:
        raise RefusedLocksError(copier.locks.refusal)
    return locked


def measure_start(rehearse: bool) -> Row:
    """How long a large arena makes the engine's start wait, and when all of it is locked behind the start."""
    device = Device(rehearse)
    sizes = device.sizes
    cache = make_cache(device, "LBNHC", sizes, 4)
    began_s = time.perf_counter()
    arena = touched_arena(sizes.arena_bytes // sizes.block_bytes, sizes.block_bytes)
    touched_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    with device.copier(cache, arena, locked=False) as copier:
        start_s = time.perf_counter() - began_s
        copier.begin_store([(1, len(arena) - 1)], copier.mark()).wait()
        locked = wait_until_locked(copier)
        locked_s = time.perf_counter() - began_s
    gib = f"{sizes.arena_bytes / 2**30:.3g} GiB"
    rows = [
        {"what": f"{gib}, pages touched by the manager", "s": touched_s},
        {"what": f"{gib}, the engine's start waits", "s": start_s, "expected": f"≤ {START_S_MAX}"},
        {"what": f"{gib}, all pages locked after", "s": locked_s},
    ]
    wrong = [] if locked else [f"not all pages are locked after {LOCKED_S_MAX:g} s"]
    return make_row(wrong, title="Page locks", rows=rows)


def check_captures(rehearse: bool) -> Row:
    """A CUDA graph is captured in the mode that forbids every thread unsafe calls, while a thread locks and copies.

    The pages do not exist before, so the first copies go through the staging buffer. The blocks go to the last slots,
    which are locked last.
    """
    device = Device(rehearse)
    sizes = device.sizes
    size = CAPTURED_BYTES if device.cuda else sizes.arena_bytes
    arena = untouched_arena(size // sizes.block_bytes, sizes.block_bytes)
    blocks = min(2 * sizes.blocks, len(arena))
    cache = make_cache(device, "LBNHC", sizes, blocks)
    kv = cache.regions[0].device
    pairs = [(block, len(arena) - 1 - block) for block in range(blocks)]

    def lock_and_copy() -> bool:
        with device.copier(cache, arena, locked=False) as copier:
            copier.adopt_thread()
            copier.store(pairs[:1])
            locked = wait_until_locked(copier)
            copier.store(pairs)
            kv.zero_()  # waiting for the device would end a capture in any mode
            copier.load(pairs)
            return locked

    kv.copy_(torch.randint(0, 255, kv.shape, dtype=torch.uint8, device=device.torch))
    before, numbers = kv.clone(), torch.ones(1000, device=device.torch)
    device.synchronize()
    graph = torch.cuda.CUDAGraph() if device.cuda else None
    began_s = time.perf_counter()
    with (
        ThreadPoolExecutor(1) as thread,
        torch.cuda.graph(graph, capture_error_mode="global") if graph else nullcontext(),
    ):
        doubled = numbers * 2
        locked = thread.submit(lock_and_copy).result()
        doubled += 1
    took_s = time.perf_counter() - began_s
    if graph is not None:
        doubled.zero_()
        graph.replay()
        device.synchronize()
    found = (
        (bool((doubled == 3).all()), "the graph computes something else"),
        (torch.equal(kv, before), "the bytes copied beside the capture differ"),
        (locked, f"not all pages are locked after {LOCKED_S_MAX:g} s"),
    )
    rows = [{"what": f"a capture while {size / 2**30:.3g} GiB are locked", "s": took_s}]
    return make_row([what for ok, what in found if not ok], title="Page locks", rows=rows)

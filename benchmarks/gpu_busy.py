"""Copies by the rank's own thread, while the engine's thread works in Python: they share one interpreter lock."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch

from gpu_beside import DECODE_BAR, STORES_ADVICE, Steps, kv_of, large_model, step_of
from gpu_rig import Rig, Trial, shared_arena, views
from gpu_rows import Result
from kvbm.transfer import Copier, DeviceCache

TURN_S = 0.005
"""An engine's thread that is half busy works so long, and then waits for as long."""
LOAD_S_MAX = 60.0

BARS = {"thread idle": 0.9, "thread half busy": None, "thread bound to Python": 0.5}
"""What is asked of long loads, of one page-locked copy, by what the engine's thread does meanwhile."""
ADVICE = {
    "thread idle": "loads are slower than the link: the part `copies` says how much of that is copying itself",
    "thread bound to Python": "loads wait for the interpreter's lock while the engine's thread works in Python: a hit "
    "is worth less than the link's speed promises, most of all in a rank that shares its process with the scheduler",
}
STORED = 8
"""Blocks of each step, as in the part `stores`."""


def rank_side(result: Result, what: str) -> ModuleType | None:
    """gpu_mover.py; None, and `what` left out, where a dependency of kvbm is missing."""
    try:
        import gpu_mover
    except ImportError as error:
        result.leave_out(what, error)
        return None
    return gpu_mover


def time_loads(trial: Trial) -> None:
    """Loads by another thread, short and long ones, beside one page-locked copy of as many bytes, all by turns.

    Without kvbm's dependencies there is no worker: then a plain thread begins each load in one call and waits for it.
    That is told, and the bars are not on it.
    """
    side, sizes = rank_side(trial.result, "loads through the worker"), trial.sizes
    lengths = (min(sizes.blocks, sizes.load_blocks), sizes.load_blocks)
    time_loads_of(trial, side, "LBNHC", "", lengths)
    # Here a copy engine takes a call for every 16 MiB: what it costs beside a busy interpreter is told, without a bar.
    time_loads_of(trial, side, "LHBNC", ", 4 KiB pieces (LHBNC)", lengths[1:])


def time_loads_of(
    trial: Trial, side: ModuleType | None, order: str, form: str, lengths: Sequence[int]
) -> None:
    """The same of one layout, `form` says which; only without a `form` the bars are on its longest load."""
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    cache = DeviceCache.from_tensors(views(rig, order, sizes, sizes.load_blocks), sizes.load_blocks)
    kv = cache.regions[0].device
    kv.copy_(torch.randint(0, 255, kv.shape, dtype=torch.uint8, device=rig.device))
    by = "a plain thread" if side is None else "the worker"
    with plain_thread(rig, cache) if side is None else side.rank_of(rig, cache) as rank:
        rank.store(range(sizes.load_blocks))
        rank.settle()
        before = kv.clone()
        for blocks in lengths:
            kv.zero_()
            rig.synchronize()
            size = blocks * cache.shard_bytes
            times = by_turns(rig, rank, blocks, size)
            for title in BARS:
                what = f"{blocks} blocks loaded by {by}{form}, the engine's {title}"
                result.add(what, size / times[title] / 1e9, "GB/s")
                # A short load is over before a thread that waits for the lock has got it once.
                bar = BARS[title] if side and not form and blocks == sizes.load_blocks else None
                advice = ADVICE.get(title, "")
                result.add(what, times["one copy"] / times[title], "of one copy", bar, advice=advice)
        rig.synchronize()
        result.check(f"every load by {by} arrived{form}", not rank.failed)
        result.check(f"the bytes of loads by {by}{form}", torch.equal(kv, before))


@contextmanager
def plain_thread(rig: Rig, cache: DeviceCache) -> Iterator[PlainThread]:
    """A thread that copies blocks to and from slots of the same numbers."""
    arena = shared_arena(cache.block_count, cache.shard_bytes)
    with rig.copier(cache, arena) as copier, ThreadPoolExecutor(1, initializer=copier.adopt_thread) as pool:
        yield PlainThread(copier, pool)


class Loaded(NamedTuple):
    """A load that has ended."""

    seconds: float


class PlainThread:
    """What `gpu_mover.Rank` is for a worker, without one."""

    def __init__(self, copier: Copier, pool: ThreadPoolExecutor) -> None:
        self._copier, self._pool = copier, pool
        self._ended: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self.failed = 0

    def store(self, blocks: Sequence[int]) -> None:
        """Store these, and wait."""
        self._copier.store([(block, block) for block in blocks])

    def settle(self) -> None:
        """There is nothing to wait for."""

    def begin_load(self, blocks: Sequence[int]) -> None:
        """Have the thread load these."""
        pairs, mark, begun_s = [(block, block) for block in blocks], self._copier.mark(), time.monotonic()

        def load() -> None:
            try:
                self._copier.load(pairs, mark)
            except Exception:
                self.failed += len(pairs)
                raise
            finally:
                self._ended.put(Loaded(time.monotonic() - begun_s))

        self._pool.submit(load)

    def loaded(self, idle: bool) -> list[Loaded]:
        """What has ended; with `idle` it waits a moment for that."""
        with suppress(queue.Empty):
            return [self._ended.get(timeout=0.02) if idle else self._ended.get_nowait()]
        return []


def by_turns(rig: Rig, rank: Any, blocks: int, size: int) -> dict[str, float]:
    """The median seconds of one copy of that size, and of loads of so many blocks beside each kind of thread."""
    flat, host = torch.zeros(size, dtype=torch.uint8, device=rig.device), rig.pinned(size)
    times: dict[str, list[float]] = {title: [] for title in ("one copy", *BARS)}
    for turn in range(rig.rounds + 2):
        rig.synchronize()
        begun_s = time.perf_counter()
        flat.copy_(host, non_blocking=True)
        rig.synchronize()
        taken_s = {"one copy": time.perf_counter() - begun_s}
        for title in BARS:
            taken_s[title] = seconds_of_load(rank, blocks, title)
        if turn >= 2:
            for title, seconds in taken_s.items():
                times[title].append(seconds)
    return {title: statistics.median(seen) for title, seen in times.items()}


def seconds_of_load(rank: Any, blocks: int, title: str) -> float:
    """From the call that begins the load to its end in the rank's thread; this thread is the engine's meanwhile."""
    rank.begin_load(range(blocks))
    end_s = time.monotonic() + LOAD_S_MAX
    while time.monotonic() < end_s:
        if title != "thread idle":
            work_in_python(TURN_S if title == "thread half busy" else TURN_S / 50)
        if title == "thread half busy":
            time.sleep(TURN_S)
        done = rank.loaded(idle=title == "thread idle")
        if done:
            return float(done[0].seconds)
    raise TimeoutError(f"a load of {blocks} blocks has not ended in {LOAD_S_MAX:g} s")


def work_in_python(seconds: float) -> None:
    """Never lets go of the lock by itself: a thread that wants it has to wait until it is taken away."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def time_decode(trial: Trial) -> None:
    """Decode steps with stores through the worker beside each: in pieces of 64 KiB, and of 4 KiB.

    A cache whose layers lie in the order LBNHC has one piece for each layer of a block: 64 KiB with 16 heads, 4 KiB
    with one, as in a rank of 16. In the order LHBNC every head is a piece of its own.
    """
    rig, result, sizes = trial.rig, trial.result, trial.sizes
    side = rank_side(result, "decode steps with stores through the worker")
    if side is None:
        return
    model = large_model(rig, sizes)
    step = step_of(rig, 4, sizes.tokens - 1, 1)
    steps = Steps(rig, model, kv_of(model, rig, int(step.tables.max()) + 1), step)
    blocks = 8 * sizes.blocks
    for title, order, form in (
        ("64 KiB pieces (LBNHC)", "LBNHC", sizes),
        ("4 KiB pieces (LBNHC, one head)", "LBNHC", replace(sizes, heads=1)),
        ("4 KiB pieces (LHBNC)", "LHBNC", sizes),
    ):
        cache = DeviceCache.from_tensors(views(rig, order, form, blocks), blocks)
        with side.rank_of(rig, cache) as rank:
            alone_s, beside_s = rig.median_s(
                partial(steps.run, sizes.steps),
                partial(steps.run, sizes.steps, stores_of(rank, blocks), lambda ended: ended()),
            )
            rank.settle()
            result.check(f"every store arrived, {title}", not rank.failed)
        result.add(
            f"decode step, {STORED} blocks stored beside each by the worker, {title}",
            beside_s / alone_s - 1,
            "slower",
            DECODE_BAR,
            at_most=True,
            advice=STORES_ADVICE,
        )
        result.check(f"it computed something beside {title}", steps.finite)


def stores_of(rank: Any, blocks: int) -> Callable[[], Callable[[], int]]:
    """Begins stores of the next blocks at each call, and gives what the engine's thread does behind the step."""
    place = 0

    def store() -> Callable[[], int]:
        nonlocal place
        rank.store([(place + i) % blocks for i in range(STORED)])
        place = (place + STORED) % blocks
        return cast(Callable[[], int], rank.stored)

    return store

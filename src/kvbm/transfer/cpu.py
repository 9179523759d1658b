"""Copies where the device is the CPU: strided copies between two parts of main memory.

Three things decide how fast this is inside an engine's process, and each shaped the code:

- The engine's own thread holds the GIL and gives it up only every few milliseconds. So a whole chunk of
  pairs is one call into torch, not one per block.
- The engine's OpenMP team is bound to cores and spins. A second team, started from a thread of ours, fights
  it at every barrier. So our threads copy with one OpenMP thread each.
- A thread inherits the core that the engine's thread was bound to. So ours take back the cores around it.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvbm.numa import cpus_near
from kvbm.transfer.copier import Copying, DeviceEvent, Over, Pairs, assert_arena, checked, runs
from kvbm.transfer.device_cache import DeviceCache

_log = logging.getLogger(__name__)

_CHUNK_BYTES_MIN = 1 << 20
"""A thread is worth waking for at least this much."""

_CHUNK_VIEWS_MAX = 512
"""A chunk has no more views than this: making them must not hold up the first copy for long."""

_KEPT_VIEWS_MAX = 1 << 15
"""Views kept per side: some 20 MB at most."""


class CpuCopier:
    """Copies by a few threads of its own, each chunk in one call without the GIL (see `Copier`).

    A copy that was begun is over. `threads` is how many copy at once; two saturate the memory of a small machine.
    `by_engine`: the callers are the engine's own thread, which copies what one thread is enough for itself. Waking
    another and being woken takes several times as long as copying a block, and far longer where cores are busy.
    """

    def __init__(
        self, cache: DeviceCache, arena: torch.Tensor, threads: int = 2, by_engine: bool = False
    ) -> None:
        assert threads >= 1, threads
        assert_arena(arena, cache)
        self._cache = cache
        self._arena = arena
        self._threads = threads
        self._by_engine = by_engine
        self._device = _Side([region.device for region in cache.regions])
        self._slots = _Side([region.slots(arena) for region in cache.regions])
        self._layers: dict[str, tuple[_Side, _Side]] = {}
        self._pool = ThreadPoolExecutor(threads, "kvbm-copy", initializer=prepare_thread)
        # A pool makes threads when work arrives; meeting at a barrier, all exist before the first load.
        meeting = threading.Barrier(threads)
        for arrival in [self._pool.submit(meeting.wait) for _ in range(threads)]:
            arrival.result()

    def adopt_thread(self) -> None:
        """Our pool's threads copy, in whichever thread the call comes."""

    def mark(self) -> DeviceEvent | None:
        """Nothing to wait for: on a CPU work is done when its call returns."""
        return None

    def begin_store(self, pairs: Pairs, after: DeviceEvent | None = None) -> Copying:
        """Device blocks → slots."""
        del after  # there is nothing to wait for
        self._copy(pairs, self._device, self._slots, to_device=False)
        return Over()

    def begin_load(self, pairs: Pairs, after: DeviceEvent | None = None, layer: str | None = None) -> Copying:
        """Slots → device blocks."""
        del after  # there is nothing to wait for
        device, slots = (self._device, self._slots) if layer is None else self._layer(layer)
        self._copy(pairs, device, slots, to_device=True)
        return Over()

    def hold(self, copying: Copying) -> None:
        """The copies are over already: there is nothing to wait for."""
        assert copying.done()

    def store(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        """`begin_store`, which does not return before."""
        self.begin_store(pairs, after)

    def load(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        """`begin_load`, which does not return before."""
        self.begin_load(pairs, after)

    def close(self) -> None:
        """Wait for copies under way and end the threads. Idempotent."""
        self._pool.shutdown(wait=True)

    def _layer(self, name: str) -> tuple[_Side, _Side]:
        """One layer's sides, made on first use."""
        sides = self._layers.get(name)
        if sides is None:
            region = self._cache.layers[name]
            sides = self._layers[name] = _Side([region.device]), _Side([region.slots(self._arena)])
        return sides

    def _copy(self, pairs: Pairs, device: _Side, slots: _Side, *, to_device: bool) -> None:
        ordered = checked(pairs, self._cache, self._arena)
        bounds = self._chunk_bounds(len(ordered))
        if self._by_engine and len(bounds) == 2:
            views = _views(ordered, device, slots)
            torch._foreach_copy_(*(views if to_device else views[::-1]))
            return
        copies: list[Future[None]] = []
        try:
            for start, end in itertools.pairwise(bounds):
                # Views are built here, so that a copying thread needs the GIL twice only: to start, to report.
                views = _views(ordered[start:end], device, slots)
                targets, sources = views if to_device else views[::-1]
                copies.append(self._pool.submit(torch._foreach_copy_, targets, sources))
        finally:
            # Every chunk must have ended before the caller gets an error: it may free the memory that they write to.
            errors = [copy.exception() for copy in copies]
        for error in errors:
            if error is not None:
                raise error

    def _chunk_bounds(self, pair_count: int) -> list[int]:
        """Where to cut the pairs: one chunk per thread, more only where building views takes long.

        Fewer chunks mean fewer waits for the GIL; more chunks let views be built while others are copied.
        """
        copied_bytes = pair_count * self._cache.shard_bytes
        by_bytes = min(self._threads, copied_bytes // _CHUNK_BYTES_MIN)
        by_views = pair_count * len(self._cache.regions) // _CHUNK_VIEWS_MAX
        chunk_count = min(pair_count, max(1, by_bytes, by_views))
        return [pair_count * index // chunk_count for index in range(chunk_count + 1)] if pair_count else []


def _views(ordered: Pairs, device: _Side, slots: _Side) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(device views, slot views): one of each per run of pairs and region."""
    device_views: list[torch.Tensor] = []
    slot_views: list[torch.Tensor] = []
    for run in runs(ordered):
        device_views += device.views(run.block, run.length)
        slot_views += slots.views(run.slot, run.length)
    return device_views, slot_views


class _Side:
    """The regions of one side of a copy, and the views of single blocks that were made of them lately.

    Where pieces are small, making views takes as long as copying them, and it needs the GIL.
    """

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        self._regions = regions
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._kept_max = _KEPT_VIEWS_MAX // len(regions)

    def views(self, first: int, length: int) -> list[torch.Tensor]:
        """One view per region of the `length` blocks (or slots) from `first` on."""
        if length > 1:
            return [region.narrow(0, first, length) for region in self._regions]
        kept = self._kept.get(first)
        if kept is None:
            # Inference mode spares each view its autograd part; it is a plain view none the less.
            with torch.inference_mode():
                kept = [region[first] for region in self._regions]
            if len(self._kept) >= self._kept_max:
                self._kept.clear()
            self._kept[first] = kept
        return kept


def prepare_thread() -> None:
    """Make the calling thread, which must be one of ours, independent of the engine's thread binding."""
    # First let torch set its default for this thread, else it would do so later and undo the next line.
    torch.get_num_threads()
    try:
        # Not torch.set_num_threads: that changes the default of every later thread of the engine as well
        # (and vLLM's CPU worker replaces it by a warning). This one is the thread's own.
        ctypes.CDLL(None).omp_set_num_threads(1)
    except (AttributeError, OSError):
        _log.debug("no OpenMP runtime found: torch decides how many threads copy")
    _widen_affinity()


def _widen_affinity() -> None:
    """Let the calling thread run on every core of the process's NUMA nodes that its parent may use.

    The parent process was not bound by the engine, so its mask still honours taskset and cpusets.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    try:
        own = os.sched_getaffinity(0)
        cores = own | os.sched_getaffinity(os.getppid())
        near = cpus_near(own)
        os.sched_setaffinity(0, (cores & near) | own if near else cores)
    except OSError as error:
        _log.debug("copy thread stays on the cores it inherited: %s", error)

"""What the parts of `gpu.py` stand on: the device under test, and its caches and arenas."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

import torch

from gpu_rows import Result
from kvbm.errors import KvbmError
from kvbm.transfer import Copier, CpuCopier, DeviceCache, arena_tensor, make_copier

PAGE = 4096
PREPARED_S = 60.0
DELAY_CYCLES = 5_000_000  # some 3 ms


@dataclass(frozen=True)
class Sizes:
    """How much is moved. `blocks` of `layers × heads × piece` bytes, in a cache and an arena of twice as many.

    `load_blocks` are those of one long load, on a card several windows of `kvbm.worker.loading`. `repeats` is how often
    the same copy is begun.
    """

    layers: int = 28
    heads: int = 16
    piece: int = 4096
    blocks: int = 64
    arena_bytes: int = 8 << 30
    untouched_bytes: int = 1 << 30
    load_blocks: int = 2048
    repeats: int = 100
    tokens: int = 2000
    steps: int = 30

    @property
    def block_bytes(self) -> int:
        return self.layers * self.heads * self.piece


class Rig:
    """The device under test. On CUDA copies run on streams; the rehearsal's are over when they return."""

    def __init__(self, rehearse: bool, broken: Collection[str] = ()) -> None:
        """`broken` are ways of copying that ended a process before: they are not used."""
        self.cuda = not rehearse
        if rehearse:
            torch.set_num_threads(1)  # what is computed is too small to be shared out
        self.rounds = 15 if self.cuda else 1
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.broken = frozenset(broken)
        self.refused: dict[str, str] = {}
        """What fails here, and why: ways of copying, page locks."""
        # `auto` may take one of them, which would end this process too, so the first other one stands for it.
        self.auto = "auto"
        if self.cuda and self.broken:
            self.auto = next((way for way in self.offered if way not in self.broken), "auto")

    @cached_property
    def offered(self) -> list[str]:
        """The ways of copying that this driver and installation offer."""
        if not self.cuda:
            return ["cpu"]
        from kvbm.transfer.cuda.choice import list_methods
        from kvbm.transfer.cuda.device import TorchDevice
        from kvbm.transfer.cuda.driver import CudaDriver

        return list_methods(CudaDriver(), TorchDevice(self.device))

    @cached_property
    def methods(self) -> list[str]:
        """Those of them that work."""
        return [method for method in self.offered if method not in self.broken and self.works(method)]

    def works(self, method: str) -> bool:
        """A kernel shows only when it is compiled that a compiler is missing; the rest is measured all the same."""
        cache = DeviceCache.from_tensors(
            {"layer": torch.zeros(2, 1, 16, 64, dtype=torch.uint8, device=self.device)}, 2
        )
        try:
            with self.copier(cache, shared_arena(2, PAGE), method) as copier:
                copier.store([(0, 1)])
        except Exception as error:
            # A compiler or a library that Triton misses shows in many ways; the others are measured all the same.
            self.synchronize()  # where the context is lost, nothing else can be measured: this raises
            self.refused[f"copies by {method}"] = str(error).strip().partition("\n")[0]
            return False
        return True

    @contextmanager
    def copier(
        self,
        cache: DeviceCache,
        arena: torch.Tensor,
        method: str = "auto",
        prepared: bool = True,
    ) -> Iterator[Copier]:
        """A copier, and with `prepared` not before its arena is page-locked; on a CPU the only one there is."""
        if not self.cuda:
            yield CpuCopier(cache, arena)
            return
        from kvbm.transfer.cuda.copier import CudaCopier

        by = self.auto if method == "auto" else method
        copier = make_copier(cache, arena, by)
        assert isinstance(copier, CudaCopier)
        try:
            if prepared and not copier.prepared(PREPARED_S):
                raise KvbmError(f"the arena is not page-locked after {PREPARED_S:g} s")
            yield copier
        finally:
            if copier.locks.refusal:
                self.refused["page locks"] = copier.locks.refusal
            copier.close()

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def delay(self) -> None:
        """Some milliseconds of work for the present stream, so that what is begun now cannot be over at once."""
        if self.cuda:
            torch.cuda._sleep(DELAY_CYCLES)

    def under_way(self) -> Callable[[], bool]:
        """Ask later whether what the present stream has to do now is still under way; on a CPU it counts as such."""
        if not self.cuda:
            return lambda: True
        end = torch.cuda.Event()
        end.record()
        return lambda: not end.query()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.cuda)

    def median_s(self, *works: Callable[[], object]) -> list[float]:
        """The median wall time of each work, begin to end, all taken by turns."""
        return self._medians(self._wall_s, works)

    def median_device_s(self, *works: Callable[[], object]) -> list[float]:
        """The median time that the device takes for each work, all taken by turns.

        What the host does first is hidden, as far as it takes less than the delay before.

        A work ends when the present stream has got past it, so one on another stream must be held for.
        """
        return self._medians(self._device_s if self.cuda else self._wall_s, works)

    def _medians(
        self, seconds: Callable[[Callable[[], object]], float], works: Sequence[Callable[[], object]]
    ) -> list[float]:
        times: list[list[float]] = [[] for _ in works]
        for turn in range(self.rounds + 2):
            for work, seen in zip(works, times, strict=True):
                taken_s = seconds(work)
                if turn >= 2:
                    seen.append(taken_s)
        return [statistics.median(seen) for seen in times]

    def _wall_s(self, work: Callable[[], object]) -> float:
        self.synchronize()
        begun_s = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begun_s

    def _device_s(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        self.delay()  # meanwhile the work is submitted
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def shared_arena(slots: int, slot_bytes: int, threads: int = 8) -> torch.Tensor:
    """A memfd arena as the manager makes it, its pages touched by several threads."""
    arena = untouched_arena(slots, slot_bytes)
    flat = arena.view(-1)
    parts = range(0, len(flat), max(PAGE, 64 << 20))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: flat[start : start + (64 << 20) : PAGE].zero_(), parts))
    return arena


def untouched_arena(slots: int, slot_bytes: int) -> torch.Tensor:
    """The same before anybody has touched its pages."""
    file = os.memfd_create("arena")
    os.ftruncate(file, slots * slot_bytes)
    try:
        return mapped_arena(file, slots, slot_bytes)
    finally:
        os.close(file)


def mapped_arena(file: int, slots: int, slot_bytes: int) -> torch.Tensor:
    """The slots behind a descriptor, which stays the caller's."""
    memory = mmap.mmap(file, slots * slot_bytes)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return arena_tensor(memory, slots, slot_bytes)


def views(rig: Rig, order: str, sizes: Sizes, blocks: int) -> dict[str, torch.Tensor]:
    """Layers `[blocks, heads, tokens, bytes]` of one allocation whose axes lie as `order` says."""
    extent = {"L": sizes.layers, "B": blocks, "H": sizes.heads, "N": 16, "C": sizes.piece // 16}
    whole = torch.zeros([extent[axis] for axis in order], dtype=torch.uint8, device=rig.device)
    logical = whole.permute([order.index(axis) for axis in "LBHNC"])
    return {f"layers.{index}": logical[index] for index in range(sizes.layers)}


SMALL = Sizes(
    layers=4,
    heads=4,
    piece=2048,
    blocks=8,
    arena_bytes=1 << 24,
    untouched_bytes=1 << 22,
    load_blocks=24,
    repeats=3,
    tokens=64,
    steps=2,
)
"""What is checked byte by byte, and all that a rehearsal does."""


@dataclass
class Trial:
    """All that a part is given. `method` is the way of copying that it is about, where it is about one."""

    result: Result
    rehearse: bool
    method: str = ""
    broken: frozenset[str] = frozenset()

    @cached_property
    def rig(self) -> Rig:
        """The device: the first use of it makes this process's context."""
        return Rig(self.rehearse, self.broken)

    @property
    def sizes(self) -> Sizes:
        return SMALL if self.rehearse else Sizes()

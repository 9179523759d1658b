"""The device under test: its caches, host arenas, copiers and clocks. Needs torch, and on a card triton."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from kvbm.errors import KvbmError
from kvbm.transfer import Copier, CpuCopier, DeviceCache, arena_tensor, make_copier
from kvbm.transfer.cuda.copier import CudaCopier

PAGE = 4096
LOCKED_S_MAX = 60.0
DELAY_CYCLES = 5_000_000
"""About 3 ms on a card of 1.5 GHz."""
ROUNDS, WARM_ROUNDS = 15, 2


@dataclass(frozen=True)
class Sizes:
    """`blocks` of `layers * heads * piece` bytes are copied; `arena_bytes` of host memory are page-locked."""

    layers: int
    heads: int
    piece: int
    blocks: int
    arena_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layers * self.heads * self.piece


CARD = Sizes(layers=28, heads=16, piece=4096, blocks=64, arena_bytes=8 << 30)
SMALL = Sizes(layers=4, heads=4, piece=2048, blocks=8, arena_bytes=1 << 24)
"""For comparing bytes, and for all of a rehearsal."""


class Device:
    """A CUDA card, or with `rehearse` the CPU, whose copies have ended when they return."""

    def __init__(self, rehearse: bool) -> None:
        self.cuda = not rehearse
        if rehearse:
            torch.set_num_threads(1)
        self.torch = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.sizes = CARD if self.cuda else SMALL

    @contextmanager
    def copier(
        self, cache: DeviceCache, arena: torch.Tensor, way: str = "auto", locked: bool = True
    ) -> Iterator[Copier]:
        """A copier that copies in this way; with `locked`, once its arena is page-locked. Raises KvbmError."""
        if not self.cuda:
            yield CpuCopier(cache, arena)
            return
        copier = make_copier(cache, arena, way)
        assert isinstance(copier, CudaCopier)
        try:
            if locked and not copier.prepared(LOCKED_S_MAX):
                raise KvbmError(f"the arena is not page-locked after {LOCKED_S_MAX:g} s")
            yield copier
        finally:
            copier.close()

    def why_unusable(self, way: str) -> str:
        """Why this way of copying cannot be used here, or nothing. A missing compiler shows at the first copy."""
        layer = torch.zeros(2, 1, 16, 64, dtype=torch.uint8, device=self.torch)
        cache = DeviceCache.from_tensors({"layer": layer}, 2)
        try:
            with self.copier(cache, touched_arena(2, PAGE), way) as copier:
                copier.store([(0, 1)])
        except Exception as error:
            # Triton reports a missing compiler or library with many types. A lost context raises here.
            self.synchronize()
            return str(error).strip().partition("\n")[0] or type(error).__name__
        return ""

    def synchronize(self) -> None:
        """Wait for everything that was begun."""
        if self.cuda:
            torch.cuda.synchronize()

    def delay(self) -> None:
        """Keep the current stream busy for milliseconds, so that a copy begun now cannot have ended at once."""
        if self.cuda:
            torch.cuda._sleep(DELAY_CYCLES)

    def record_pending(self) -> Callable[[], bool]:
        """A function that says whether the current stream's present work is still pending; on a CPU always True."""
        if not self.cuda:
            return lambda: True
        end = torch.cuda.Event()
        end.record()
        return lambda: not end.query()

    def measure_s(self, *works: Callable[[], object]) -> list[float]:
        """The median seconds of each work from begin to end, what the host needs included. The works take turns."""
        times: list[list[float]] = [[] for _ in works]
        for turn in range(WARM_ROUNDS + (ROUNDS if self.cuda else 1)):
            for work, measured in zip(works, times, strict=True):
                self.synchronize()
                began_s = time.perf_counter()
                work()
                self.synchronize()
                if turn >= WARM_ROUNDS:
                    measured.append(time.perf_counter() - began_s)
        return [statistics.median(measured) for measured in times]


def make_layers(device: Device, order: str, sizes: Sizes, blocks: int) -> dict[str, torch.Tensor]:
    """Layers `[blocks, heads, tokens, bytes]` of one allocation whose axes lie in the given order."""
    extent = {"L": sizes.layers, "B": blocks, "H": sizes.heads, "N": 16, "C": sizes.piece // 16}
    whole = torch.zeros([extent[axis] for axis in order], dtype=torch.uint8, device=device.torch)
    logical = whole.permute([order.index(axis) for axis in "LBHNC"])
    return {f"layers.{index}": logical[index] for index in range(sizes.layers)}


def make_cache(device: Device, order: str, sizes: Sizes, blocks: int) -> DeviceCache:
    """A cache of such layers."""
    return DeviceCache.from_tensors(make_layers(device, order, sizes, blocks), blocks)


def untouched_arena(slots: int, slot_bytes: int) -> torch.Tensor:
    """Slots in shared memory as a manager creates it, without pages yet."""
    file = os.memfd_create("arena")
    os.ftruncate(file, slots * slot_bytes)
    try:
        memory = mmap.mmap(file, slots * slot_bytes)
    finally:
        os.close(file)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return arena_tensor(memory, slots, slot_bytes)


def touched_arena(slots: int, slot_bytes: int, threads: int = 8) -> torch.Tensor:
    """The same with all its pages, which several threads touch."""
    arena, piece = untouched_arena(slots, slot_bytes), 64 << 20
    flat = arena.view(-1)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: flat[start : start + piece : PAGE].zero_(), range(0, len(flat), piece)))
    return arena

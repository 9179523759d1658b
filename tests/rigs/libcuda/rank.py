"""A rank on the stand-in for a device: an engine that computes on a stream of its own, and the real worker beside it.

The engine writes and reads blocks in the order of its stream, and steps as a scheduler does that is ahead of the
device by two steps. Every block's content is one of `PATTERNS` random ones; `expected` says which, block by block, and
what a read found is compared with it when all is over. The manager is a line that says nothing: the test itself gives
slots, and takes them away.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from ctypes import byref, c_size_t, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvbm.layout import BlockLayout
from kvbm.protocol import PROTOCOL_VERSION, Welcome
from kvbm.step_plan import LoadPlan, StepPlan, StorePlan
from kvbm.testing.kv_views import SIZES, Views, block_bytes, separate, stacked
from kvbm.tiers.host import HostArena
from kvbm.transfer import DeviceCache
from kvbm.worker.jobs import FinishedLoad
from kvbm.worker.mapping import Mapping
from kvbm.worker.mover import Mover
from kvbm.worker.worker import Worker
from rigs.copies_beside import HELLO, Finder, Line
from rigs.libcuda.library import Libcuda
from rigs.libcuda.torch_cuda import DEVICE, Event, Stream, TorchCuda

BLOCKS = 24
SLOTS = 20
PATTERNS = 64
STEPS_AHEAD = 2
DEADLINE_S = 30.0
ROW_BYTES = SIZES["C"]
LAYOUTS = ("LBNHC", "BLNHC", "LHBNC", "separate")

Addresses = npt.NDArray[np.uint64]


def make_views(layout: str) -> Views:
    """KV of one byte an element; `separate` is an allocation per layer."""
    if layout == "separate":
        return separate((BLOCKS, SIZES["H"], SIZES["N"], SIZES["C"]), torch.uint8)
    return stacked(layout, torch.uint8, {**SIZES, "B": BLOCKS})


class Read(NamedTuple):
    """A read by the engine's stream: where its bytes went, and which pattern they should be."""

    row: int
    layers: tuple[int, ...]
    pattern: int
    what: str


class Engine:
    """The engine's stream, which copies blocks within the device: patterns into blocks, and blocks into a log."""

    def __init__(self, libcuda: Libcuda, views: Views, reads_max: int) -> None:
        self._libcuda = libcuda
        self.stream = Stream(libcuda)
        layers, heads, tokens = len(views), SIZES["H"], SIZES["N"]
        generator = torch.Generator().manual_seed(1)
        shape = (PATTERNS, layers, heads, tokens, ROW_BYTES)
        self.patterns = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self._log = torch.zeros((reads_max, *shape[1:]), dtype=torch.uint8)
        libcuda.own([*views.values(), self.patterns, self._log])
        self._rows = np.stack(
            [[_row_addresses(view[block]) for view in views.values()] for block in range(BLOCKS)]
        )
        self._pattern_rows = np.stack([[_row_addresses(part) for part in one] for one in self.patterns])
        self._log_rows = np.stack([[_row_addresses(part) for part in one] for one in self._log])
        self._reads: list[Read] = []
        self._marks: deque[Event] = deque()
        self._all_layers = tuple(range(layers))

    def write(self, block: int, pattern: int) -> None:
        """Compute a block."""
        self._copy(self._rows[block], self._pattern_rows[pattern])

    def read(self, block: int, pattern: int, what: str, layers: tuple[int, ...] = ()) -> Read:
        """Attend to a block, or to some layers of it."""
        layers = layers or self._all_layers
        read = Read(len(self._reads), layers, pattern, what)
        self._reads.append(read)
        self._copy(self._log_rows[read.row][list(layers)], self._rows[block][list(layers)])
        return read

    def discard(self, read: Read) -> None:
        """Whatever it found: the request that read was ended."""
        self._reads[read.row] = read._replace(layers=())

    def end_step(self) -> None:
        """Go no further than `STEPS_AHEAD` steps ahead of the device."""
        self._marks.append(self.stream.record_event())
        if len(self._marks) > STEPS_AHEAD:
            self._marks.popleft().synchronize()

    def wrong_reads(self) -> list[str]:
        """The reads that found other bytes than they should have, once all are over."""
        self.stream.synchronize()
        return [
            read.what
            for read in self._reads
            for layer in read.layers
            if not torch.equal(self._log[read.row, layer], self.patterns[read.pattern, layer])
        ]

    def _copy(self, targets: Addresses, sources: Addresses) -> None:
        """In one call: a kernel, for what matters here."""
        targets, sources = np.ascontiguousarray(targets.ravel()), np.ascontiguousarray(sources.ravel())
        sizes = np.full(len(targets), ROW_BYTES, dtype=np.uint64)
        in_stream_order = np.array([1, 0, 0, 0, 0, 0], dtype=np.int32)
        self._libcuda.call(
            "cuMemcpyBatchAsync_v2",
            *(c_void_p(array.ctypes.data) for array in (targets, sources, sizes)),
            c_size_t(len(targets)),
            c_void_p(in_stream_order.ctypes.data),
            byref(c_size_t(0)),
            c_size_t(1),
            c_void_p(self.stream.cuda_stream),
        )


def _row_addresses(part: torch.Tensor) -> Addresses:
    """The addresses of the rows of a block of one layer, `[heads, tokens, …]`."""
    return np.array([token.data_ptr() for head in part for token in head], dtype=np.uint64)


@dataclass
class Store:
    """A store that was not reported yet."""

    blocks: list[int]
    slots: list[int]
    patterns: list[int]
    released: bool = False


@dataclass
class Load:
    """A load that was not reported yet."""

    blocks: list[int]
    slots: list[int]
    patterns: list[int]
    reads: list[Read]
    taken_away: list[int]


class Rank:
    """One rank, and the scheduler's decisions for it, all by chance."""

    def __init__(self, cuda: TorchCuda, seed: int, method: str, steps: int) -> None:
        self.random = random.Random(seed)
        self._cuda = cuda
        self._views = make_views(self.random.choice(LAYOUTS))
        self.engine = Engine(cuda.libcuda, self._views, reads_max=40 * steps)
        cuda.set_stream(self.engine.stream)
        cache = DeviceCache.from_tensors(self._views, BLOCKS)
        cache.device = DEVICE
        self._arena = HostArena(
            BlockLayout(block_tokens=4, shard_bytes=cache.shard_bytes), SLOTS, touch_threads=0
        )
        self.slot_bytes, self._shard_bytes = self._arena.layout.slot_bytes, cache.shard_bytes
        self._method, self._cache = method, cache
        self._line = Line()
        self.mover = Mover(Finder(self._line), HELLO, self._map)  # type: ignore[arg-type]
        self.worker = Worker(self.mover, cache)
        self.content: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        """Per slot that holds a block: its pattern."""
        self._free_slots = list(range(SLOTS))
        self._stores: dict[int, Store] = {}
        self._loads: dict[str, Load] = {}
        self._numbers = iter(range(1, 100_000))
        self.stored = self.loaded = self.failed = 0
        self.mover.attach(0.0)
        self.mover.start()

    def _map(self, welcome: Welcome, fds: list[int]) -> Mapping:
        descriptors = [os.dup(self._arena.region_fds[0]), os.dup(self._arena.generation_fd)]
        welcome = Welcome(
            version=PROTOCOL_VERSION, epoch=welcome.epoch, slot_count=SLOTS, slot_bytes=self.slot_bytes
        )
        return Mapping(welcome, descriptors, self._cache, self._method)

    # ---- a step

    def step(self) -> None:
        """What the scheduler decides for one step, and how the rank carries it out."""
        stores = self._plan_stores()
        released = [number for number, store in self._stores.items() if self._releases(store)]
        loads = self._plan_loads()
        plan = StepPlan(stores=tuple(stores), loads=tuple(loads), released=tuple(released))
        self.worker.store(plan)
        self.worker.load(plan)
        self._forward(plan)
        self._take_results(plan)
        self.engine.end_step()
        if self.random.random() < 0.1:
            self._take_a_slot_away()

    def _plan_stores(self) -> list[StorePlan]:
        plans = []
        for _ in range(self.random.randrange(3)):
            open_blocks = {block for store in self._stores.values() for block in store.blocks}
            ready = [block for block in self.content if block not in open_blocks]
            count = min(len(ready), len(self._free_slots), self.random.randint(1, 4))
            if not count:
                break
            blocks = self.random.sample(ready, count)
            slots = [self._free_slots.pop(self.random.randrange(len(self._free_slots))) for _ in range(count)]
            number = next(self._numbers)
            self._stores[number] = Store(blocks, slots, [self.content[block] for block in blocks])
            plans.append(
                StorePlan(
                    store=number,
                    epoch=1,
                    slots=tuple(slots),
                    generations=self._arena.generations(slots),
                    device_blocks=tuple(blocks),
                )
            )
        return plans

    def _releases(self, store: Store) -> bool:
        """A request has ended: its blocks may be given away in this very step."""
        if not store.released and self.random.random() < 0.5:
            store.released = True
            return True
        return False

    def _writable(self) -> list[int]:
        """The blocks that no store reads and no load writes."""
        taken = {block for store in self._stores.values() if not store.released for block in store.blocks}
        taken |= {block for load in self._loads.values() for block in load.blocks}
        return [block for block in range(BLOCKS) if block not in taken]

    def _plan_loads(self) -> list[LoadPlan]:
        plans = []
        for _ in range(self.random.randrange(3)):
            writable = self._writable()
            leased = {slot for load in self._loads.values() for slot in load.slots}
            slots = [slot for slot in self.kept if slot not in leased]
            count = min(len(writable), len(slots), self.random.randint(1, 4))
            if not count:
                break
            blocks, slots = self.random.sample(writable, count), self.random.sample(slots, count)
            name = f"load {next(self._numbers)}"
            patterns = [self.kept[slot] for slot in slots]
            self._loads[name] = Load(blocks, slots, patterns, [], [])
            for block in blocks:
                self.content.pop(block, None)
            plans.append(
                LoadPlan(
                    request=name,
                    lookup=next(self._numbers),
                    epoch=1,
                    slots=tuple(slots),
                    generations=self._arena.generations(slots),
                    device_blocks=tuple(blocks),
                    offset=0,
                    ready=count,
                    layerwise=self.random.random() < 0.4,
                )
            )
        return plans

    def _forward(self, plan: StepPlan) -> None:
        """The forward pass: layer by layer it reads what is loaded beside it; it reads and writes other blocks too."""
        by_layer = [(load.request, self._loads[load.request]) for load in plan.loads if load.layerwise]
        for number, layer in enumerate(self._cache.layers):
            self.worker.wait_for_layer(layer)
            for name, load in by_layer:
                block, pattern = self.random.choice(list(zip(load.blocks, load.patterns, strict=True)))
                what = f"{name}, block {block}, {layer}"
                load.reads.append(self.engine.read(block, pattern, what, (number,)))
        for block in self.random.sample(sorted(self.content), min(2, len(self.content))):
            self.engine.read(block, self.content[block], f"block {block}")
        writable = self._writable()
        for block in self.random.sample(writable, min(3, len(writable))):
            self.content[block] = self.random.randrange(PATTERNS)
            self.engine.write(block, self.content[block])

    # ---- results

    def _take_results(self, plan: StepPlan) -> None:
        for load in self.worker.finished(plan):
            self._end_load(load)
        report = self.worker.report()
        for number, (_, failed, _) in (report.stored if report else {}).items():
            store = self._stores.pop(number)
            for position, (slot, pattern) in enumerate(zip(store.slots, store.patterns, strict=True)):
                if position in failed:
                    self.failed += 1
                    self._free(slot)
                else:
                    self.stored += 1
                    self.kept[slot] = pattern

    def _end_load(self, ended: FinishedLoad) -> None:
        load = self._loads.pop(ended.request)
        for block, pattern in zip(load.blocks, load.patterns, strict=True):
            if block in ended.failed:
                self.failed += 1
            else:
                self.loaded += 1
                self.content[block] = pattern
                self.engine.read(block, pattern, f"{ended.request}, block {block}")
        if ended.failed:
            for read in load.reads:
                self.engine.discard(read)
        evicted = [slot for slot in load.slots if slot in self.kept and self.random.random() < 0.3]
        for slot in evicted:
            del self.kept[slot]
        for slot in evicted + load.taken_away:
            self._free(slot)

    def _free(self, slot: int) -> None:
        self._arena.invalidate(slot)
        self._free_slots.append(slot)

    def _take_a_slot_away(self) -> None:
        """As a manager does that gave a lease up: a load out of this slot must not count."""
        if not self._loads:
            return
        load = self.random.choice(list(self._loads.values()))
        slot = self.random.choice(load.slots)
        if self.kept.pop(slot, None) is not None:
            self._arena.invalidate(slot)
            self._arena.slot_views(slot)[0][:] = b"\x5a" * self.slot_bytes
            load.taken_away.append(slot)

    # ---- the end

    def finish(self) -> list[str]:
        """Wait for all that is open; what was found to be wrong, in blocks and in slots."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._stores or self._loads:
            assert time.monotonic() < deadline_s, f"never ended: {self._stores} {self._loads}"
            self._take_results(StepPlan(idle=True))
        wrong = self.engine.wrong_reads()
        for slot, pattern in self.kept.items():
            content = bytes(self._arena.slot_views(slot)[0][: self._shard_bytes])
            if content != self._slot_content(pattern):
                wrong.append(f"slot {slot}")
        return wrong

    def _slot_content(self, pattern: int) -> bytes:
        """A slot's bytes, made the slow way, in block 0."""
        for layer, view in enumerate(self._views.values()):
            view[0].copy_(self.engine.patterns[pattern, layer])
        return block_bytes(self._views, 0, BLOCKS)

    def close(self) -> None:
        """End the worker, which waits for copies and gives its page locks back."""
        self.worker.close()
        self._cuda.set_stream(None)
        self._line.close()
        self._arena.close()

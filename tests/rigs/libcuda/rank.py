"""A rank on the stand-in for a device: the real worker beside an engine, and a scheduler that decides at random.

No manager runs: the rig itself gives out slots and takes them back.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from dataclasses import dataclass, field

from kvbm.layout import BlockLayout
from kvbm.protocol import PROTOCOL_VERSION, Welcome
from kvbm.step_plan import LoadPlan, StepPlan, StorePlan
from kvbm.testing.kv_views import block_bytes
from kvbm.tiers.host import HostArena
from kvbm.transfer import DeviceCache
from kvbm.worker.jobs import FinishedLoad
from kvbm.worker.mapping import Mapping
from kvbm.worker.mover import Mover
from kvbm.worker.worker import Worker
from rigs.copies_beside import HELLO, Finder, Line
from rigs.libcuda.engine import BLOCKS, LAYOUTS, PATTERNS, Engine, Read, make_views
from rigs.libcuda.torch_cuda import DEVICE, TorchCuda

SLOTS = 20
DEADLINE_S = 30.0


class Memory:
    """Host memory in one life of the manager, and which slots hold a block."""

    def __init__(self, epoch: int, shard_bytes: int) -> None:
        self.epoch = epoch
        layout = BlockLayout(block_tokens=4, shard_bytes=shard_bytes)
        self.arena = HostArena(layout, SLOTS, touch_threads=0)
        self.free = list(range(SLOTS))
        self.kept: dict[int, int] = {}
        """Per slot that holds a block: its pattern."""

    def map_arena(self, cache: DeviceCache, method: str) -> Mapping:
        """As a rank does when it is welcomed."""
        descriptors = [os.dup(self.arena.region_fds[0]), os.dup(self.arena.generation_fd)]
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            epoch=self.epoch,
            slot_count=SLOTS,
            slot_bytes=self.arena.layout.slot_bytes,
        )
        return Mapping(welcome, descriptors, cache, method)

    def read_slot(self, slot: int) -> bytes:
        """The bytes of a block."""
        return bytes(self.arena.slot_views(slot)[0][: self.arena.layout.shard_bytes])

    def evict_slot(self, slot: int) -> None:
        """Another block may get the slot."""
        self.kept.pop(slot, None)
        self.arena.invalidate(slot)
        self.free.append(slot)

    def overwrite_slot(self, slot: int) -> None:
        """Evict a block and write other bytes into its slot at once, even while a load reads it."""
        del self.kept[slot]
        self.arena.invalidate(slot)
        self.arena.slot_views(slot)[0][:] = b"\x5a" * self.arena.layout.slot_bytes


@dataclass
class Copies:
    """A store or a load that was not reported yet. A `released` store's blocks may be overwritten behind it."""

    memory: Memory
    blocks: list[int]
    slots: list[int]
    patterns: list[int]
    released: bool = False
    reads: list[Read] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)

    @property
    def triples(self) -> list[tuple[int, int, int]]:
        """(block, slot, pattern) of each."""
        return list(zip(self.blocks, self.slots, self.patterns, strict=True))


class Rank:
    """One rank, and the scheduler's random decisions for it."""

    def __init__(self, cuda: TorchCuda, seed: int, method: str, steps: int) -> None:
        self.random = random.Random(seed)
        self._cuda = cuda
        self._views = make_views(self.random.choice(LAYOUTS))
        self.engine = Engine(cuda.libcuda, self._views, reads_max=40 * steps)
        cuda.set_stream(self.engine.stream)
        self._cache = cache = DeviceCache.from_tensors(self._views, BLOCKS)
        cache.device = DEVICE
        self._method = method
        self._memories = [Memory(1, cache.shard_bytes)]
        self.lines = [Line(1)]
        """The sessions with the manager, a line for each of its lives."""
        self._finder = Finder(*self.lines)
        self.mover = Mover(self._finder, HELLO, self._map)  # type: ignore[arg-type]
        self.worker = Worker(self.mover, cache)
        self.content: dict[int, int] = {}
        """Per block that the engine has computed, or that was loaded: its pattern."""
        self._stores: dict[int, Copies] = {}
        self._loads: dict[str, Copies] = {}
        self._numbers = iter(range(1, 100_000))
        self.stored = self.loaded = self.failed = 0
        self.layerwise_share = 0.4
        """Of loads. The engine waits for these in the step that plans them."""
        self.mover.attach(0.0)
        self.mover.start()

    @property
    def memory(self) -> Memory:
        """That of the manager's present life."""
        return self._memories[-1]

    def _map(self, welcome: Welcome, fds: list[int]) -> Mapping:
        return self._memories[welcome.epoch - 1].map_arena(self._cache, self._method)

    def restart_manager(self) -> None:
        """The manager ends, whatever is under way, and comes back with other memory."""
        self._memories.append(Memory(len(self._memories) + 1, self._cache.shard_bytes))
        self.lines.append(Line(self.memory.epoch))
        self._finder.lines.append(self.lines[-1])
        self.lines[-2].hang_up()

    def await_manager(self) -> None:
        """Until the present life's memory is mapped."""
        assert self.mover.adopted.wait(self.memory.epoch, DEADLINE_S)

    # ---- a step

    def run_step(self) -> None:
        """What the scheduler decides for one step, and how the rank carries it out."""
        captures = self.random.random() < 0.2
        with self.engine.capture_graph() if captures else contextlib.nullcontext():
            self.begin_step()
        self.engine.end_step()
        if self.random.random() < 0.1:
            self._overwrite_leased_slot()

    def begin_step(self) -> None:
        """The same without waiting for the device."""
        stores = self.plan_stores()
        released = [number for number, store in self._stores.items() if self._releases(store)]
        loads = self.plan_loads()
        plan = StepPlan(stores=tuple(stores), loads=tuple(loads), released=tuple(released))
        self.worker.store(plan)
        self.worker.load(plan)
        self._forward(plan)
        self._take_results(plan)

    def plan_stores(self) -> list[StorePlan]:
        """Stores of blocks that are stored by none yet; at times none."""
        plans = []
        memory = self.memory
        for _ in range(self.random.randrange(3)):
            being_stored = {block for store in self._stores.values() for block in store.blocks}
            ready = [block for block in self.content if block not in being_stored]
            count = min(len(ready), len(memory.free), self.random.randint(1, 4))
            if not count:
                break
            self.random.shuffle(memory.free)
            blocks, slots = self.random.sample(ready, count), [memory.free.pop() for _ in range(count)]
            number = next(self._numbers)
            patterns = [self.content[block] for block in blocks]
            self._stores[number] = Copies(memory, blocks, slots, patterns)
            plans.append(
                StorePlan(
                    store=number,
                    epoch=memory.epoch,
                    slots=tuple(slots),
                    generations=memory.arena.generations(slots),
                    device_blocks=tuple(blocks),
                )
            )
        return plans

    def _releases(self, store: Copies) -> bool:
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

    def plan_loads(self) -> list[LoadPlan]:
        """Loads into blocks that nothing else touches; at times none."""
        plans = []
        memory = self.memory
        for _ in range(self.random.randrange(3)):
            writable = self._writable()
            leased = {slot for load in self._loads.values() if load.memory is memory for slot in load.slots}
            found = [slot for slot in memory.kept if slot not in leased]
            count = min(len(writable), len(found), self.random.randint(1, 4))
            if not count:
                break
            blocks, slots = self.random.sample(writable, count), self.random.sample(found, count)
            name = f"load {next(self._numbers)}"
            self._loads[name] = Copies(memory, blocks, slots, [memory.kept[slot] for slot in slots])
            for block in blocks:
                self.content.pop(block, None)
            plans.append(
                LoadPlan(
                    request=name,
                    lookup=next(self._numbers),
                    epoch=memory.epoch,
                    slots=tuple(slots),
                    generations=memory.arena.generations(slots),
                    device_blocks=tuple(blocks),
                    offset=0,
                    ready=count,
                    layerwise=self.random.random() < self.layerwise_share,
                )
            )
        return plans

    def _forward(self, plan: StepPlan) -> None:
        """The forward pass: layer by layer it reads what is loaded beside it; it reads and writes other blocks too."""
        by_layer = [(load.request, self._loads[load.request]) for load in plan.loads if load.layerwise]
        for number, layer in enumerate(self._cache.layers):
            self.worker.wait_for_layer(layer)
            for name, load in by_layer:
                block, _, pattern = self.random.choice(load.triples)
                what = f"{name}, block {block}, {layer}"
                load.reads.append(self.engine.read_block(block, pattern, what, (number,)))
        for block in self.random.sample(sorted(self.content), min(2, len(self.content))):
            self.engine.read_block(block, self.content[block], f"block {block}")
        writable = self._writable()
        for block in self.random.sample(writable, min(3, len(writable))):
            self.content[block] = self.random.randrange(PATTERNS)
            self.engine.write_block(block, self.content[block])

    # ---- results

    def _take_results(self, plan: StepPlan) -> None:
        for load in self.worker.finished(plan):
            self._end_load(load)
        report = self.worker.report()
        for number, (_, failed, _) in (report.stored if report else {}).items():
            store = self._stores.pop(number)
            for position, (_, slot, pattern) in enumerate(store.triples):
                if position in failed:
                    self.failed += 1
                    store.memory.evict_slot(slot)
                else:
                    self.stored += 1
                    store.memory.kept[slot] = pattern

    def _end_load(self, ended: FinishedLoad) -> None:
        load = self._loads.pop(ended.request)
        for block, slot, pattern in load.triples:
            if block in ended.failed:
                self.failed += 1
            else:
                self.loaded += 1
                self.content[block] = pattern
                self.engine.read_block(block, pattern, f"{ended.request}, block {block}")
            if slot in load.overwritten or self.random.random() < 0.3:
                load.memory.evict_slot(slot)
        if ended.failed:
            for read in load.reads:
                self.engine.discard_read(read)

    def _overwrite_leased_slot(self) -> None:
        """A manager may do so once a lease has ended: a load out of this slot must fail."""
        if self._loads:
            load = self.random.choice(list(self._loads.values()))
            slot = self.random.choice(load.slots)
            if slot in load.memory.kept:
                load.memory.overwrite_slot(slot)
                load.overwritten.append(slot)

    # ---- the end

    def finish(self) -> list[str]:
        """Wait for all that is open; what was found to be wrong, in blocks, in slots and with captures."""
        self.await_reports()
        wrong = self.engine.wrong_reads()
        contents = [self._slot_content(pattern) for pattern in range(PATTERNS)]
        for memory in self._memories:
            for slot, pattern in memory.kept.items():
                if memory.read_slot(slot) != contents[pattern]:
                    wrong.append(f"slot {slot} of life {memory.epoch}")
        return wrong + ["a capture was broken"] * self.engine.broken_captures

    def await_reports(self) -> None:
        """Until nothing is open."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._stores or self._loads:
            assert time.monotonic() < deadline_s, f"never ended: {self._stores} {self._loads}"
            self._take_results(StepPlan(idle=True))

    def _slot_content(self, pattern: int) -> bytes:
        """A slot's bytes, made the slow way, in block 0."""
        for layer, view in enumerate(self._views.values()):
            view[0].copy_(self.engine.patterns[pattern, layer])
        return block_bytes(self._views, 0, BLOCKS)

    def close(self) -> None:
        """End the worker, which waits for copies and gives its page locks back."""
        self.worker.close()
        self._cuda.set_stream(None)
        for line in self.lines:
            line.close()
        for memory in self._memories:
            memory.arena.close()

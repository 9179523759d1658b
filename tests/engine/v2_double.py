"""A double of Model Runner V2 for what a CPU cannot do: whole graphs, and steps that are queued ahead of the device.

The connector, its rank's half and its copies are the real ones, on a model of a device whose streams advance in any
order. The double keeps V2's order of calls (`kvbm.vllm_integration.runner`; `test_model_runner.py` watches the
original's), and a scheduler that plans a step before it has heard of the last one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvbm.step_plan import LoadPlan, StepPlan, StorePlan
from kvbm.vllm_integration.connector import DynamoConnector, DynamoConnectorMetadata
from kvbm.vllm_integration.worker_side import WorkerSide
from kvbm.worker import Worker
from rigs.copies_beside import Finder, Line, make_mover
from rigs.cuda_bench import BLOCKS
from rigs.cuda_order import SLOTS, new_bench, slots_hold

LOADED_FROM = 10
"""Slots from here on hold what is loaded; those below are stored to, one after the other."""


def _content(slot: int) -> int:
    return 100 + slot


class Runner:
    """One rank. The double's own work is queued on the engine's stream and done when the model gets to it."""

    def __init__(self, seed: int, update_requests: Callable[[Any, list[int]], None]) -> None:
        self.bench, self.device = new_bench(seed, "batch")
        for slot in range(LOADED_FROM, SLOTS):
            self.bench.arena[slot].fill_(_content(slot))
        layers = tuple(self.bench.views)
        mapping: Any = SimpleNamespace(
            epoch=1,
            layers=layers,
            copier=self.bench.copier,
            slot_bytes=self.bench.arena.stride(0),
            intact=lambda slots, generations: len(slots),
            close=lambda: None,
        )
        self._mover = make_mover(Finder(Line()), mapping)
        put = self._mover.put
        self._mover.put = lambda job: (put(job), self._mover.take_jobs())  # type: ignore[method-assign, assignment]
        cache: Any = SimpleNamespace(layers=self.bench.views, device=SimpleNamespace(type="cuda"))
        worker = Worker(self._mover, cache)
        side: Any = WorkerSide.__new__(WorkerSide)
        side.worker, side._stored_plan, side._failed_blocks = worker, None, set()
        side._hybrid, side._node, side._failed_requests = None, None, set()
        self._connector: Any = DynamoConnector.__new__(DynamoConnector)
        self._connector._worker, self._connector._scheduler = side, None
        self._update_requests = update_requests

    def step(self, plan: StepPlan, new_blocks: list[int], graph: Callable[[Any], None]) -> Any:
        """`execute_model` and `sample_tokens`; what the connector has to tell."""
        connector = self._connector
        self._update_requests(self.device, new_blocks)
        metadata = DynamoConnectorMetadata(plan)
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        graph(self.device)  # replayed as a whole: no calls for layers
        connector.start_load_kv(None)
        connector.wait_for_save()
        _, received = connector.get_finished(set())
        assert connector.get_block_ids_with_load_errors() == set()
        report = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return received or set(), report

    def copying_thread(self) -> None:
        """A turn of it: it may wait for a copy, and the device goes on meanwhile."""
        self._mover.turn(wait=False)

    def close(self) -> None:
        self.bench.model.drain()
        self._mover.stop()
        self.bench.close()


class Scheduler:
    """Requests of one block each: some compute it, and it is stored; some have it loaded, and then read it."""

    def __init__(self, seed: int, released: bool = True) -> None:
        self._random = random.Random(seed)
        self._released = released
        self._free = list(range(BLOCKS))
        self._ended: list[tuple[int, int]] = []
        self._loading: dict[str, tuple[int, int]] = {}
        self._arrived: list[str] = []
        self._unheard: list[set[str]] = [set()]
        self._turn = 0
        self.stored: dict[int, int] = {}
        self.reads: dict[tuple[int, int], int] = {}

    def step(self, runner: Runner) -> None:
        """Plan a step, queue it, and hear of the one before the last."""
        self._turn += 1
        # Requests that ended lose their blocks now: these are stored in this step or never, and given away in it.
        stores = [
            StorePlan(store=slot, epoch=1, slots=(slot,), generations=(0,), device_blocks=(block,))
            for block, slot in self._ended
        ]
        self._free += [block for block, _ in self._ended]
        self._ended = []
        self._random.shuffle(self._free)
        loads, new_blocks = [], []
        for _ in range(min(len(self._free), self._random.randrange(3))):
            block, slot = self._free.pop(), self._random.randrange(LOADED_FROM, SLOTS)
            name = f"load{self._turn}-{block}"
            self._loading[name] = (block, slot)
            loads.append(_load(name, block, slot))
            new_blocks.append(block)
        reading = [self._loading.pop(name) for name in self._arrived]
        self._arrived = []
        writing = []
        if self._free and len(self.stored) < LOADED_FROM:
            block, slot = self._free.pop(), len(self.stored)
            self.stored[slot] = 10 + self._turn
            writing.append(block)
            new_blocks.append(block)
            self._ended.append((block, slot))
        turn = self._turn

        def graph(device: Any) -> None:
            device.write(writing, 10 + turn)
            device.note([block for block, _ in reading], turn)

        released = tuple(store.store for store in stores) if self._released else ()
        plan = StepPlan(stores=tuple(stores), loads=tuple(loads), released=released)
        received, _ = runner.step(plan, new_blocks, graph)
        self.reads.update({(block, turn): _content(slot) for block, slot in reading})
        self._free += [block for block, _ in reading]
        self._unheard.append(received)
        self._arrived += self._unheard.pop(0)
        for _ in range(self._random.randrange(12)):
            runner.bench.model.advance()
        if self._random.random() < 0.6:
            runner.copying_thread()

    def right(self, runner: Runner) -> bool:
        """Whether slots hold what was computed and requests read what was loaded. After `Runner.close`."""
        saved = all(slots_hold(runner.bench, [slot], value) for slot, value in self.stored.items())
        return saved and all(set(runner.device.read[at]) == {value} for at, value in self.reads.items())


def _load(name: str, block: int, slot: int) -> LoadPlan:
    return LoadPlan(
        request=name,
        lookup=1,
        epoch=1,
        slots=(slot,),
        generations=(0,),
        device_blocks=(block,),
        offset=0,
        ready=1,
    )

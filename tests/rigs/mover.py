"""A worker over CPU tensors, attached to a real server that the test's own thread steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvbm.client.channel import Channel
from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.layout import BlockLayout
from kvbm.protocol import Commit, RankReport, Ready, Reserve, ReserveReply, Reset, ResetReply, Welcome
from kvbm.step_plan import LoadPlan, StepPlan, StorePlan
from kvbm.transfer import DeviceCache
from kvbm.worker.jobs import FinishedLoad
from kvbm.worker.mapping import Mapping
from kvbm.worker.mover import Mover
from kvbm.worker.worker import Worker
from rigs.fake_tier import FakeTier
from rigs.manager import DEADLINE_S, KEYS, Client, ManagerBench

DEVICE_BLOCKS = 48
SHAPE = (DEVICE_BLOCKS, 2, 4, 8)


class WatchedFinder(ManagerFinder):
    """`searching` is set whenever a manager is looked for: a mover does that when it has no session."""

    def __init__(self, bench: ManagerBench) -> None:
        address = ManagerAddress(socket_path=bench.path, private=False)
        super().__init__(address, bench.settings, {}, time.monotonic)
        self.searching = threading.Event()

    def attempt(self) -> Channel | None:
        self.searching.set()
        return super().attempt()


class Rank:
    """A worker, its device memory, and the manager that it is attached to."""

    def __init__(
        self, directory: Path, stores_here: bool = True, reports: bool = False, **settings: Any
    ) -> None:
        self.tensors = {name: torch.zeros(SHAPE) for name in ("layer.0", "layer.1")}
        self._cache = cache = DeviceCache.from_tensors(self.tensors, DEVICE_BLOCKS)
        self.layout = BlockLayout(block_tokens=4, shard_bytes=cache.shard_bytes)
        self.directory = directory
        self.settings = {"host_blocks": 40, **settings}
        self.bench = ManagerBench(directory, **self.settings)
        self.hello = self.bench.worker_hello(layout=self.layout)
        self.mappings: list[Mapping] = []
        self.finder = WatchedFinder(self.bench)
        self.mover = Mover(self.finder, self.hello, self._map, reports=reports)
        self.worker = Worker(self.mover, cache, stores_here)
        self.leader: Client = self.bench.leader()
        self.numbers = iter(range(1, 1000))
        self.closed = False

    def attach(self) -> None:
        """Join, and start to serve."""
        done: list[BaseException | None] = []

        def join() -> None:
            try:
                self.worker.attach(DEADLINE_S)
                done.append(None)
            except Exception as error:
                done.append(error)

        thread = threading.Thread(target=join)
        thread.start()
        self.bench.until(lambda: done)
        thread.join()
        if done[0] is not None:
            raise done[0]
        self.worker.start()
        assert self.leader.expect(Ready).ready

    def _map(self, welcome: Welcome, fds: list[int]) -> Mapping:
        return self.make_mapping(welcome, fds)

    def make_mapping(self, welcome: Welcome, fds: list[int]) -> Mapping:
        """Map the memory of a session; the test may put another function in this one's place."""
        self.mappings.append(Mapping(welcome, fds, self._cache))
        return self.mappings[-1]

    @property
    def copier(self) -> Any:
        """The copier of the present session."""
        return self.mappings[-1].copier

    # ---- device memory

    def paint(self, block: int, value: float) -> None:
        """Bytes that only this value has."""
        for i, tensor in enumerate(self.tensors.values()):
            tensor[block] = (
                value + i + torch.arange(tensor[block].numel()).reshape(tensor[block].shape) / 1000
            )

    def shows(self, block: int, value: float) -> bool:
        expected = [value + i + torch.arange(64).reshape(2, 4, 8) / 1000 for i in range(len(self.tensors))]
        return all(
            torch.equal(tensor[block], want)
            for tensor, want in zip(self.tensors.values(), expected, strict=True)
        )

    # ---- stores

    def reserve(self, first: int, count: int, device_blocks: list[int]) -> StorePlan:
        number = next(self.numbers)
        parent = KEYS[first - 1] if first else b""
        self.leader.send(Reserve(store=number, parent=parent, keys=b"".join(KEYS[first : first + count])))
        reply = self.leader.expect(ReserveReply)
        return StorePlan(
            store=number,
            epoch=self.epoch,
            slots=reply.slots,
            generations=reply.generations,
            device_blocks=tuple(device_blocks),
        )

    def run_store(self, plan: StorePlan) -> tuple[int, ...]:
        """Carry the plan out; the positions that failed."""
        self.worker.store(StepPlan(stores=(plan,)))
        report = self.worker.report()
        if self.mover.reporting.on:
            assert report is None, "the mover tells it, through the manager"
            told = self.leader.expect(RankReport)
            assert told.rank == 0
            return told.stored[plan.store][0]
        assert report is not None
        ranks, failed, _ = report.stored[plan.store]
        assert ranks == 1
        return failed

    def put_in(self, count: int) -> None:
        """Blocks 0 … count-1 of the prompt are in host memory, painted 1, 2, …"""
        for block in range(count):
            self.paint(block, 10.0 * (block + 1))
        plan = self.reserve(0, count, list(range(count)))
        assert self.run_store(plan) == ()
        self.leader.send(Commit(store=plan.store))

    # ---- loads

    def lookup(self, count: int) -> LoadPlan:
        """A plan that loads the prompt's blocks into device blocks 20, 21, …"""
        number = next(self.numbers)
        found = self.leader.lookup(number, KEYS[:count])
        return LoadPlan(
            request=f"r{number}",
            lookup=number,
            epoch=self.epoch,
            slots=found.slots,
            generations=found.generations,
            device_blocks=tuple(range(20, 20 + len(found.slots))),
            offset=0,
            ready=found.ready,
        )

    def run_load(self, plan: LoadPlan) -> FinishedLoad:
        self.worker.load(StepPlan(loads=(plan,)))
        return self.finish()

    def finish(self) -> FinishedLoad:
        done: list[FinishedLoad] = []

        def over() -> bool:
            done.extend(self.worker.finished(StepPlan(idle=self.closed)))
            return bool(done)

        if self.closed:
            end_s = time.monotonic() + DEADLINE_S
            while not over():  # an idle step waits for a load by itself
                assert time.monotonic() < end_s, "the load never ended"
        else:
            self.bench.until(over, "the load never ended")
        (load,) = done
        return load

    def judge(self, plan: LoadPlan, failed: tuple[int, ...]) -> None:
        """These failed, and every other block is the right one."""
        assert failed == plan.device_blocks[len(plan.device_blocks) - len(failed) :]
        for i, block in enumerate(plan.device_blocks):
            if block not in failed:
                assert self.shows(block, 10.0 * (i + 1)), f"block {i} was reported as loaded"

    # ---- the manager

    @property
    def epoch(self) -> int:
        """Of the memory that the manager has now."""
        return self.bench.server.epoch

    def stop_manager(self) -> None:
        self.closed = True
        self.bench.open = False
        self.bench.server.close(keep=True)
        for client in self.bench.clients:
            client.close()
        os.unlink(self.bench.path)

    def await_lost_session(self) -> None:
        """Until the mover has noticed that the manager went."""
        while self.mover.connected:
            self.finder.searching.clear()
            assert not self.mover.connected or self.finder.searching.wait(DEADLINE_S)

    def start_manager(self) -> None:
        """Another life of it, and the worker comes back by itself."""
        self.bench = ManagerBench(self.directory, **self.settings)
        self.closed = False
        self.leader = self.bench.leader()
        self.bench.until(lambda: self.bench.server.engine_count == 1, "the worker did not come back")
        assert self.leader.expect(Ready).ready
        self.await_new_session()

    def await_new_session(self) -> None:
        """Until the mover is in the manager's present life."""
        self.bench.until(lambda: self.mover.connected and self.mappings[-1].epoch == self.epoch)

    def close(self) -> None:
        self.worker.close()
        assert "kvbm-mover" not in [thread.name for thread in threading.enumerate()]
        self.bench.check()
        self.bench.close()


def on_disk(make_rank: Callable[..., Rank], below: FakeTier, count: int) -> Rank:
    """A rank whose blocks are below host memory only."""
    rank = make_rank(disk_blocks=40, disk_offload_filter=False)
    rank.put_in(count)
    rank.bench.until(lambda: below.release() + len(below.medium.entries) == count)
    rank.bench.step()
    rank.leader.send(Reset(tier="host"))
    assert rank.leader.expect(ResetReply).dropped == count
    return rank

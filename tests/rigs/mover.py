"""A worker over CPU tensors, attached to a real server that the test's own thread steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.layout import BlockLayout
from kvbm.protocol import (
    Commit,
    LoadPlan,
    Ready,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
    StepPlan,
    StorePlan,
)
from kvbm.testing.fake_tier import FakeTier
from kvbm.transfer import DeviceCache
from kvbm.worker.mover import FinishedLoad
from kvbm.worker.worker import Worker
from rigs.manager import DEADLINE_S, KEYS, Client, ManagerBench

DEVICE_BLOCKS = 48
SHAPE = (DEVICE_BLOCKS, 2, 4, 8)


class Rank:
    """A worker, its device memory, and the manager that it is attached to."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.tensors = {name: torch.zeros(SHAPE) for name in ("layer.0", "layer.1")}
        cache = DeviceCache.from_tensors(self.tensors, DEVICE_BLOCKS)
        self.layout = BlockLayout(block_tokens=4, shard_bytes=cache.shard_bytes)
        self.directory = directory
        self.settings = {"host_blocks": 40, **settings}
        self.bench = ManagerBench(directory, **self.settings)
        address = ManagerAddress(socket_path=self.bench.path, private=False)
        finder = ManagerFinder(address, self.bench.settings, {}, time.monotonic)
        self.hello = self.bench.worker_hello(layout=self.layout)
        self.worker = Worker(finder, self.hello, cache)
        self.mover = self.worker._mover
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
            epoch=self.bench.server.epoch,
            slots=reply.slots,
            generations=reply.generations,
            device_blocks=tuple(device_blocks),
        )

    def run_store(self, plan: StorePlan) -> tuple[int, ...]:
        """Carry the plan out; the positions that failed."""
        self.worker.store(StepPlan(stores=(plan,)))
        report = self.worker.report()
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
            epoch=self.bench.server.epoch,
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
            done.extend(self.worker.finished(StepPlan()))
            return bool(done)

        if self.closed:
            end_s = time.monotonic() + DEADLINE_S
            while not over():
                assert time.monotonic() < end_s, "the load never ended"
                time.sleep(0.002)
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

    def stop_manager(self) -> None:
        self.closed = True
        self.bench.open = False
        self.bench.server.close(keep=True)
        for client in self.bench.clients:
            client.close()
        os.unlink(self.bench.path)

    def start_manager(self) -> None:
        """Another life of it, and the worker comes back by itself."""
        self.bench = ManagerBench(self.directory, **self.settings)
        self.closed = False
        self.leader = self.bench.leader()
        self.bench.until(lambda: self.bench.server.engine_count == 1, "the worker did not come back")
        assert self.leader.expect(Ready).ready
        epoch = self.bench.server.epoch
        self.bench.until(lambda: self.mover._mapping is not None and self.mover._mapping.epoch == epoch)

    def close(self) -> None:
        self.worker.close()
        assert not self.mover._thread.is_alive()
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

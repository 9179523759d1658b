"""A rank's worker without a manager: its real copying thread, over memory that nobody else uses. Needs kvbm's own
dependencies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

from gpu_rig import PREPARED_S, Rig
from kvbm.client.finder import ManagerFinder
from kvbm.errors import KvbmError
from kvbm.layout import BlockLayout
from kvbm.protocol import PROTOCOL_VERSION, Hello, Welcome
from kvbm.step_plan import LoadPlan, StepPlan, StorePlan
from kvbm.tiers.host import HostArena
from kvbm.transfer import DeviceCache
from kvbm.transfer.cuda.copier import CudaCopier
from kvbm.worker import FinishedLoad, Mapping, Mover, Worker

EPOCH = 1
STORES_S_MAX = 60.0
RELEASED_AFTER = 4
"""So many steps after a store its blocks may be overwritten, as when a request ends."""


class Rank:
    """A worker and its host memory; slot i holds what was stored of block i."""

    def __init__(self, worker: Worker, memory: HostArena) -> None:
        self._worker, self._memory = worker, memory
        self._numbers = count(1)
        self._unreleased: list[int] = []
        self._under_way = 0
        self.failed = 0
        """Blocks that did not arrive."""

    def store(self, blocks: Sequence[int]) -> None:
        """What the engine's thread does at the begin of a step that stores these."""
        slots = tuple(blocks)
        number = next(self._numbers)
        self._under_way += 1
        self._unreleased.append(number)
        released = (self._unreleased.pop(0),) if len(self._unreleased) > RELEASED_AFTER else ()
        plan = StorePlan(
            store=number,
            epoch=EPOCH,
            slots=slots,
            generations=self._memory.generations(slots),
            device_blocks=slots,
        )
        self._worker.store(StepPlan(stores=(plan,), released=released))

    def stored(self) -> int:
        """What the engine's thread does at the end of a step: how many stores are still under way."""
        report = self._worker.report()
        ended = {} if report is None else report.stored
        self._under_way -= len(ended)
        self.failed += sum(len(failed) for _, failed, _ in ended.values())
        return self._under_way

    def settle(self) -> None:
        """Wait for the stores. Raises TimeoutError."""
        end_s = time.monotonic() + STORES_S_MAX
        while self.stored():
            if time.monotonic() > end_s:
                raise TimeoutError(f"{self._under_way} stores have not ended in {STORES_S_MAX:g} s")
            time.sleep(0.001)

    def begin_load(self, blocks: Sequence[int]) -> None:
        """What the engine's thread does to load these."""
        slots = tuple(blocks)
        number = next(self._numbers)
        plan = LoadPlan(
            request=f"request {number}",
            lookup=number,
            epoch=EPOCH,
            slots=slots,
            generations=self._memory.generations(slots),
            device_blocks=slots,
            offset=0,
            ready=len(slots),
        )
        self._worker.load(StepPlan(loads=(plan,)))

    def loaded(self, idle: bool) -> list[FinishedLoad]:
        """What has ended; with `idle`, as in a step that computes nothing, it waits a moment for that."""
        done = self._worker.finished(StepPlan(idle=idle))
        self.failed += sum(len(load.failed) for load in done)
        return done


@contextmanager
def rank_of(rig: Rig, cache: DeviceCache) -> Iterator[Rank]:
    """A rank of this cache with as many slots as it has blocks, all of them page-locked on a card."""
    layout = BlockLayout(block_tokens=16, shard_bytes=cache.shard_bytes)
    memory = HostArena(layout, cache.block_count)
    made: list[Mapping] = []

    def mapping(welcome: Welcome, fds: list[int]) -> Mapping:
        made.append(Mapping(welcome, fds, cache, rig.auto if rig.cuda else "auto"))
        return made[-1]

    welcome = Welcome(
        version=PROTOCOL_VERSION, epoch=EPOCH, slot_count=memory.slot_count, slot_bytes=layout.slot_bytes
    )
    finder = cast(ManagerFinder, OneSession(QuietSession(welcome, memory)))
    hello = Hello(version=PROTOCOL_VERSION, role="worker", engine="gpu.py")
    worker = Worker(Mover(finder, hello, mapping), cache)
    worker.attach(PREPARED_S)
    worker.start()
    try:
        copier = made[0].copier
        if isinstance(copier, CudaCopier) and not copier.prepared(PREPARED_S):
            raise KvbmError(f"the arena is not page-locked after {PREPARED_S:g} s")
        yield Rank(worker, memory)
    finally:
        worker.close()
        memory.close()


class QuietSession:
    """A session with a manager that has given its memory, and says nothing."""

    def __init__(self, welcome: Welcome, memory: HostArena) -> None:
        self.welcome, self._memory = welcome, memory
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def take_fds(self) -> list[int]:
        """The slots and their generations, as a manager sends them."""
        return [os.dup(fd) for fd in (self._memory.region_fds[0], self._memory.generation_fd)]

    def fileno(self) -> int:
        return self._descriptor

    def send(self, message: Any) -> None:
        """Nobody listens."""

    def receive(self) -> list[Any]:
        return []

    def close(self) -> None:
        """The worker leaves."""
        os.close(self._descriptor)


class OneSession:
    """Finds that session, and no other one."""

    def __init__(self, session: QuietSession) -> None:
        self._session = session

    def establish(
        self, hello: Hello, timeout_s: float, pause: Callable[[float], None]
    ) -> tuple[QuietSession, Welcome]:
        """It is there at once."""
        del hello, timeout_s, pause
        return self._session, self._session.welcome

    def attempt(self) -> None:
        """There is no other one."""

    def welcomed(self) -> None:
        """It keeps no back-off."""

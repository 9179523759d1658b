"""Host memory → disk in simulated time: what is offered, what the admission policy lets pass, what gets written.

As `manager.offload` does it: a block is offered when it enters host memory and whenever it is used; what was
admitted waits in a queue, keeps its place in host memory only while it is being written, and is skipped when host
memory gave it up before its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import cast

from kvbm.block import BlockKey
from kvbm.policy import AdmissionPolicy
from kvbm.sim.events import Events
from kvbm.sim.machine import Link
from kvbm.sim.tier import NOBODY, SimulatedTier

QUEUE_BLOCKS_MAX = 65_536
"""As many blocks wait for the disk as in the manager; more are skipped."""


class Offloads:
    """The queue of blocks on their way down. `link` is the one to the disk."""

    def __init__(
        self,
        host: SimulatedTier,
        disk: SimulatedTier,
        admission: AdmissionPolicy,
        link: Link,
        block_bytes: int,
        events: Events,
    ) -> None:
        self._host = host
        self._disk = disk
        self._admission = admission
        self._link = link
        self._block_bytes = block_bytes
        self._events = events
        # Runs of consecutive blocks, each with the block before it.
        self._runs: deque[tuple[list[int], int]] = deque()
        self._waiting: set[int] = set()
        self._writing = False
        self.skipped_blocks = 0

    def offer(self, blocks: Sequence[int], start: int, stop: int, now_s: float) -> None:
        """`blocks[start:stop]` of a chain entered host memory, or were used."""
        run: list[int] = []
        for i in range(start, stop):
            if self._admits(blocks[i], now_s):
                if not run:
                    self._runs.append((run, blocks[i - 1] if i else NOBODY))
                run.append(blocks[i])
                self._waiting.add(blocks[i])
            elif run:
                run = []
        self._pump(now_s)

    def _admits(self, block: int, now_s: float) -> bool:
        # An admission policy asks of a key no more than that it can be told from others.
        key = cast(BlockKey, block)
        if self._disk.holds(block):
            self._admission.hit(key, now_s)
            return False
        if block in self._waiting or not self._host.holds(block) or not self._admission.offered(key, now_s):
            return False
        if len(self._waiting) >= QUEUE_BLOCKS_MAX:
            self.skipped_blocks += 1
            return False
        return True

    def _pump(self, now_s: float) -> None:
        while self._runs and not self._writing:
            run, parent = self._runs.popleft()
            # Host memory gives up continuations first: what is left of a run is its beginning.
            here = list(takewhile(self._host.holds, run))
            # Its place on disk is taken now, as a reservation; nobody looks there while host memory has it.
            placed = here[: self._disk.insert_run(here, parent, now_s)] if here else []
            self.skipped_blocks += len(run) - len(placed)
            self._waiting.difference_update(run[len(placed) :])
            if placed:
                self._host.lease(placed)
                self._writing = True
                done_s = self._link.send(now_s, len(placed) * self._block_bytes)
                self._events.at(done_s, self._written, placed)

    def _written(self, now_s: float, run: list[int]) -> None:
        self._host.unlease(run)
        self._waiting.difference_update(run)
        self._writing = False
        self._pump(now_s)

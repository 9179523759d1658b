"""Host memory → disk in simulated time: what is offered, what the admission policy lets pass, what gets written.

As `manager.offload` does it. A block is offered when it enters host memory and whenever it is used; or, where host
memory's policy is `manager.departures.Departures`, only when it is about to leave, with what the disk lacks of the
blocks before it. What was admitted waits in a queue, keeps its place in host memory only while it is being written, and
is skipped when host memory gave it up before its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

from kvbm.block import BlockKey
from kvbm.errors import SettingsError
from kvbm.policy import AdmissionPolicy, EvictionPolicy, WriteBudget, admission_policies, make_admission
from kvbm.policy.admission.write_budget import BLOCKS_PER_DAY_MIN
from kvbm.policy.departures import Departures
from kvbm.sim.serving.events import Events
from kvbm.sim.serving.machine import Link
from kvbm.sim.serving.tier import NOBODY, SimulatedTier

QUEUE_BLOCKS_MAX = 65_536
"""As many blocks wait for the disk as in the manager; more are skipped."""
WRITES = ("through", "eviction")
"""When blocks are offered to disk, by the names that the manager's settings have for it."""
_ADVANCES = 16
"""`Departures` sets a batch of blocks aside at a time; the manager asks it hundreds of times a second."""


@dataclass(frozen=True, slots=True)
class DiskRules:
    """How blocks get onto the disk, as in the manager's settings: which of them, when, and how many bytes a day."""

    admission: str = "filter"
    write: str = WRITES[0]
    budget_bytes_per_day: int | None = None

    def check(self) -> None:
        """`SettingsError` for names that there are not."""
        if self.admission not in (known := admission_policies()):
            raise SettingsError("--admission", self.admission, f"one of {', '.join(known)}")
        if self.write not in WRITES:
            raise SettingsError("--write", self.write, f"one of {', '.join(WRITES)}")

    def host_policy(self, policy: EvictionPolicy, slot_count: int) -> EvictionPolicy:
        """What host memory of so many slots above a disk evicts by."""
        return policy if self.write == WRITES[0] else Departures(policy, slot_count)

    def admission_policy(self, slot_count: int, block_bytes: int) -> AdmissionPolicy:
        """What decides about a disk of so many slots. `SettingsError` where it cannot be made."""
        try:
            admission = make_admission(self.admission, slot_count, 0.0)
        except ValueError as error:
            raise SettingsError("--admission", self.admission, f"one that can be made ({error})") from error
        if self.budget_bytes_per_day is None:
            return admission
        least = BLOCKS_PER_DAY_MIN * block_bytes
        if self.budget_bytes_per_day < least:
            accepted = f"at least {least:,} bytes, {BLOCKS_PER_DAY_MIN} blocks"
            raise SettingsError("--write-budget", self.budget_bytes_per_day, accepted)
        return WriteBudget(admission, self.budget_bytes_per_day, block_bytes)


class Offloads:
    """The queue of blocks on their way down. `link` is the one to the disk, `parents` those of the trace's blocks."""

    def __init__(
        self,
        host: SimulatedTier,
        disk: SimulatedTier,
        admission: AdmissionPolicy,
        link: Link,
        block_bytes: int,
        events: Events,
        parents: Sequence[int],
    ) -> None:
        self._host = host
        self._disk = disk
        self._admission = admission
        self._budget = admission if isinstance(admission, WriteBudget) else None
        self._link = link
        self._block_bytes = block_bytes
        self._events = events
        self._parents = parents
        self._departures = host.policy if isinstance(host.policy, Departures) else None
        if self._departures is not None:
            self._departures.attach(_HostPool(host, parents), self)
        # Runs of consecutive blocks, each with the block before it.
        self._runs: deque[tuple[list[int], int]] = deque()
        self._waiting: set[int] = set()
        self._writing = False
        self.skipped_blocks = 0

    def entered(self, blocks: Sequence[int], start: int, stop: int, now_s: float) -> None:
        """`blocks[start:stop]` of a chain came into host memory from the device."""
        if self._departures is None:
            self._offer(blocks, start, stop, now_s)
        self._advance(now_s)

    def used(self, blocks: Sequence[int], stop: int, now_s: float) -> None:
        """The first blocks of a chain, which are there, were asked for again."""
        if self._departures is None:
            self._offer(blocks, 0, stop, now_s)
        else:
            for block in blocks[:stop]:
                self._admission.hit(_key(block), now_s)
        self._advance(now_s)

    def depart(self, slot: int) -> bool:
        """Host memory is about to give up the block in this slot: `policy.departures.DepartureQueue`."""
        block = self._host.block_in(slot)
        if block in self._waiting:
            return True
        if self._disk.holds(block) or not self._admits(block):
            return False
        run = self._missing_prefix(block)
        before = self._parents[run[0]]
        if len(self._waiting) + len(run) > QUEUE_BLOCKS_MAX:
            self._skip(1)
            return False
        paid = 1  # what a budget has set aside for the block itself pays for the first of them
        while paid < len(run) and (self._budget is None or self._budget.spend(self._events.now_s)):
            paid += 1
        self._runs.append((run[:paid], before))
        self._waiting.update(run[:paid])
        return paid == len(run)

    def _missing_prefix(self, block: int) -> list[int]:
        """What of the chain up to this block the disk lacks, as far as host memory has it; the block is the last."""
        run = [block]
        before = self._parents[block]
        while (
            before >= 0
            and before not in self._waiting
            and not self._disk.holds(before)
            and self._host.holds(before)
        ):
            run.append(before)
            before = self._parents[before]
        return run[::-1]

    def _offer(self, blocks: Sequence[int], start: int, stop: int, now_s: float) -> None:
        run: list[int] = []
        for i in range(start, stop):
            block = blocks[i]
            if self._disk.holds(block):
                self._admission.hit(_key(block), now_s)
            elif block not in self._waiting and self._host.holds(block) and self._admits(block):
                if not run:
                    self._runs.append((run, blocks[i - 1] if i else NOBODY))
                run.append(block)
                self._waiting.add(block)
                continue
            run = []

    def _admits(self, block: int) -> bool:
        if not self._admission.offered(_key(block), self._events.now_s):
            return False
        if len(self._waiting) >= QUEUE_BLOCKS_MAX:
            self._skip(1)
            return False
        return True

    def _skip(self, count: int) -> None:
        """So many blocks were admitted and will not be written."""
        self.skipped_blocks += count
        if self._budget is not None:
            for _ in range(count):
                self._budget.refund()

    def _advance(self, now_s: float) -> None:
        if self._departures is not None:
            for _ in range(_ADVANCES):
                self._departures.advance(now_s)
        self._pump(now_s)

    def _pump(self, now_s: float) -> None:
        while self._runs and not self._writing:
            run, parent = self._runs.popleft()
            # Host memory gives up continuations first: what is left of a run is its beginning.
            here = list(takewhile(self._host.holds, run))
            # Its place on disk is taken now, as a reservation; nobody looks there while host memory has it.
            placed = here[: self._disk.insert_run(here, parent, now_s)] if here else []
            self._skip(len(run) - len(placed))
            self._through(run[len(placed) :])
            if placed:
                self._host.lease(placed)
                self._writing = True
                done_s = self._link.send(now_s, len(placed) * self._block_bytes)
                self._events.at(done_s, self._written, placed)

    def _written(self, now_s: float, run: list[int]) -> None:
        self._host.unlease(run)
        self._through(run)
        self._writing = False
        self._advance(now_s)

    def _through(self, blocks: Sequence[int]) -> None:
        """The turn of these has come and gone, written or not."""
        self._waiting.difference_update(blocks)
        if self._departures is not None:
            for block in blocks:
                if self._host.holds(block):
                    self._departures.write_ended(self._host.slot_of(block))


class _HostPool:
    """A simulated host tier as `Departures` knows the manager's pool: what it asks of `SlotPool`, and no more."""

    def __init__(self, tier: SimulatedTier, parents: Sequence[int]) -> None:
        self._tier = tier
        self._parents = parents

    @property
    def slot_count(self) -> int:
        return self._tier.capacity

    @property
    def leased(self) -> Container[int]:
        return self._tier.leased

    @property
    def free_count(self) -> int:
        return self._tier.capacity - self._tier.resident_count()

    def key_of(self, slot: int) -> int:
        return self._tier.block_in(slot)

    def parent_slot_of(self, slot: int) -> int:
        before = self._parents[self._tier.block_in(slot)]
        return self._tier.slot_of(before) if before >= 0 else -1


def _key(block: int) -> BlockKey:
    # An admission policy asks of a key no more than that it can be told from others.
    return cast(BlockKey, block)

"""G3 → G2: bring leased blocks up, in the order in which they will be needed.

Each block being brought up fills one host slot and pins its disk slot. Leases that want the same block wait for it
together. A block that the disk refuses for now stays queued; one that fails is dropped from both tiers, as a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.clock import Clock
from kvbm.manager.leases import Lease, LeaseState
from kvbm.manager.names import EngineNames
from kvbm.manager.pool import SlotPool
from kvbm.observe.metrics import Metrics
from kvbm.tiers.contract import Completion, SlotTier
from kvbm.tiers.host import HostArena


@dataclass(slots=True)
class _Onboarding:
    """A block that is queued or being read, and the leases that want it, each with the block's index there."""

    key: BlockKey
    host_slot: SlotIndex
    disk_slot: SlotIndex
    waiting: list[tuple[Lease, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Onboarder:
    """The queue of blocks on their way up. Owned by the manager's thread."""

    host_pool: SlotPool[BlockKey]
    disk_pool: SlotPool[BlockKey]
    medium: SlotTier
    arena: HostArena
    names: EngineNames
    metrics: Metrics
    clock: Clock
    on_progress: Callable[[Lease], None]
    job_ids: Iterator[int]
    _by_host_slot: dict[int, _Onboarding] = field(default_factory=dict, init=False)
    _queue: deque[_Onboarding] = field(default_factory=deque, init=False)
    _in_flight: dict[int, _Onboarding] = field(default_factory=dict, init=False)
    # Host slots of failed reads that the medium may still write to.
    _unusable: list[SlotIndex] = field(default_factory=list, init=False)

    @property
    def queued_count(self) -> int:
        return len(self._by_host_slot)

    def bring_up(self, lease: Lease, before: BlockKey | None) -> None:
        """Give a host slot to every block of the lease that is only on disk; the run ends at the first that gets none.

        `before` is the block before the run. Where the run is longer than host memory, its own end makes room for
        the blocks before.
        """
        i = -1
        while (i := lease.states.find(LeaseState.ONBOARDING, i + 1)) >= 0:
            key = lease.keys[i]
            filling = self.host_pool.find_filling(key)
            if filling is not None and filling not in self._by_host_slot:
                slot = None  # an engine is storing the same block right now
            elif filling is not None:
                slot = int(filling)
            else:
                parent = lease.keys[i - 1] if i else before
                slot = self._enqueue(key, parent)
                while slot is None and (last := lease.states.rfind(LeaseState.PINNED, i + 1)) > 0:
                    self._cut(lease, last)
                    slot = self._enqueue(key, parent)
            if slot is None:
                self._cut(lease, i)
                return
            lease.slots[i] = slot
            self._by_host_slot[slot].waiting.append((lease, i))

    def _enqueue(self, key: BlockKey, parent: BlockKey | None) -> int | None:
        """Queue a block that is resident on disk. Returns its host slot, or None when host memory has no room."""
        disk_slot = self.disk_pool.find(key)
        assert disk_slot is not None
        self.disk_pool.lease(disk_slot)
        # Loads from disk go through host memory, whatever its policy says of the block.
        host_slot = self.host_pool.reserve(key, parent, self.clock(), insist=True)
        if host_slot is None:
            self.disk_pool.unlease(disk_slot)
            return None
        block = _Onboarding(key, host_slot, disk_slot)
        self._by_host_slot[host_slot] = block
        self._queue.append(block)
        return host_slot

    def pump(self) -> None:
        """Submit as many blocks as the disk takes."""
        while self._queue:
            block = self._queue[0]
            if not any(lease.states[index] == LeaseState.ONBOARDING for lease, index in block.waiting):
                # Every request that wanted it has gone: do not spend the disk on it.
                self._queue.popleft()
                self._finish(block, Outcome.THROTTLED)
                continue
            job_id = next(self.job_ids)
            targets = self.arena.slot_views(block.host_slot)
            outcome = self.medium.submit_load(job_id, block.key, block.disk_slot, targets)
            if outcome is Outcome.THROTTLED:
                return
            self._queue.popleft()
            if outcome is Outcome.PENDING:
                self._in_flight[job_id] = block
            else:
                self._finish(block, outcome)

    def completed(self, completion: Completion) -> bool:
        """Take a completion; False when it is not of a read."""
        block = self._in_flight.pop(completion.job_id, None)
        if block is None:
            return False
        if completion.outcome is Outcome.HIT:
            bytes_moved = completion.bytes_moved
            self.metrics.add("kvbm_transfer_bytes_total", bytes_moved, source="disk", target="host")
            self.metrics.observe("kvbm_transfer_seconds", completion.seconds, source="disk", target="host")
            self.names.brought(block.host_slot, block.key, completion.engine_hash, completion.group)
        elif completion.corrupt:
            self.metrics.add("kvbm_failures_total", tier="disk", kind="corrupt")
        else:
            self.metrics.add("kvbm_failures_total", tier="disk", kind="io")
        self._finish(block, completion.outcome, completion.still_in_use)
        return True

    def healed(self) -> None:
        """The disk works again: nothing writes any more to the host slots of reads that failed without an end."""
        while self._unusable:
            self.host_pool.abort(self._unusable.pop())

    def _finish(self, block: _Onboarding, outcome: Outcome, in_use: bool = False) -> None:
        """The read of a block has ended, or there will be none. `in_use`: the medium may still write to its slot."""
        del self._by_host_slot[block.host_slot]
        self.disk_pool.unlease(block.disk_slot)
        if outcome is Outcome.HIT:
            self.host_pool.commit(block.host_slot)
        elif in_use:
            self._unusable.append(block.host_slot)  # it stays filling: no block may go there yet
        else:
            self.host_pool.abort(block.host_slot)
        if outcome is Outcome.MISS and not self.disk_pool.is_leased(block.disk_slot):
            self.disk_pool.evict(block.disk_slot)
        for lease, index in block.waiting:
            if lease.states[index] != LeaseState.ONBOARDING:
                continue  # released meanwhile
            if outcome is Outcome.HIT:
                self.host_pool.lease(block.host_slot)
                lease.states[index] = LeaseState.PINNED
                if lease.advance():
                    self.on_progress(lease)
            else:
                self._cut(lease, index)
                lease.advance()
                self.on_progress(lease)

    def _cut(self, lease: Lease, index: int) -> None:
        """The run ends before `index`: give back the lease's slots from there on."""
        for i in range(index, len(lease.slots)):
            if lease.states[i] == LeaseState.PINNED:
                self.host_pool.unlease(lease.slots[i])
            lease.states[i] = LeaseState.DROPPED
        del lease.slots[index:], lease.keys[index:], lease.sources[index:]

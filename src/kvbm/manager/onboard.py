"""G3 → G2: bring leased blocks up, in the order in which they will be needed.

Each block being brought up fills one host slot and pins its disk slot. Leases that want the block wait for it
together. What the tier refuses for now stays queued; what fails is dropped from both tiers and is a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.clock import Clock
from kvbm.manager.leases import Lease, Place
from kvbm.manager.names import EngineNames
from kvbm.manager.pool import SlotPool
from kvbm.observe.metrics import Metrics
from kvbm.tiers.contract import Completion, SlotTier
from kvbm.tiers.host import HostArena


@dataclass(slots=True)
class _Rise:
    key: BlockKey
    host_slot: int
    disk_slot: SlotIndex
    waiting: list[tuple[Lease, int]] = field(default_factory=list)
    job: int = -1


class Onboarder:
    """The queue of blocks on their way up. Owned by the manager's thread."""

    def __init__(
        self,
        host: SlotPool,
        names: EngineNames,
        arena: HostArena,
        disk: SlotPool,
        tier: SlotTier,
        metrics: Metrics,
        clock: Clock,
        on_progress: Callable[[Lease], None],
        next_job: Callable[[], int],
    ) -> None:
        self._host = host
        self._names = names
        self._arena = arena
        self._disk = disk
        self._tier = tier
        self._metrics = metrics
        self._clock = clock
        self._on_progress = on_progress
        self._next_job = next_job
        self._rises: dict[int, _Rise] = {}
        self._queue: deque[_Rise] = deque()
        self._jobs: dict[int, _Rise] = {}
        self._unsettled: list[int] = []

    @property
    def queued_count(self) -> int:
        return len(self._rises)

    def bring_up(self, lease: Lease, before: BlockKey | None) -> None:
        """Give every block of the lease that is only on disk a host slot; the run ends at the first that gets none.

        `before` is the block before the run. Where the run is longer than host memory, its own end makes room for
        what comes before.
        """
        i = -1
        while (i := lease.places.find(Place.WAITING, i + 1)) >= 0:
            key = lease.keys[i]
            filling = self._host.find_filling(key)
            if filling is not None and filling not in self._rises:
                slot = None  # an engine is storing the same block right now
            elif filling is not None:
                slot = int(filling)
            else:
                parent = lease.keys[i - 1] if i else before
                slot = self._start(key, parent)
                while slot is None and (last := lease.places.rfind(Place.PINNED, i + 1)) > 0:
                    self._cut(lease, last)
                    slot = self._start(key, parent)
            if slot is None:
                self._cut(lease, i)
                return
            lease.slots[i] = slot
            self._rises[slot].waiting.append((lease, i))

    def _start(self, key: BlockKey, parent: BlockKey | None) -> int | None:
        """Begin to bring up a block that is resident on disk; its host slot, or None when the host has no room."""
        disk_slot = self._disk.find(key)
        assert disk_slot is not None
        self._disk.lease(disk_slot)
        # What is on disk is loaded through the host tier, whatever its policy thinks of it.
        host_slot = self._host.reserve(key, parent, self._clock(), insist=True)
        if host_slot is None:
            self._disk.unlease(disk_slot)
            return None
        rise = _Rise(key, host_slot, disk_slot)
        self._rises[host_slot] = rise
        self._queue.append(rise)
        return host_slot

    def pump(self) -> None:
        """Submit what the tier takes."""
        while self._queue:
            rise = self._queue[0]
            if not any(lease.places[index] == Place.WAITING for lease, index in rise.waiting):
                # Everybody who wanted it has gone: do not spend the disk on it.
                self._queue.popleft()
                self._finish(rise, Outcome.THROTTLED)
                continue
            job = self._next_job()
            outcome = self._tier.submit_load(
                job, rise.key, rise.disk_slot, self._arena.slot_views(rise.host_slot)
            )
            if outcome is Outcome.THROTTLED:
                return
            self._queue.popleft()
            if outcome is Outcome.PENDING:
                rise.job = job
                self._jobs[job] = rise
            else:
                self._finish(rise, outcome)

    def completed(self, completion: Completion) -> bool:
        """Take a completion if it is ours."""
        rise = self._jobs.pop(completion.job_id, None)
        if rise is None:
            return False
        if completion.outcome is Outcome.HIT:
            self._metrics.add(
                "kvbm_transfer_bytes_total", completion.bytes_moved, source="disk", target="host"
            )
            self._metrics.observe("kvbm_transfer_seconds", completion.seconds, source="disk", target="host")
            self._names.brought(rise.host_slot, rise.key, completion.engine_hash, completion.group)
        elif completion.corrupt:
            self._metrics.add("kvbm_failures_total", tier="disk", kind="corrupt")
        else:
            self._metrics.add("kvbm_failures_total", tier="disk", kind="io")
        self._finish(rise, completion.outcome, completion.unsettled)
        return True

    def settle(self) -> None:
        """The tier works again: nothing touches the host slots any more whose loads had failed without an end."""
        while self._unsettled:
            self._host.abort(self._unsettled.pop())

    def _finish(self, rise: _Rise, outcome: Outcome, unsettled: bool = False) -> None:
        del self._rises[rise.host_slot]
        self._disk.unlease(rise.disk_slot)
        if outcome is Outcome.HIT:
            self._host.commit(rise.host_slot)
        else:
            if unsettled:
                self._unsettled.append(rise.host_slot)  # it stays filling: nobody may have it yet
            else:
                self._host.abort(rise.host_slot)
            if outcome is Outcome.MISS and not self._disk.is_leased(rise.disk_slot):
                self._disk.evict(rise.disk_slot)
        for lease, index in rise.waiting:
            if lease.places[index] != Place.WAITING:
                continue  # released meanwhile
            if outcome is Outcome.HIT:
                self._host.lease(rise.host_slot)
                lease.places[index] = Place.PINNED
                if lease.advance():
                    self._on_progress(lease)
            else:
                self._cut(lease, index)
                lease.advance()
                self._on_progress(lease)

    def _cut(self, lease: Lease, index: int) -> None:
        """The run ends before `index`: give back what the lease holds from there on."""
        for i in range(index, len(lease.slots)):
            if lease.places[i] == Place.PINNED:
                self._host.unlease(lease.slots[i])
            lease.places[i] = Place.DROPPED
        del lease.slots[index:], lease.keys[index:], lease.sources[index:]

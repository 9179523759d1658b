"""G2 → G3: what is in host memory goes further down, when the admission policy agrees.

A block is offered when it is committed and whenever it is used; with `on_eviction` only when host memory is about to
give it up (`departures`). The queue holds keys, not slots: a block that host memory gave up before its turn is skipped
and counted. In *staging* mode (disk without a host tier) the opposite holds: a block stays pinned until disk has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.clock import Clock
from kvbm.manager.names import EngineNames
from kvbm.manager.pool import SlotPool
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy
from kvbm.policy.admission.write_budget import WriteBudget
from kvbm.tiers.contract import Completion, SlotTier
from kvbm.tiers.host import HostArena

QUEUE_BLOCKS_MAX = 65_536


@dataclass(slots=True)
class _Fall:
    key: BlockKey
    host_slot: SlotIndex
    disk_slot: SlotIndex


class Offloader:
    """The queue of blocks on their way down. Owned by the manager's thread."""

    def __init__(
        self,
        host: SlotPool,
        names: EngineNames,
        arena: HostArena,
        disk: SlotPool,
        tier: SlotTier,
        admission: AdmissionPolicy,
        metrics: Metrics,
        clock: Clock,
        next_job: Callable[[], int],
        in_flight_max: int,
        staging: bool,
        on_settled: Callable[[int], None] | None = None,
    ) -> None:
        """`on_settled` hears the host slot of each block whose turn has come and gone, written or not. With it blocks
        are written on eviction."""
        self._host = host
        self._names = names
        self._arena = arena
        self._disk = disk
        self._tier = tier
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._next_job = next_job
        self._in_flight_max = in_flight_max
        self._staging = staging
        self._on_eviction = on_settled is not None
        self._on_settled = on_settled or (lambda slot: None)
        self._budget = admission if isinstance(admission, WriteBudget) else None
        self._queue: deque[tuple[BlockKey, BlockKey | None]] = deque()
        self._queued: set[BlockKey] = set()
        self._jobs: dict[int, _Fall] = {}

    @property
    def queued_count(self) -> int:
        return len(self._queue) + len(self._jobs)

    def committed(self, key: BlockKey, parent: BlockKey | None) -> None:
        """A block came into host memory from the device."""
        if not self._on_eviction:
            self._offer(key, parent)

    def used(self, key: BlockKey, parent: BlockKey | None) -> None:
        """A block that is held somewhere was asked for again."""
        if self._on_eviction:
            self._admission.hit(key, self._clock())
        else:
            self._offer(key, parent)

    def depart(self, slot: int) -> bool:
        """Host memory is about to give up the block in this slot. False: it may, now. True: it is to be written.

        With a block that is admitted go those before it that are not on disk yet, the first of the chain first:
        without them it could never be found there.
        """
        key, parent = self._host.key_of(slot), self._host.parent_of(slot)
        if key in self._queued:
            return True
        if self._disk.holds(key) or not self._admits(key):
            return False
        for missing, before in self._missing_prefix(parent):
            if len(self._queue) + 1 >= QUEUE_BLOCKS_MAX:
                self._skip("queue_full", admitted=True)
                return False
            self._enqueue(missing, before)
            if self._budget is not None and not self._budget.spend(self._clock()):
                self._skip("budget")  # what was set aside for the block itself pays for this one
                return False
        self._enqueue(key, parent)
        return True

    def _missing_prefix(self, key: BlockKey | None) -> list[tuple[BlockKey, BlockKey | None]]:
        """The chain up to this block as far as it has to be written: each block with the one before it."""
        missing: list[tuple[BlockKey, BlockKey | None]] = []
        seen: set[BlockKey] = set()  # a hostile client's chain may be a ring
        while key is not None and key not in seen and key not in self._queued and not self._disk.holds(key):
            slot = self._host.find(key)
            if slot is None:
                break
            seen.add(key)
            before = self._host.parent_of(slot)
            missing.append((key, before))
            key = before
        return missing[::-1]

    def _offer(self, key: BlockKey, parent: BlockKey | None) -> None:
        if self._disk.holds(key):
            self._admission.hit(key, self._clock())
            return
        if key in self._queued or not self._admits(key):
            return
        slot = self._host.find(key)
        if slot is None:
            self._refund()
            return
        if self._staging:
            self._host.lease(slot)
        self._enqueue(key, parent)

    def _admits(self, key: BlockKey) -> bool:
        """Whether the policy lets the block pass and the queue can take it; counted where not."""
        if not self._admission.offered(key, self._clock()):
            self._skip("budget" if self._budget is not None and self._budget.refused_last else "filter")
        elif self._tier.fault:
            self._skip("tier_off", admitted=True)
        elif len(self._queue) >= QUEUE_BLOCKS_MAX:
            self._skip("queue_full", admitted=True)
        else:
            return True
        return False

    def _enqueue(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._queue.append((key, parent))
        self._queued.add(key)

    def pump(self) -> None:
        """Submit what the tier takes."""
        while self._queue and len(self._jobs) < self._in_flight_max:
            key, parent = self._queue[0]
            if not self._submit(key, parent):
                return
            self._queue.popleft()
            self._queued.discard(key)

    def completed(self, completion: Completion) -> bool:
        """Take a completion if it is ours."""
        fall = self._jobs.pop(completion.job_id, None)
        if fall is None:
            return False
        self._host.unlease(fall.host_slot)
        if completion.outcome is Outcome.HIT:
            self._disk.commit(fall.disk_slot)
            bytes_moved = completion.bytes_moved
            self._metrics.add("kvbm_transfer_bytes_total", bytes_moved, source="host", target="disk")
            self._metrics.observe("kvbm_transfer_seconds", completion.seconds, source="host", target="disk")
            self._metrics.add("kvbm_offload_blocks_d2d" if self._staging else "kvbm_offload_blocks_h2d")
        elif completion.outcome is Outcome.RETRY and not self._tier.fault:
            self._disk.abort(fall.disk_slot)
            self._skip("full", admitted=True)  # the medium has no room for it, and goes on with what it has
        else:
            self._disk.abort(fall.disk_slot)
            self._metrics.add("kvbm_failures_total", tier="disk", kind="io")
        self._on_settled(fall.host_slot)
        return True

    def _submit(self, key: BlockKey, parent: BlockKey | None) -> bool:
        """False when the tier is busy and the block must wait; True when it was submitted or skipped."""
        host_slot = self._host.find(key)
        if host_slot is None:
            self._skip("evicted", admitted=True)
            return True
        if self._disk.holds(key) or self._tier.fault:
            self._drop(host_slot, "tier_off" if self._tier.fault else None)
            return True
        disk_slot = self._disk.reserve(key, parent, self._clock())
        if disk_slot is None:
            self._drop(host_slot, "full")
            return True
        job = self._next_job()
        views = self._arena.slot_views(host_slot)
        outcome = self._tier.submit_store(job, key, parent, disk_slot, views, *self._names.of(host_slot, key))
        if outcome is Outcome.PENDING:
            if not self._staging:
                self._host.lease(host_slot)
            self._jobs[job] = _Fall(key, host_slot, disk_slot)
            return True
        self._disk.abort(disk_slot)
        if outcome is Outcome.THROTTLED:
            return False
        self._drop(host_slot, "tier_off")
        return True

    def _drop(self, host_slot: SlotIndex, reason: str | None) -> None:
        """A block whose turn has come is not written, because it is there already or for this reason."""
        if self._staging:
            self._host.unlease(host_slot)
        if reason:
            self._skip(reason, admitted=True)
        else:
            self._refund()
        self._on_settled(host_slot)

    def _skip(self, reason: str, admitted: bool = False) -> None:
        self._metrics.add("kvbm_skipped_offloads_total", reason=reason)
        if admitted:
            self._refund()

    def _refund(self) -> None:
        if self._budget is not None:
            self._budget.refund()

"""G2 → G3: blocks of host memory go to disk when the admission policy lets them.

A block is offered when it is committed and whenever it is used; with `on_write_ended` only when host memory is about to
evict it (`policy.departures`). The queue holds keys, not slots: a block that host memory evicted before its turn is
skipped and counted. In *staging* mode (disk without a host tier) a block stays leased until disk has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Generic, NamedTuple, Protocol

from kvbm.block import Outcome, SlotIndex
from kvbm.clock import Clock
from kvbm.manager.pool import KeyT, KeyT_contra, SlotPool
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy
from kvbm.policy.admission.write_budget import WriteBudget
from kvbm.policy.contract import hit_all, offer_all
from kvbm.tiers.contract import Completion

QUEUE_BLOCKS_MAX = 65_536


class BlockWriter(Protocol[KeyT_contra]):
    """Writes blocks of host memory to disk, as `disk_side.DiskSide` does."""

    @property
    def fault(self) -> str:
        """Empty while the disk works."""

    def write(
        self, job_id: int, key: KeyT_contra, parent: KeyT_contra | None, source: SlotIndex, target: SlotIndex
    ) -> Outcome:
        """Start writing the block in host slot `source` to disk slot `target`.

        PENDING: a `Completion` with this job id follows. THROTTLED: the disk is busy, ask again. RETRY: it is off.
        """


class _Offloading(NamedTuple):
    """A block that is being written."""

    host_slot: SlotIndex
    disk_slot: SlotIndex


@dataclass(slots=True, eq=False)
class Offloader(Generic[KeyT]):
    """The queue of blocks on their way down. Owned by the manager's thread.

    With `on_write_ended` blocks are written on eviction. It is called with the host slot of each block that leaves the
    queue, written or not.
    """

    host_pool: SlotPool[KeyT]
    disk_pool: SlotPool[KeyT]
    writer: BlockWriter[KeyT]
    admission: AdmissionPolicy
    metrics: Metrics
    clock: Clock
    job_ids: Iterator[int]
    in_flight_max: int
    staging: bool = False
    on_write_ended: Callable[[int], None] | None = None
    # Each block and the one before it, in the order in which they are written.
    queue: OrderedDict[KeyT, KeyT | None] = field(default_factory=OrderedDict, init=False)
    in_flight: dict[int, _Offloading] = field(default_factory=dict, init=False)

    @property
    def _budget(self) -> WriteBudget | None:
        return self.admission if isinstance(self.admission, WriteBudget) else None

    @property
    def queued_count(self) -> int:
        return len(self.queue) + len(self.in_flight)

    def committed(self, keys: Sequence[KeyT], parents: Sequence[KeyT | None]) -> None:
        """These blocks, behind those of `parents`, came into host memory from the device."""
        if self.on_write_ended is None:
            self._offer(keys, parents)

    def used(self, keys: Sequence[KeyT], parent: KeyT | None) -> None:
        """Consecutive blocks of a chain, which are held somewhere, were asked for again; `parent` is before them."""
        if self.on_write_ended is not None:
            hit_all(self.admission, keys, self.clock())
        elif keys:
            self._offer(keys, (parent, *keys[:-1]))

    def depart(self, slot: int) -> bool:
        """The block in this slot is a victim of host memory. False: it may go now. True: it is to be written.

        An admitted block is queued behind those before it that are not on disk yet: without them it could never be
        found there.
        """
        key, parent = self.host_pool.key_of(slot), self.host_pool.parent_of(slot)
        if key in self.queue:
            return True
        if self.disk_pool.holds(key) or not self._admits(key):
            return False
        for missing, before in self._missing_prefix(parent):
            if len(self.queue) + 1 >= QUEUE_BLOCKS_MAX:
                self._skip("queue_full", admitted=True)
                return False
            self.queue[missing] = before
            if self._budget is not None and not self._budget.spend(self.clock()):
                self._skip("budget")  # the part of the budget taken for the block itself pays for this one
                return False
        self.queue[key] = parent
        return True

    def _missing_prefix(self, key: KeyT | None) -> list[tuple[KeyT, KeyT | None]]:
        """The blocks up to this one that have to be written, first of the chain first: each with the one before it."""
        missing: list[tuple[KeyT, KeyT | None]] = []
        seen: set[KeyT] = set()  # a hostile client's chain may be a ring
        while key is not None and key not in seen and key not in self.queue and not self.disk_pool.holds(key):
            slot = self.host_pool.find(key)
            if slot is None:
                break
            seen.add(key)
            before = self.host_pool.parent_of(slot)
            missing.append((key, before))
            key = before
        return missing[::-1]

    def _offer(self, keys: Sequence[KeyT], parents: Sequence[KeyT | None]) -> None:
        """Offer blocks to the policy, or count a use of those that disk has already; queue what is admitted."""
        now_s, below = self.clock(), self.disk_pool.held(keys)
        if any(below):
            hit_all(self.admission, list(compress(keys, below)), now_s)
            if all(below):
                return
        new = [
            (key, parent)
            for key, parent, held in zip(keys, parents, below, strict=True)
            if not held and key not in self.queue
        ]
        if self._budget is not None:
            for key, parent in new:
                if self._admits(key):
                    self._queue_up(key, parent)
            return
        answers = offer_all(self.admission, [key for key, _ in new], now_s)
        if refused := len(new) - sum(answers):
            self.metrics.add("kvbm_skipped_offloads_total", refused, reason="filter")
        for key, parent in compress(new, answers):
            if self._takes():
                self._queue_up(key, parent)

    def _queue_up(self, key: KeyT, parent: KeyT | None) -> None:
        """Queue an admitted block, if it is in host memory and not queued."""
        slot = self.host_pool.find(key)
        if slot is None or key in self.queue:
            self._refund()
            return
        if self.staging:
            self.host_pool.lease(slot)
        self.queue[key] = parent

    def _admits(self, key: KeyT) -> bool:
        """Whether the policy admits the block and the queue can take it; a refusal is counted."""
        if not self.admission.offered(key, self.clock()):
            self._skip("budget" if self._budget is not None and self._budget.refused_last else "filter")
            return False
        return self._takes()

    def _takes(self) -> bool:
        """Whether the queue can take one more admitted block; a refusal is counted."""
        if self.writer.fault:
            self._skip("tier_off", admitted=True)
        elif len(self.queue) >= QUEUE_BLOCKS_MAX:
            self._skip("queue_full", admitted=True)
        else:
            return True
        return False

    def pump(self) -> None:
        """Submit as many blocks as the disk takes."""
        while self.queue and len(self.in_flight) < self.in_flight_max:
            key = next(iter(self.queue))
            if not self._submit(key, self.queue[key]):
                return
            del self.queue[key]

    def completed(self, completion: Completion) -> bool:
        """Take a completion; False when it is not of a write."""
        block = self.in_flight.pop(completion.job_id, None)
        if block is None:
            return False
        self.host_pool.unlease(block.host_slot)
        if completion.outcome is Outcome.HIT:
            self.disk_pool.commit(block.disk_slot)
            bytes_moved = completion.bytes_moved
            self.metrics.add("kvbm_transfer_bytes_total", bytes_moved, source="host", target="disk")
            self.metrics.observe("kvbm_transfer_seconds", completion.seconds, source="host", target="disk")
            self.metrics.add("kvbm_offload_blocks_d2d" if self.staging else "kvbm_offload_blocks_h2d")
        elif completion.outcome is Outcome.RETRY and not self.writer.fault:
            self.disk_pool.abort(block.disk_slot)
            self._skip("full", admitted=True)  # the medium has no room for it, and goes on with what it has
        else:
            self.disk_pool.abort(block.disk_slot)
            self.metrics.add("kvbm_failures_total", tier="disk", kind="io")
        self._note_end(block.host_slot)
        return True

    def _submit(self, key: KeyT, parent: KeyT | None) -> bool:
        """False when the disk is busy and the block must wait; True when it was submitted or skipped."""
        host_slot = self.host_pool.find(key)
        if host_slot is None:
            self._skip("evicted", admitted=True)
            return True
        if self.disk_pool.holds(key) or self.writer.fault:
            self._drop(host_slot, "tier_off" if self.writer.fault else None)
            return True
        disk_slot = self.disk_pool.reserve(key, parent, self.clock())
        if disk_slot is None:
            self._drop(host_slot, "full")
            return True
        job_id = next(self.job_ids)
        outcome = self.writer.write(job_id, key, parent, host_slot, disk_slot)
        if outcome is Outcome.PENDING:
            if not self.staging:
                self.host_pool.lease(host_slot)
            self.in_flight[job_id] = _Offloading(host_slot, disk_slot)
            return True
        self.disk_pool.abort(disk_slot)
        if outcome is Outcome.THROTTLED:
            return False
        self._drop(host_slot, "tier_off")
        return True

    def _drop(self, host_slot: SlotIndex, reason: str | None) -> None:
        """A block leaves the queue unwritten: for this reason, or because it is on disk already."""
        if self.staging:
            self.host_pool.unlease(host_slot)
        if reason:
            self._skip(reason, admitted=True)
        else:
            self._refund()
        self._note_end(host_slot)

    def _note_end(self, host_slot: SlotIndex) -> None:
        if self.on_write_ended is not None:
            self.on_write_ended(host_slot)

    def _skip(self, reason: str, admitted: bool = False) -> None:
        self.metrics.add("kvbm_skipped_offloads_total", reason=reason)
        if admitted:
            self._refund()

    def _refund(self) -> None:
        if self._budget is not None:
            self._budget.refund()

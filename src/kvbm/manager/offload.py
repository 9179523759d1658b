"""G2 → G3: blocks of host memory go to disk when the admission policy lets them.

A block is offered when it is committed and whenever it is used. The queue holds keys, not slots: a block that host
memory evicted before its turn is skipped and counted. In *staging* mode (disk without a host tier) a block stays leased
until disk has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Generic, NamedTuple, Protocol

from kvbm.block import Outcome, SlotIndex, alike
from kvbm.clock import Clock
from kvbm.manager.block_index import KeyT_contra
from kvbm.manager.key_table import KeyT
from kvbm.manager.pool import SlotPool
from kvbm.manager.queue_age import QueueAge
from kvbm.observe import moves_log
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy
from kvbm.policy.admission.write_budget import WriteBudget
from kvbm.policy.contract import hit_all, offer_all
from kvbm.tiers.contract import Completion

QUEUE_BLOCKS_MAX = 65_536
GONE_MAX = 512
"""Blocks that leave the queue unwritten in one go."""


class BlockWriter(Protocol[KeyT_contra]):
    """Writes blocks of host memory to disk, as `disk_side.DiskSide` does."""

    @property
    def fault(self) -> str:
        """Empty unless the disk is off."""

    @property
    def trouble(self) -> str:
        """Empty while the disk takes blocks: it is neither off nor slow."""

    @property
    def run_blocks_max(self) -> int:
        """The longest run that it takes, in blocks."""

    @property
    def room(self) -> int:
        """So many runs can be written now before one is THROTTLED; an upper bound."""

    def write_run(
        self,
        job_id: int,
        keys: Sequence[KeyT_contra],
        parent: KeyT_contra | None,
        source: SlotIndex,
        target: SlotIndex,
    ) -> Outcome:
        """Start writing a chain of blocks, the first one's parent being `parent`, from the host slots from `source` on
        to the disk slots from `target` on.

        PENDING: a `Completion` with this job id follows. THROTTLED: the disk is busy, ask again. RETRY: it is off.
        """


class _Offloading(NamedTuple):
    """A run that is being written, in slots from these on; its first block was queued by then."""

    host_slot: SlotIndex
    disk_slot: SlotIndex
    length: int
    since_s: float

    @property
    def host_slots(self) -> range:
        return range(self.host_slot, self.host_slot + self.length)

    @property
    def disk_slots(self) -> range:
        return range(self.disk_slot, self.disk_slot + self.length)


@dataclass(slots=True, eq=False)
class Offloader(Generic[KeyT]):
    """The queue of blocks on their way down. Owned by the manager's thread.

    `on_refused` is called with blocks that are not written, and why; not for what the policy refuses while the block
    stays in host memory, which is most of what is offered.
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
    on_refused: Callable[[Sequence[KeyT], str], None] | None = None
    full: moves_log.FullPool | None = None
    # Each block and the one before it, in the order in which they are written.
    queue: OrderedDict[KeyT, KeyT | None] = field(default_factory=OrderedDict, init=False)
    in_flight: dict[int, _Offloading] = field(default_factory=dict, init=False)
    _in_flight_blocks: int = field(default=0, init=False)
    # Blocks that have left the queue, always from its front.
    _left: int = field(default=0, init=False)
    _age: QueueAge = field(default_factory=QueueAge, init=False)

    @property
    def _budget(self) -> WriteBudget | None:
        return self.admission if isinstance(self.admission, WriteBudget) else None

    @property
    def queued_count(self) -> int:
        return len(self.queue) + self._in_flight_blocks

    def oldest_s(self) -> float:
        """How long the oldest block has waited for its turn and for the disk, in seconds; 0 without any."""
        now_s = self.clock()
        waiting_s = self._age.look(self._left, len(self.queue), now_s)
        run = next(iter(self.in_flight.values()), None)
        return waiting_s if run is None else max(waiting_s, now_s - run.since_s)

    def committed(self, keys: Sequence[KeyT], parents: Sequence[KeyT | None]) -> None:
        """These blocks, behind those of `parents`, came into host memory from the device."""
        self._offer(keys, parents, stored=True)

    def used(self, keys: Sequence[KeyT], parent: KeyT | None) -> None:
        """Consecutive blocks of a chain, which are held somewhere, were asked for again; `parent` is before them."""
        if keys:
            self._offer(keys, (parent, *keys[:-1]))

    def _offer(self, keys: Sequence[KeyT], parents: Sequence[KeyT | None], stored: bool = False) -> None:
        """Offer blocks to the policy, or count a use of those that disk has already; queue what is admitted.

        `stored`: they came into host memory, and one that is not there has been evicted since.
        """
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
                    self._queue_up(key, parent, stored)
            return
        answers = offer_all(self.admission, [key for key, _ in new], now_s)
        if refused := len(new) - sum(answers):
            self.metrics.add("kvbm_skipped_offloads_total", refused, reason="filter")
        for key, parent in compress(new, answers):
            if self._takes(key):
                self._queue_up(key, parent, stored)

    def _queue_up(self, key: KeyT, parent: KeyT | None, stored: bool) -> None:
        """Queue an admitted block, if it is in host memory and not queued."""
        slot = self.host_pool.find(key)
        if slot is None and stored:
            self._skip("evicted", admitted=True, key=key)
            return
        if slot is None or key in self.queue:
            self._refund()
            return
        if self.staging:
            self.host_pool.lease(slot)
        self.queue[key] = parent

    def _admits(self, key: KeyT) -> bool:
        """Whether the policy admits the block and the queue can take it; a refusal is counted."""
        if not self.admission.offered(key, self.clock()):
            reason = "budget" if self._budget is not None and self._budget.refused_last else "filter"
            self._skip(reason, key=key)
            return False
        return self._takes(key)

    def _takes(self, key: KeyT) -> bool:
        """Whether the queue can take one more admitted block; a refusal is counted."""
        if self.writer.trouble:
            self._skip("tier_off", admitted=True, key=key)
        elif len(self.queue) >= QUEUE_BLOCKS_MAX:
            self._skip("queue_full", admitted=True, key=key)
        else:
            return True
        return False

    def pump(self) -> bool:
        """Submit as many runs as the disk takes. True when it stopped before that, as it met blocks that cannot be
        written, or too many that are not to be any more: call it again."""
        while self.queue and (self.writer.room or self.writer.fault):
            room = min(self.writer.run_blocks_max, self.in_flight_max - self._in_flight_blocks)
            if room <= 0:
                return False
            keys, host_slots = self._next_run(room)
            if not keys:
                return bool(self.queue)
            tail = self.host_pool.is_tail(host_slots[0])
            whose = self.host_pool.favouring.tenant_of(host_slots[0])
            before = self.queue[keys[0]]
            disk_slots = self.disk_pool.reserve_chain(keys, before, self.clock(), tail=tail, tenant=whose)
            if not disk_slots:
                self._refuse(keys, host_slots)
                return bool(self.queue)
            if not self._submit(keys, host_slots, disk_slots):
                return False
        return False

    def _next_run(self, length_max: int) -> tuple[list[KeyT], list[SlotIndex]]:
        """The first blocks of the queue that are a chain and lie in consecutive host slots; they stay in it.

        Blocks before them that are not to be written any more leave it, so many at a time.
        """
        keys, slots, gone = list[KeyT](), list[SlotIndex](), list[KeyT]()
        for key, parent in self.queue.items():
            slot = self.host_pool.find(key)
            if slot is None or self.disk_pool.holds(key) or self.writer.fault:
                if keys:
                    break
                if len(gone) == GONE_MAX:
                    break
                gone.append(key)
                if slot is None:
                    self._skip("evicted", admitted=True, key=key)
                else:
                    self._drop(slot, "tier_off" if self.writer.fault else None, key)
                continue
            if keys and (parent != keys[-1] or slot != slots[-1] + 1):
                break
            keys.append(key)
            slots.append(slot)
            if len(keys) == length_max:
                break
        same = alike(self.host_pool.tails, slots)
        keys, slots = keys[:same], slots[:same]
        for key in gone:
            del self.queue[key]
        self._left += len(gone)
        return keys, slots

    def _refuse(self, keys: list[KeyT], host_slots: list[SlotIndex]) -> None:
        """No slot on disk is to be had for a chain, not even for its first block; the others are no use without it."""
        if self.full is not None:
            self.full.skipped(len(keys), self.disk_pool.all_in_use)
        for key, slot in zip(keys, host_slots, strict=True):
            del self.queue[key]
            self._drop(slot, "full", key)
        self._left += len(keys)

    def _submit(self, keys: list[KeyT], host_slots: list[SlotIndex], disk_slots: Sequence[SlotIndex]) -> bool:
        """Write a chain as far as it has slots on disk. False when the disk is busy and blocks must wait; those that
        were submitted or skipped leave the queue."""
        first = 0
        while first < len(disk_slots):
            end = first + 1
            while end < len(disk_slots) and disk_slots[end] == disk_slots[end - 1] + 1:
                end += 1
            run = _Offloading(
                host_slots[first], disk_slots[first], end - first, self._age.since_s(self._left, self.clock())
            )
            outcome = self._write(run, keys[first:end])
            if outcome is Outcome.THROTTLED:
                self.disk_pool.abort_all(disk_slots[first:][::-1])
                return False
            for key in keys[first:end]:
                del self.queue[key]
            self._left += run.length
            if outcome is not Outcome.PENDING:
                self.disk_pool.abort_all(disk_slots[first:end][::-1])
                for key, slot in zip(keys[first:end], host_slots[first:end], strict=True):
                    self._drop(slot, "tier_off", key)
            first = end
        return True

    def _write(self, run: _Offloading, keys: list[KeyT]) -> Outcome:
        job_id = next(self.job_ids)
        parent = self.queue[keys[0]]
        outcome = self.writer.write_run(job_id, keys, parent, run.host_slot, run.disk_slot)
        if outcome is Outcome.PENDING:
            if not self.staging:
                self.host_pool.lease_all(run.host_slots)
            self.in_flight[job_id] = run
            self._in_flight_blocks += run.length
            moves_log.offloading(keys, "host", "disk")
        return outcome

    def completed(self, completion: Completion) -> bool:
        """Take a completion; False when it is not of a write."""
        run = self.in_flight.pop(completion.job_id, None)
        if run is None:
            return False
        self._in_flight_blocks -= run.length
        self.host_pool.unlease_all(run.host_slots)
        hits, failed = list[int](), list[int]()
        for disk_slot, end in zip(run.disk_slots, completion.blocks, strict=True):
            (hits if end.outcome is Outcome.HIT else failed).append(disk_slot)
        self.disk_pool.commit_all(hits)
        moves_log.added(len(hits), "disk")
        lost = [self.disk_pool.key_of(slot) for slot in failed]
        self.disk_pool.abort_all(failed[::-1])
        if hits:
            bytes_moved = completion.bytes_moved
            self.metrics.add("kvbm_transfer_bytes_total", bytes_moved, source="host", target="disk")
            self.metrics.observe("kvbm_transfer_seconds", completion.seconds, source="host", target="disk")
            self.metrics.observe("kvbm_transfer_size_bytes", bytes_moved, source="host", target="disk")
            name = "kvbm_offload_blocks_d2d" if self.staging else "kvbm_offload_blocks_h2d"
            self.metrics.add(name, len(hits))
        for disk_slot, key in zip(failed, lost, strict=True):
            if (
                completion.blocks[disk_slot - run.disk_slot].outcome is Outcome.RETRY
                and not self.writer.fault
            ):
                # The medium has no room for it, and goes on with what it has.
                self._skip("full", admitted=True, key=key)
            else:
                self.metrics.add("kvbm_failures_total", tier="disk", kind="io")
                if self.on_refused is not None:
                    self.on_refused((key,), "io")
        return True

    def _drop(self, host_slot: SlotIndex, reason: str | None, key: KeyT) -> None:
        """A block leaves the queue unwritten: for this reason, or because it is on disk already."""
        if self.staging:
            self.host_pool.unlease(host_slot)
        if reason:
            self._skip(reason, admitted=True, key=key)
        else:
            self._refund()

    def _skip(self, reason: str, admitted: bool = False, key: KeyT | None = None) -> None:
        self.metrics.add("kvbm_skipped_offloads_total", reason=reason)
        if key is not None and self.on_refused is not None:
            self.on_refused((key,), reason)
        if admitted:
            self._refund()

    def _refund(self) -> None:
        if self._budget is not None:
            self._budget.refund()

"""The disk of a space: its medium, the index of it, and the queues of blocks to it and from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from kvbm.block import BlockKey, Outcome, SlotIndex, Tier
from kvbm.clock import Clock
from kvbm.manager.departed import CORRUPT, Departed
from kvbm.manager.disk_health import DiskHealth
from kvbm.manager.held_keys import HeldKeys
from kvbm.manager.leases import Lease
from kvbm.manager.names import EngineNames
from kvbm.manager.offload import Offloader
from kvbm.manager.onboard import Onboarder, Rising
from kvbm.manager.pool import ABORTED, TIER_OFF, SlotPool
from kvbm.manager.slot_facts import SlotFacts
from kvbm.manager.sources import DiskSource
from kvbm.observe.metrics import Metrics
from kvbm.observe.moves_log import FullPool
from kvbm.policy import AdmissionPolicy, make_policy
from kvbm.slices import SLICE_BLOCKS, Backlog, batches
from kvbm.tiers.contract import BlockHead, Completion, RecoveredBlock, RunTier
from kvbm.tiers.host import HostArena

LEFT_AT_ONCE = 2048
"""Slots of which listeners are told in one slice."""
SLICES_AT_ONCE = 3
"""Of an index, and of what is taken over, when the medium has just been opened."""


@dataclass(slots=True, kw_only=True, eq=False)
class DiskSide:
    """The part of a space that exists only with a disk. Owned by the manager's thread.

    `pool`, `onboarder` and `offloader` are new ones once a medium that was off works again.
    """

    medium: RunTier
    host_pool: SlotPool[BlockKey]
    arena: HostArena
    names: EngineNames
    host_facts: SlotFacts
    rising: dict[int, Rising]
    admission: AdmissionPolicy
    eviction: str
    staging: bool
    in_flight_max: int
    brought_at_once: int
    metrics: Metrics
    clock: Clock
    on_progress: Callable[[Lease], None]
    departed: Departed
    tail_groups: frozenset[int] = frozenset()
    keeps_facts: bool = False
    salt_share: float = 0.0
    backlog: Backlog = field(default_factory=Backlog)
    slice_blocks: int = SLICE_BLOCKS
    pool: SlotPool[BlockKey] = field(init=False)
    facts: SlotFacts = field(init=False)
    held: HeldKeys = field(init=False)
    onboarder: Onboarder = field(init=False)
    offloader: Offloader[BlockKey] = field(init=False)
    _job_ids: Iterator[int] = field(default_factory=lambda: count(1), init=False)
    _health: DiskHealth = field(init=False)
    # Slots whose block was evicted and whose record is still there.
    _to_void: list[int] = field(default_factory=list, init=False)
    # While the medium is off: listeners are told that its blocks have gone, and have been told so.
    _is_leaving: bool = field(default=False, init=False)
    _has_left: bool = field(default=False, init=False)
    # Facts of blocks, as the medium has read them; its thread adds to them.
    _facts_read: deque[tuple[list[tuple[SlotIndex, BlockKey]], list[bytes]]] = field(
        default_factory=deque, init=False
    )
    # Polled and not yet looked at.
    _ended: deque[Completion] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        slots, tokens = self.medium.slot_count, self.arena.layout.block_tokens
        self.facts = SlotFacts(Tier.DISK, slots, tokens, self._read_facts)
        self.held = HeldKeys(Tier.DISK, slots)
        self._health = DiskHealth(self.medium, self.metrics, self.clock)
        self._index()

    @property
    def fault(self) -> str:
        """Empty while the medium works; otherwise one line saying why it is off."""
        return self.medium.fault

    @property
    def trouble(self) -> str:
        """Empty while the medium works; otherwise one line saying why it is off, or that it is slow."""
        return self.fault or self._health.slow

    @property
    def wait_s_max(self) -> float:
        """How long the next turn may wait: until the medium becomes slow."""
        return self._health.slow_in_s

    @property
    def pool_if_on(self) -> SlotPool[BlockKey] | None:
        """The slots of the medium while it works; None while it is off or slow."""
        return None if self.trouble else self.pool

    @property
    def queued_count(self) -> int:
        """Blocks on their way between host memory and disk."""
        return self.onboarder.queued_count + self.offloader.queued_count

    @property
    def run_blocks_max(self) -> int:
        """As `offload.BlockWriter`."""
        return self.medium.run_blocks_max

    @property
    def room(self) -> int:
        """As `offload.BlockWriter`."""
        return 0 if self._health.slow else self.medium.store_room

    def write_run(
        self, job_id: int, keys: Sequence[BlockKey], parent: BlockKey | None, source: int, target: int
    ) -> Outcome:
        """As `offload.BlockWriter`."""
        self.void_emptied()  # before the slots hold other blocks
        blocks, before = list[BlockHead](), parent
        for slot, key in enumerate(keys, source):
            fact = self.host_facts.of(slot)
            blocks.append(BlockHead(key, before, *self.names.of(slot, key), fact.text() if fact else b""))
            if fact is not None:
                self.facts.note(target + slot - source, fact)
            before = key
        views = self.arena.slot_views(source, len(keys))
        return self.medium.submit_store(job_id, blocks, SlotIndex(target), views)

    def collect(self, until_s: float = inf) -> bool:
        """Take the completions; until that time, but one in any case. Whether there are some left."""
        self.void_emptied()
        self._take_facts()
        self._ended += self.medium.poll()
        while self._ended:
            completion = self._ended.popleft()
            if not self.onboarder.completed(completion):
                self.offloader.completed(completion)
            if self.clock() >= until_s:
                break
        return bool(self._ended)

    def advance(self) -> bool:
        """Submit queued blocks; try a medium that is off again when that is due. Whether it is to be called again."""
        if self._health.becomes_slow():
            self.onboarder.give_up()
        again = self.onboarder.pump()
        again = self.offloader.pump() or again
        self.void_emptied()
        # Blocks that were cleared meanwhile are voided before the medium is read again.
        ready = not self.queued_count and not self.pool.cleared_count
        if self.fault and ready and not self._is_leaving:
            self._is_leaving = True
            self._begin(self._leaving())
        if self.fault and ready and self._has_left and self._health.comes_back():
            self.onboarder.healed()
            self._index_anew()
        return again

    def write_more(self) -> bool:
        """As the space ends: take completions and submit what the medium takes. Whether there is more to wait for."""
        before, idle = self.offloader.queued_count, self.medium.drain(0.0)
        if not before or self.fault:
            return False
        self.collect()
        self.advance()
        left = self.offloader.queued_count
        return left > 0 and not (idle and left >= before)

    def _leaving(self) -> Iterator[None]:
        """Tell listeners that the blocks of a medium that is off have gone: where it works again, others lie there."""
        self.held.pool = None
        for start in range(0, self.medium.slot_count, LEFT_AT_ONCE):
            slots = range(start, min(start + LEFT_AT_ONCE, self.medium.slot_count))
            self.facts.emptied(slots)
            self.held.emptied(slots)
            yield
        self._has_left = True

    def _index_anew(self) -> None:
        """Index what a medium that works again has brought back; what it has not is evicted."""
        before = self.pool
        self._index(before)
        self.pool.evicted += before.evicted
        self._begin(self.pool.favouring.taking_over(before.favouring, self.clock(), self.slice_blocks))

    def _index(self, before: SlotPool[BlockKey] | None = None) -> None:
        """Index the blocks that the medium holds, in slices, and start with empty queues. `before` is an earlier index
        of the medium."""
        policy = make_policy(self.eviction, self.medium.slot_count)
        slots = self.medium.slot_count
        self.pool = SlotPool(Tier.DISK, slots, policy, self._emptied, salt_share=self.salt_share)
        self._is_leaving = self._has_left = False
        self.held.indexed_anew(self.pool)
        self.pool.on_committed = self._committed
        self._make_queues()
        self._begin(self._indexing(self.pool, self.medium.recovered(), before))

    def _begin(self, work: Iterator[None]) -> None:
        """That of a small tier is done at once."""
        if not any(next(work, self) is self for _ in range(SLICES_AT_ONCE)):
            self.backlog.add(work)

    def _indexing(
        self, pool: SlotPool[BlockKey], blocks: Iterable[RecoveredBlock], before: SlotPool[BlockKey] | None
    ) -> Iterator[None]:
        from kvbm.manager.recovery import Recovery  # needs numpy
        from kvbm.tiers.recovered import RecoveredBlocks

        found = RecoveredBlocks.of(blocks)
        recovery = Recovery(pool, found, self.clock(), self.tail_groups, self.slice_blocks)
        for part in recovery.index():
            if self.keeps_facts:
                first = found.groups[part] == 0
                self.facts.found(found.slots[part][first], found.engine_names(part)[first])
            yield
            if pool is not self.pool:
                return  # the medium was opened once more
        if before is not None:
            for some in batches((key for _, key in before.resident()), self.slice_blocks):
                pool.evicted[TIER_OFF] += pool.held(some).count(0)
                yield
        for _ in recovery.rank():
            yield
            if pool is not self.pool:
                return

    def _make_queues(self) -> None:
        self.onboarder = Onboarder(
            self.host_pool,
            DiskSource(self.pool, self.medium, self.arena, self._corrupt),
            self.rising,
            self.names,
            self.host_facts,
            self.metrics,
            self.clock,
            self.on_progress,
            self._job_ids,
            self.brought_at_once,
        )
        self.offloader = Offloader(
            self.host_pool,
            self.pool,
            self,
            self.admission,
            self.metrics,
            self.clock,
            self._job_ids,
            self.in_flight_max,
            self.staging,
            self.departed.not_written,
            FullPool("disk", self.clock),
        )

    def _corrupt(self, keys: Sequence[BlockKey]) -> None:
        self.departed.note(Tier.DISK, keys, CORRUPT)

    def _read_facts(self, slots: Sequence[int]) -> bool:
        read = getattr(self.medium, "read_facts", None)  # a tier need not keep them
        if read is None:
            return False
        blocks = [(SlotIndex(slot), self.pool.key_of(slot)) for slot in slots]
        began: bool = read(blocks, lambda texts: self._facts_read.append((blocks, texts)))
        return began

    def _take_facts(self) -> None:
        """Facts that were read; a slot may hold another block by now."""
        while self._facts_read:
            blocks, texts = self._facts_read.popleft()
            found = zip(blocks, texts, strict=True)
            self.facts.texts_read({slot: text for (slot, key), text in found if self.pool.find(key) == slot})

    def _committed(self, slots: Sequence[int]) -> None:
        self.facts.committed(slots)
        self.held.committed(slots)

    def _emptied(self, slots: Sequence[int], keys: Sequence[BlockKey], reason: str) -> None:
        """The record may wait for its neighbours to go too: what it says stays true until the slot is written again."""
        if reason != ABORTED:
            self._to_void.extend(slots)
        self.facts.emptied(slots)
        self.held.emptied(slots)
        self.departed.emptied(Tier.DISK, keys, reason)

    def sync(self) -> int:
        """Have the medium make durable what was evicted by now; as `RunTier.sync`."""
        self.void_emptied()
        return self.medium.sync()

    def void_emptied(self) -> None:
        """Have the medium forget what was evicted, each stretch of slots in one write."""
        if not self._to_void:
            return
        slots, self._to_void = sorted(self._to_void), []
        first = end = slots[0]
        for slot in slots:
            if slot != end:
                self.medium.forget(SlotIndex(first), end - first)
                first = slot
            end = slot + 1
        self.medium.forget(SlotIndex(first), end - first)

"""G2 → G4: blocks of host memory go to a shared store in packs, some time after they came.

Requests to a store cost time and money, blocks do not: consecutive blocks of a chain are gathered until a pack is full,
or has waited for `RemoteRules.linger_s`. In host memory that is full, and so evicts, no more than a share of its blocks
wait: the oldest pack is closed early, as long as the hour's requests allow it. What waits is keys, not slots: a block
that host memory evicts before its turn is skipped and counted, and with it those behind it, which could not be found
without it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.clock import Clock
from kvbm.manager.names import EngineNames
from kvbm.manager.pool import SlotPool
from kvbm.manager.slot_facts import SlotFacts
from kvbm.observe import moves_log
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy
from kvbm.policy.admission.store_budget import StoreBudget
from kvbm.policy.contract import offer_all
from kvbm.tiers.contract import BlockHead, Completion
from kvbm.tiers.host import HostArena
from kvbm.tiers.remote.contract import NOWHERE, RemoteTier
from kvbm.tiers.remote.pack_size import OPEN_SHARE

WAITING_BLOCKS_MAX = 65_536
LINGER_S = 10.0
IN_FLIGHT_SHARE = 4
"""One part in this many of host memory may be held by writes to a store."""
SUBMITTED_AT_ONCE = 4


class RemoteRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a space does with a remote tier. `writes`: blocks are written to it; `bytes_per_hour` and
    `requests_per_hour` bound that, 0 is no bound; `linger_s` is how long a block waits for the next ones of its chain.
    `known_tenants_only`: a block of which nobody knows whose it is stays here, as each tenant has a key of its own.
    """

    writes: bool = True
    linger_s: float = LINGER_S
    bytes_per_hour: int = 0
    requests_per_hour: int = 0
    known_tenants_only: bool = False


@dataclass(slots=True, eq=False)
class _Pack:
    """Consecutive blocks of a chain that wait to be written together; the first one's parent is `before`."""

    before: BlockKey | None
    keys: list[BlockKey]
    tail: bool
    since_s: float


@dataclass(slots=True, eq=False)
class WriteBehind:
    """The blocks on their way to one store. Owned by the manager's thread."""

    host_pool: SlotPool[BlockKey]
    arena: HostArena
    names: EngineNames
    facts: SlotFacts
    tier: RemoteTier
    admission: AdmissionPolicy
    budget: StoreBudget
    metrics: Metrics
    clock: Clock
    job_ids: Iterator[int]
    rules: RemoteRules
    on_refused: Callable[[Sequence[BlockKey], str], None] | None = None
    _open: OrderedDict[int, _Pack] = field(default_factory=OrderedDict, init=False)
    _by_last: dict[BlockKey, _Pack] = field(default_factory=dict, init=False)
    _ready: deque[_Pack] = field(default_factory=deque, init=False)
    # Every block that waits or is being written.
    _on_the_way: set[BlockKey] = field(default_factory=set, init=False)
    _in_flight: dict[int, tuple[list[BlockKey], list[SlotIndex], float]] = field(
        default_factory=dict, init=False
    )
    _in_flight_blocks: int = field(default=0, init=False)
    _open_blocks: int = field(default=0, init=False)

    @property
    def queued_count(self) -> int:
        """Blocks that wait or are being written."""
        return len(self._on_the_way)

    def oldest_s(self) -> float:
        """How long the oldest block has waited for its turn and for the store, in seconds; 0 without any."""
        since = [since_s for _, _, since_s in self._in_flight.values()]
        since += [pack.since_s for pack in (*self._ready, *list(self._open.values())[:1])]
        return self.clock() - min(since) if since else 0.0

    def committed(self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None]) -> None:
        """These blocks, behind those of `parents`, are in host memory and may be of use to others."""
        places = self.tier.places(keys)
        new = [
            (key, parent)
            for key, parent, place in zip(keys, parents, places, strict=True)
            if place == NOWHERE and key not in self._on_the_way
        ]
        if not new:
            return
        if self.tier.fault:
            self._skip([key for key, _ in new], "tier_off")
            return
        answers = offer_all(self.admission, [key for key, _ in new], self.clock())
        self._skip([key for (key, _), taken in zip(new, answers, strict=True) if not taken], "filter")
        for (key, parent), taken in zip(new, answers, strict=True):
            if taken:
                self._gather(key, parent)

    def used(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Consecutive blocks of a chain, which are held somewhere, were asked for again; `parent` is before them."""
        held = self.host_pool.find_all(list(keys))
        parents = (parent, *keys[:-1])
        here = [i for i, slot in enumerate(held) if slot is not None]
        self.committed([keys[i] for i in here], [parents[i] for i in here])

    def advance(self) -> bool:
        """Close packs that have waited long enough, or wait in too much of host memory, and submit what the store
        takes. Whether to call it again."""
        now_s = self.clock()
        while self._open:
            pack = next(iter(self._open.values()))
            if now_s - pack.since_s < self.rules.linger_s and not self._pressed:
                break
            self._close(pack)
        if self.tier.fault:
            while self._ready:
                self._give_up(self._ready.popleft().keys, "tier_off")
            return False
        for _ in range(SUBMITTED_AT_ONCE):
            if not self._ready or not self.tier.store_room:
                return False
            if self._in_flight_blocks + len(self._ready[0].keys) > self._pinned_max:
                return False  # a pack is never longer than that
            if not self._submit(self._ready.popleft()):
                return False
        return bool(self._ready)

    def flush(self) -> None:
        """Close every pack: what waits is to be written now."""
        while self._open:
            self._close(next(iter(self._open.values())))

    def completed(self, completion: Completion) -> bool:
        """Take a completion; False when it is not of a write."""
        submitted = self._in_flight.pop(completion.job_id, None)
        if submitted is None:
            return False
        keys, slots, _ = submitted
        self._in_flight_blocks -= len(keys)
        self._on_the_way.difference_update(keys)
        self.host_pool.unlease_all(slots)
        if completion.outcome is Outcome.HIT:
            self.metrics.add("kvbm_offload_blocks_d2o", len(keys))
            self.metrics.add(
                "kvbm_transfer_bytes_total", completion.bytes_moved, source="host", target="remote"
            )
            self.metrics.observe("kvbm_transfer_seconds", completion.seconds, source="host", target="remote")
            self.metrics.observe(
                "kvbm_transfer_size_bytes", completion.bytes_moved, source="host", target="remote"
            )
            moves_log.added(len(keys), "remote")
        else:
            self.metrics.add("kvbm_object_write_failures", len(keys))
            self.metrics.add("kvbm_failures_total", len(keys), tier="remote", kind="io")
            if self.on_refused is not None:
                self.on_refused(keys, "io")
        return True

    def _gather(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Put an admitted block behind its parent, or at the start of a pack."""
        if key in self._on_the_way:  # no engine's chain has a block twice, a hostile client's may
            return
        slot = self.host_pool.find(key)
        if slot is None:
            self._skip((key,), "evicted")
            return
        if len(self._on_the_way) >= WAITING_BLOCKS_MAX:
            self._skip((key,), "queue_full")
            return
        tail = self.host_pool.is_tail(slot)
        pack = self._by_last.pop(parent, None) if parent is not None else None
        if pack is not None and pack.tail != tail:
            self._by_last[pack.keys[-1]] = pack
            pack = None
        if pack is None:
            pack = _Pack(parent, [], tail, self.clock())
            self._open[id(pack)] = pack
        pack.keys.append(key)
        self._open_blocks += 1
        self._by_last[key] = pack
        self._on_the_way.add(key)
        if len(pack.keys) >= min(self.tier.store_blocks_max, self._pinned_max):
            self._close(pack)

    @property
    def _pressed(self) -> bool:
        """Whether the blocks that wait for the next ones may be evicted meanwhile, and the store is not behind.

        Packs that are closed early are small: they leave half of the requests that may be made at once to others, with
        which more is stored.
        """
        waiting_max = max(self.host_pool.free_count, self.host_pool.slot_count // OPEN_SHARE)
        if self._open_blocks <= waiting_max or len(self._ready) >= SUBMITTED_AT_ONCE:
            return False
        return self.budget.plenty(len(self._ready) + 1, self.clock())

    @property
    def _pinned_max(self) -> int:
        """So many blocks may be held by writes at a time."""
        return max(1, self.host_pool.slot_count // IN_FLIGHT_SHARE)

    def _close(self, pack: _Pack) -> None:
        """Nothing more is put into this pack."""
        del self._open[id(pack)], self._by_last[pack.keys[-1]]
        self._open_blocks -= len(pack.keys)
        self._ready.append(pack)

    def _submit(self, pack: _Pack) -> bool:
        """Write a pack as far as it is still in host memory. False when the store is busy: it waits on."""
        slots = self.host_pool.find_leading(pack.keys)
        if len(slots) < len(pack.keys):
            self._give_up(pack.keys[len(slots) :], "evicted")
            pack.keys = pack.keys[: len(slots)]
        if not slots:
            return True
        tenant = self.host_pool.favouring.tenant_of(slots[0])
        if tenant is None and self.rules.known_tenants_only:
            self._give_up(pack.keys, "no_tenant")
            return True
        if not self.budget.spend(len(slots) * self.arena.layout.block_bytes, self.clock()):
            self._give_up(pack.keys, "budget")
            return True
        heads, before = list[BlockHead](), pack.before
        for slot, key in zip(slots, pack.keys, strict=True):
            fact = self.facts.of(slot)
            heads.append(BlockHead(key, before, *self.names.of(slot, key), fact.text() if fact else b""))
            before = key
        job_id = next(self.job_ids)
        sources = [self.arena.slot_views(slot) for slot in slots]
        outcome = self.tier.submit_store(job_id, heads, sources, tenant, pack.tail)
        if outcome is Outcome.THROTTLED:
            self.budget.refund(len(slots) * self.arena.layout.block_bytes)
            self._ready.appendleft(pack)
            return False
        if outcome is not Outcome.PENDING:
            self.budget.refund(len(slots) * self.arena.layout.block_bytes)
            self._give_up(pack.keys, "tier_off")
            return True
        self.host_pool.lease_all(slots)
        self._in_flight[job_id] = pack.keys, [SlotIndex(slot) for slot in slots], pack.since_s
        self._in_flight_blocks += len(slots)
        moves_log.offloading(pack.keys, "host", "remote")
        return True

    def _give_up(self, keys: Sequence[BlockKey], reason: str) -> None:
        """Blocks that waited are not written."""
        self._on_the_way.difference_update(keys)
        self._skip(keys, reason)

    def _skip(self, keys: Sequence[BlockKey], reason: str) -> None:
        if keys:
            self.metrics.add("kvbm_remote_skipped_blocks_total", len(keys), reason=reason)
            if self.on_refused is not None and reason != "filter":
                self.on_refused(keys, reason)

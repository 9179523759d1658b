"""A remote tier of a space: the store, and the queues of blocks to it and from it.

What lies there is the tier's own knowledge, shared with other nodes: there is no index of slots here, as there is of a
disk. A tier that is off, or knows nothing, costs its hits and nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from math import inf

import msgspec

from kvbm.block import BlockKey, Outcome, Tier
from kvbm.clock import Clock
from kvbm.manager.departed import CORRUPT, GONE
from kvbm.manager.host_side import HostSide, SpaceOptions
from kvbm.manager.leases import Lease
from kvbm.manager.onboard import Onboarder
from kvbm.manager.remote_facts import RemoteFacts
from kvbm.manager.sources import distinct
from kvbm.manager.write_behind import RemoteRules, WriteBehind
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy
from kvbm.policy.admission.store_budget import StoreBudget
from kvbm.remote_report import RemoteReport
from kvbm.tiers.contract import Completion
from kvbm.tiers.host import HostArena
from kvbm.tiers.remote.contract import NOWHERE, RemoteTier

ASKED_AT_ONCE = 256
PATIENCE, PATIENCE_S = 2.0, 2.0
"""A block is given up after so many times the expected seconds, and so many more."""


@dataclass(slots=True, eq=False)
class RemoteSource:
    """A remote tier as `sources.Source`. What a host slot is filled with needs no neighbours."""

    remote: RemoteTier
    arena: HostArena
    metrics: Metrics
    on_refused: Callable[[Sequence[BlockKey], str], None] | None = None
    tier: Tier = Tier.REMOTE
    scattered: bool = True

    @property
    def run_blocks_max(self) -> int:
        """As `Source`."""
        return self.remote.load_blocks_max

    @property
    def room(self) -> int:
        """As `Source`. A tier that is off refuses at once what waits for it."""
        return self.remote.load_room or bool(self.remote.fault)

    def leading(self, keys: list[BlockKey]) -> list[int]:
        """As `Source`."""
        if self.remote.fault:
            return []
        places = list[int]()
        while len(places) < len(keys):
            part = self.remote.places(keys[len(places) : len(places) + ASKED_AT_ONCE])
            known = part.index(NOWHERE) if NOWHERE in part else len(part)
            places += part[:known]
            if known < len(part):
                break
        if places:
            tail = self.remote.tail(places[0])
            odd = (n for n, place in enumerate(places) if self.remote.tail(place) != tail)
            places = places[: next(odd, len(places))]
        return distinct(places)

    def is_tail(self, place: int) -> bool:
        """As `Source`."""
        return self.remote.tail(place)

    def pin(self, places: Sequence[int]) -> None:
        """Nothing: a store is shared, and what goes meanwhile is a miss."""

    def unpin(self, places: Sequence[int]) -> None:
        """Nothing, as `pin`."""

    def submit(
        self,
        job_id: int,
        keys: Sequence[BlockKey],
        place: int,
        host_slots: Sequence[int],
        tenant: str | None,
    ) -> Outcome:
        """As `Source`."""
        targets = [self.arena.slot_views(slot) for slot in host_slots]
        return self.remote.submit_load(job_id, keys, place, targets, tenant)

    def missed(self, place: int, key: BlockKey, corrupt: bool) -> None:
        """As `Source`: the tier itself forgets what is not there."""
        if self.on_refused is not None:
            self.on_refused((key,), CORRUPT if corrupt else GONE)

    def expected_s(self, blocks: int) -> float:
        """As `Source`."""
        return self.remote.expected_s(blocks * self.arena.layout.block_bytes)

    def patience_s(self, expected_s: float) -> float:
        """As `Source`: it was promised for a time, and a store may get slower than it was."""
        return PATIENCE * expected_s + PATIENCE_S


@dataclass(slots=True, eq=False)
class RemoteSide:
    """One remote tier of a space. Owned by the manager's thread."""

    tier: RemoteTier
    rules: RemoteRules
    admission: AdmissionPolicy
    _: KW_ONLY
    host: HostSide
    brought_at_once: int
    keeps_facts: bool
    metrics: Metrics
    clock: Clock
    on_progress: Callable[[Lease], None]
    # Told of blocks that the store did not take or did not give, and why.
    on_refused: Callable[[Sequence[BlockKey], str], None] | None = None
    facts: RemoteFacts = field(init=False)
    onboarder: Onboarder = field(init=False)
    """The queue of blocks on their way up."""
    writer: WriteBehind | None = field(init=False)
    """The queue of blocks on their way down, None where nothing is written."""
    counted: Counter[str] = field(default_factory=Counter, init=False)
    """What the metrics know of the tier's own counts, which only grow (see `gauges`)."""
    _budget: StoreBudget = field(init=False)
    _job_ids: Iterator[int] = field(default_factory=lambda: count(1), init=False)
    _ended: deque[Completion] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        rules = self.rules
        self._budget = StoreBudget(rules.bytes_per_hour, rules.requests_per_hour, self.clock())
        self.onboarder = self._make_onboarder()
        self.writer = self._make_writer() if rules.writes else None
        self.facts = RemoteFacts(self.host.arena.layout.block_tokens)

    @property
    def fault(self) -> str:
        """Empty while the tier works; otherwise one line saying why it is off."""
        return self.tier.fault

    @property
    def queued_count(self) -> int:
        """Blocks on their way between host memory and the store."""
        waiting = self.writer.queued_count if self.writer is not None else 0
        return self.onboarder.queued_count + waiting

    def holds(self, keys: list[BlockKey]) -> bytes:
        """Which of these blocks the store is believed to have, a byte each; none while it is off."""
        if self.tier.fault:
            return bytes(len(keys))
        return bytes(place != NOWHERE for place in self.tier.places(keys))

    def used(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Consecutive blocks of a chain, which are held somewhere, were asked for again; `parent` is before them."""
        if self.writer is not None:
            self.writer.used(keys, parent)
        self.tier.used(keys, self._may_tell)

    def _may_tell(self) -> bool:
        """Whether the hour's budget has a request left to say what is in use."""
        return self._budget.spend(0, self.clock())

    def collect(self, until_s: float = inf) -> bool:
        """Take the completions; until that time, but one in any case. Whether there are some left."""
        self._ended += self.tier.poll()
        while self._ended:
            completion = self._ended.popleft()
            if not self.onboarder.completed(completion) and self.writer is not None:
                self.writer.completed(completion)
            if self.clock() >= until_s:
                break
        return bool(self._ended)

    def advance(self) -> bool:
        """Submit queued blocks. Whether it is to be called again."""
        again = self.onboarder.pump()
        if self.writer is not None:
            again = self.writer.advance() or again
        if self.keeps_facts:
            self.facts.heard(self.tier.news(), self.host)
        return again

    def tick(self) -> None:
        """Called about twice a second."""
        self.tier.tick()

    def describe(self) -> dict[str, object]:
        """This tier's part of a `Status`."""
        return {**self.tier.describe(), "fault": self.fault, "queued": self.queued_count}

    def write_more(self) -> bool:
        """As the space ends: take completions and submit what the store takes. Whether there is more to wait for."""
        if self.writer is None or self.fault or not self.writer.queued_count:
            return False
        before, idle = self.writer.queued_count, self.tier.drain(0.0)
        self.collect()
        self.advance()
        left = self.writer.queued_count
        return left > 0 and not (idle and left >= before)

    def _make_onboarder(self) -> Onboarder:
        host = self.host
        return Onboarder(
            host.pool,
            RemoteSource(self.tier, host.arena, self.metrics, self.on_refused),
            host.rising,
            host.names,
            host.facts,
            self.metrics,
            self.clock,
            self.on_progress,
            self._job_ids,
            self.brought_at_once,
        )

    def _make_writer(self) -> WriteBehind:
        host = self.host
        return WriteBehind(
            host.pool,
            host.arena,
            host.names,
            host.facts,
            self.tier,
            self.admission,
            self._budget,
            self.metrics,
            self.clock,
            self._job_ids,
            self.rules,
            self.on_refused,
        )


def report_remote(side: RemoteSide) -> RemoteReport:
    """What a remote tier says of itself, as far as it is in this form, and its queues."""
    try:
        report = msgspec.convert(side.tier.describe(), RemoteReport)
    except msgspec.ValidationError:
        report = RemoteReport()
    return msgspec.structs.replace(
        report,
        name=side.tier.name,
        fault=side.fault,
        writes=side.writer is not None,
        up_blocks=side.onboarder.queued_count,
        down_blocks=side.writer.queued_count if side.writer is not None else 0,
    )


def sides_of(
    remotes: Sequence[tuple[RemoteTier, RemoteRules, AdmissionPolicy]],
    host: HostSide,
    options: SpaceOptions,
    metrics: Metrics,
    clock: Clock,
    on_progress: Callable[[Lease], None],
    on_refused: Callable[[Sequence[BlockKey], str], None],
) -> tuple[RemoteSide, ...]:
    """A side for each remote tier of a space, in their order."""
    return tuple(
        RemoteSide(
            *each,
            host=host,
            brought_at_once=options.brought_at_once,
            keeps_facts=options.keeps_facts,
            metrics=metrics,
            clock=clock,
            on_progress=on_progress,
            on_refused=on_refused,
        )
        for each in remotes
    )

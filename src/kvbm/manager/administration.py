"""An operator's questions about the running manager: one handler for each message of `admin_protocol`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from itertools import chain, islice
from typing import Any

from kvbm.admin_protocol import (
    PAGE_ROWS_MAX,
    BlockPage,
    BlockRow,
    Describe,
    Description,
    EngineReport,
    LeasePage,
    LeaseRow,
    ListBlocks,
    ListLeases,
    SpaceReport,
    TableReport,
    TierReport,
)
from kvbm.block import NO_COUNT, BlockState
from kvbm.clock import Clock
from kvbm.errors import ProtocolError
from kvbm.layout import Namespace
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.engines import Engine
from kvbm.manager.event_stream import Publisher
from kvbm.manager.history import History
from kvbm.manager.leases import PINS, READERS
from kvbm.manager.membership import Membership
from kvbm.manager.remote_side import report_remote
from kvbm.manager.session import Session
from kvbm.manager.space import Space
from kvbm.manager.table_sizes import history_tables, space_tables
from kvbm.observe.metric_table import CACHE_TIERS
from kvbm.observe.metrics import Metrics

SLOTS_AT_ONCE = 2048
"""Slots of a tier that a listing looks at before it gives others their turn."""

Handler = Callable[[Session, Any], Iterator[None] | None]


class Administration:
    """Handlers of an operator's messages. Owned by the manager's thread.

    `sessions` has the open ones by number; `refused_count` tells how many were refused so far. `metrics` are read only.
    """

    def __init__(
        self,
        spaces: SpaceTable,
        membership: Membership,
        sessions: dict[int, Session],
        metrics: Metrics,
        epoch: int,
        refused_count: Callable[[], int],
        clock: Clock,
        history: History,
        publisher: Publisher | None = None,
    ) -> None:
        self._spaces = spaces
        self._membership = membership
        self._sessions = sessions
        self._metrics = metrics
        self._epoch = epoch
        self._refused_count = refused_count
        self._clock = clock
        self._history = history
        self._publisher = publisher
        self._started_s = clock()
        self._version = _version()

    @property
    def handlers(self) -> dict[type, Handler]:
        """What answers each message."""
        return {Describe: self.describe, ListBlocks: self.list_blocks, ListLeases: self.list_leases}

    def describe(self, session: Session, message: Describe) -> None:
        """Answer with `description`."""
        refuse_other_roles(session, message)
        session.send(self.description())

    def description(self) -> Description:
        """The manager, its namespaces and its engines."""
        return Description(
            version=self._version,
            pid=os.getpid(),
            epoch=self._epoch,
            uptime_s=self._clock() - self._started_s,
            spaces=tuple(_report_space(namespace, space) for namespace, space in self._spaces),
            engines=tuple(map(self._report_engine, self._membership)),
            asked_blocks=int(self._metrics.value("kvbm_queried_blocks_total")),
            hit_blocks=self._hit_blocks(),
            sessions=len(self._sessions),
            fences=len(self._membership.fences),
            refused=self._refused_count(),
            events=self._publisher.endpoint if self._publisher is not None else "",
            events_replay=self._publisher.replay_endpoint if self._publisher is not None else "",
            tables=self.tables(),
        )

    def tables(self) -> tuple[TableReport, ...]:
        """The tables of the manager and of each namespace."""
        spaces = (space_tables(space) for _, space in self._spaces)
        return (*history_tables(self._history), *chain.from_iterable(spaces))

    def _hit_blocks(self) -> dict[str, int]:
        found = {tier: int(self._metrics.value("kvbm_hit_blocks_total", tier=tier)) for tier in CACHE_TIERS}
        if not found["remote"] and not any(space.remotes for _, space in self._spaces):
            del found["remote"]
        return found

    def list_blocks(self, session: Session, message: ListBlocks) -> Iterator[None]:
        """A page of the blocks in one tier; a large tier is looked through in several turns."""
        refuse_other_roles(session, message)
        limit = _checked_limit(message.limit, message.start)
        pool = next(
            (
                pool
                for namespace, space in self._spaces
                if namespace.fingerprint.hex() == message.fingerprint
                for pool in space.pools
                if pool.tier.name.lower() == message.tier
            ),
            None,
        )
        if pool is None:
            session.send(BlockPage(found=False))
            return
        rows: list[BlockRow] = []
        for slot in range(message.start, pool.slot_count):
            if (state := pool.state_of(slot)) is not BlockState.FREE:
                if len(rows) == limit:
                    session.send(BlockPage(rows=tuple(rows), next=slot))
                    return
                leased = pool.is_leased(slot)
                rows.append(
                    BlockRow(slot=slot, key=pool.key_of(slot).hex(), state=state.name.lower(), leased=leased)
                )
            if (slot + 1) % SLOTS_AT_ONCE == 0:
                yield
        session.send(BlockPage(rows=tuple(rows)))

    def list_leases(self, session: Session, message: ListLeases) -> None:
        """A page of the leases, those of a namespace together."""
        refuse_other_roles(session, message)
        limit = _checked_limit(message.limit, message.start)
        now_s = self._clock()
        every = ((namespace, lease) for namespace, space in self._spaces for lease in space.leases)
        rows = tuple(
            LeaseRow(
                namespace=namespace.short,
                engine=self._engine_of(lease.owner),
                lease=lease.number,
                blocks=len(lease.slots),
                ready=lease.ready,
                ends_in_s=lease.deadline_s - now_s,
            )
            for namespace, lease in islice(every, message.start, message.start + limit)
        )
        session.send(LeasePage(rows=rows, total=sum(len(space.leases) for _, space in self._spaces)))

    def _engine_of(self, owner: int) -> str:
        if owner < 0:
            return {PINS: "(pin)", READERS: "(peer)"}.get(owner, "(prefetch)")
        session = self._sessions.get(owner)
        return session.hello.engine if session is not None and session.hello is not None else ""

    def _report_engine(self, engine: Engine) -> EngineReport:
        namespace = self._spaces.namespace_of(engine.space)
        hello = engine.leader.hello if engine.leader is not None else None
        leases = engine.space.leases.of(engine.leader.number) if engine.leader is not None else []
        return EngineReport(
            engine=engine.name,
            model=namespace.model,
            namespace=namespace.short,
            rank_count=len(engine.ranks),
            ranks=tuple(sorted(engine.workers)),
            missing=engine.missing,
            led=engine.leader is not None,
            leases=len(leases),
            leased_blocks=sum(len(lease.slots) for lease in leases),
            lease_blocks_max=engine.lease_blocks,
            device_blocks=hello.device_blocks if hello is not None else 0,
        )


def _report_space(namespace: Namespace, space: Space) -> SpaceReport:
    disk = space.disk
    tiers = []
    for pool in space.pools:
        counts = pool.counts()
        below = disk is not None and pool is disk.pool
        salts, poor = pool.favouring.tenant_counts
        tiers.append(
            TierReport(
                tier=pool.tier.name.lower(),
                blocks=pool.slot_count,
                free=counts.free,
                filling=counts.filling,
                resident=counts.resident,
                leased=counts.leased,
                fault=disk.trouble if disk is not None and below else "",
                retained=pool.favouring.retained_count,
                salts=salts,
                poor=poor,
            )
        )
    remotes = tuple(map(report_remote, space.remotes))
    tiers += [
        TierReport(
            tier="remote",
            blocks=NO_COUNT,
            free=0,
            filling=0,
            resident=each.blocks,
            leased=0,
            fault=each.fault,
        )
        for each in remotes
    ]
    return SpaceReport(
        namespace=namespace.short,
        fingerprint=namespace.fingerprint.hex(),
        model=namespace.model,
        fields=namespace.fields,
        ephemeral=namespace.ephemeral,
        staging=space.options.staging,
        block_tokens=space.layout.block_tokens,
        block_bytes=space.layout.block_bytes,
        tiers=tuple(tiers),
        fault=space.failure,
        onboard_blocks=disk.onboarder.queued_count if disk is not None else 0,
        offload_blocks=disk.offloader.queued_count if disk is not None else 0,
        leases=len(space.leases),
        reservations=len(space.reservations),
        named_sessions=space.foresight.sessions.count,
        remotes=remotes,
    )


def refuse_other_roles(session: Session, message: object) -> None:
    """An engine's sessions have no part in this: what they may ask is theirs alone."""
    if session.hello is None or session.hello.role != "admin":
        raise ProtocolError(f"{type(message).__name__} cannot be served: only to a session of role admin")


def _checked_limit(limit: int, start: int) -> int:
    if not (0 < limit <= PAGE_ROWS_MAX and start >= 0):
        raise ProtocolError(
            f"a page of limit={limit} from start={start} cannot be served: 1 to {PAGE_ROWS_MAX}, from 0 on"
        )
    return limit


@cache
def _version() -> str:
    """The version of the distribution; its files are read once."""
    try:
        return metadata.version("openkvbm")
    except metadata.PackageNotFoundError:
        return ""

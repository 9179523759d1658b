"""Membership: engines form as their workers and leaders introduce themselves, and end as these go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator

from kvbm.clock import Clock
from kvbm.errors import ProtocolError
from kvbm.layout import Namespace
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.engine_labels import EngineLabels
from kvbm.manager.engines import Engine, Fences
from kvbm.manager.leases import PINS, Lease
from kvbm.manager.lookups import LEASE_S
from kvbm.manager.session import Session
from kvbm.manager.space import Space
from kvbm.observe.line_budget import LineBudget
from kvbm.present.numbers import name_ranks
from kvbm.protocol import PROTOCOL_VERSION, Hello, Ready, Welcome

log = logging.getLogger("kvbm.manager")

RANKS_MAX = 1024
ENDED_LINES_MAX = 8
"""Engines that end and have a line of their own, in a minute."""
LEASED_SHARE = 0.75
"""Leases of all engines together may take this part of host memory. The rest is for stores."""
ATTACH_S = 60.0
"""The ranks of an engine are waited for this long after the first has attached; then those missing are named.

All of them load weights first, and attach about when the others do.
"""


class Membership:
    """The engines of one manager. Owned by the manager's thread.

    `on_unused(space)` is called when the last engine of an ephemeral namespace has gone, as no other can ask for it,
    and when the last engine of a space that failed has gone.
    """

    def __init__(
        self, spaces: SpaceTable, epoch: int, on_unused: Callable[[Space], None], clock: Clock
    ) -> None:
        self.fences = Fences()
        self._spaces = spaces
        self._epoch = epoch
        self._on_unused = on_unused
        self._clock = clock
        self._engines: dict[str, Engine] = {}
        # Leaders whose workers have not come yet, and since when, for those that have not been sent the missing ranks.
        self._labels = EngineLabels()
        self._ended_lines = LineBudget(ENDED_LINES_MAX, 60.0, clock)
        self._early: dict[str, Session] = {}
        self._early_since_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    @property
    def awaited(self) -> bool:
        """There are engines, or a leader waits for its workers."""
        return bool(self._engines or self._early)

    def of(self, session: Session) -> Engine | None:
        """The engine that the session belongs to, if it has formed."""
        return self._engines.get(session.hello.engine) if session.hello else None

    def led_by(self, session: Session) -> Engine | None:
        """The engine that this session leads, if all its ranks are attached."""
        engine = self.of(session)
        return engine if engine is not None and engine.leader is session and engine.ready else None

    def shared(self, engine: Engine) -> bool:
        """Whether other engines use the space of this one."""
        return any(other.space is engine.space for other in self if other is not engine)

    def admit(self, session: Session, hello: Hello) -> Generator[object, None, Space | None]:
        """Let a session in by its Hello, in several turns where a disk has to be opened for it. Returns a worker's
        space. Raises an error that names what is accepted."""
        if session.hello is not None:
            raise ProtocolError("a second Hello in one session")
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol version={hello.version} cannot be served: this manager speaks {PROTOCOL_VERSION}; "
                "install the same kvbm on both sides"
            )
        if hello.role == "worker":
            return (yield from self._admit_worker(session, hello))
        if hello.role not in ("leader", "admin"):
            raise ProtocolError(f"role={hello.role!r} cannot be served: leader, worker or admin")
        if not 0 < hello.rank_count <= RANKS_MAX:
            raise ProtocolError(f"rank_count={hello.rank_count} cannot be served: 1 to {RANKS_MAX}")
        engine = self._engines.get(hello.engine)
        if hello.role == "leader":
            held = engine.leader if engine is not None else self._early.get(hello.engine)
            if held is not None and not held.closed:
                raise ProtocolError(f"engine {hello.engine} has a leader already")
        session.hello = hello
        session.send(
            Welcome(
                version=PROTOCOL_VERSION, epoch=self._epoch, lease_s=LEASE_S, events=self._spaces.publishes
            )
        )
        if hello.role == "leader":
            if engine is None:
                self._early[hello.engine] = session
                self._early_since_s[hello.engine] = self._clock()
            else:
                engine.leader = session
                self._send_ready(engine)
        return None

    def gone(self, session: Session) -> list[Lease]:
        """A session is served no more. Its leases end now, its filling slots are freed once no worker writes to them.

        Returns the leases that it held. `ended` follows, for a worker when the other end has closed the session.
        """
        hello, leases = session.hello, list[Lease]()
        if hello is None:
            return leases
        if self._early.get(hello.engine) is session:
            self._early.pop(hello.engine)
            self._early_since_s.pop(hello.engine, None)
        engine = self._engines.get(hello.engine)
        if engine is None:
            return leases
        if engine.workers.get(hello.rank) is session:
            if engine.ready:
                engine.incomplete_s = self._clock()
            del engine.workers[hello.rank]
            engine.leaving[session.number] = session
            self._send_ready(engine)
        elif hello.role == "leader":
            # Another leader may have replaced it already; the leases of this one end all the same.
            if engine.leader is session:
                engine.leader = None
            leases = engine.space.leases.of(session.number)
            engine.space.release_later(leases)
            mine = engine.space.reservations.of(session.number)
            self.fences.raise_for(engine, [r for r in mine if not r.condemned])
        return leases

    def ended(self, session: Session) -> None:
        """A session that is `gone` writes nothing any more: it is past every fence."""
        self.fences.ended(session)
        engine = self.of(session)
        if engine is not None:
            engine.leaving.pop(session.number, None)
            self._forget_if_gone(engine)

    def _forget_if_gone(self, engine: Engine) -> None:
        if engine.empty:
            if self._ended_lines.admits():
                log.info("engine %s has gone%s", engine.name, self._ended_lines.take_left_out())
            del self._engines[engine.name]
            unusable = engine.space.failure or self._spaces.namespace_of(engine.space).ephemeral
            if unusable and not self.shared(engine):
                self._on_unused(engine.space)

    def announce_tiers(self) -> None:
        """Send the tiers to leaders whose tiers or share of them are others than they were."""
        for engine in self:
            present = engine.space.tiers(), self._lease_blocks(engine.space)
            if engine.leader is not None and (engine.announced, engine.lease_blocks) != present:
                self._send_ready(engine)

    def expire(self) -> list[Lease]:
        """End leases and reservations past their deadline. Returns the leases."""
        expired: list[Lease] = []
        for engine in self:
            self._forget_if_gone(engine)
            leader = engine.leader
            expired += engine.space.expire_leases()
            overdue = engine.space.overdue()
            if leader is not None:
                self.fences.raise_for(engine, [r for r in overdue if r.owner == leader.number])
        return expired

    def name_missing(self) -> None:
        """Name ranks that did not come in time, in the log and to their leader; again only when they are others."""
        due_s = self._clock() - ATTACH_S
        for engine in self:
            expected = not engine.ready and (engine.workers or engine.leader is not None)
            if expected and engine.incomplete_s <= due_s and engine.missed != engine.missing:
                engine.missed = engine.missing
                _log_missing(engine.name, engine.missed, engine.rank_count)
                self._send_ready(engine)
        for name, since_s in list(self._early_since_s.items()):
            if since_s <= due_s:
                del self._early_since_s[name]
                leader = self._early[name]
                assert leader.hello is not None
                missing = tuple(range(leader.hello.rank_count))
                _log_missing(name, missing, len(missing))
                leader.send(Ready(ready=False, epoch=self._epoch, missing=missing))

    def _admit_worker(self, session: Session, hello: Hello) -> Generator[object, None, Space]:
        namespace, layout = hello.namespace, hello.layout
        if namespace is None or layout is None or not 0 <= hello.shard < layout.shard_count:
            raise ProtocolError("a worker's Hello needs namespace, layout and a shard of that layout")
        if not 0 <= hello.rank < hello.rank_count <= RANKS_MAX:
            raise ProtocolError(
                f"rank={hello.rank} of {hello.rank_count} cannot be served: 0 to {RANKS_MAX - 1}, below their number"
            )
        if not 0 <= hello.data_parallel_rank < RANKS_MAX:
            raise ProtocolError(
                f"data_parallel_rank={hello.data_parallel_rank} cannot be served: 0 to {RANKS_MAX - 1}"
            )
        ranks = _ranks_here(hello)
        if layout.shard_count > len(ranks):
            raise ProtocolError(
                f"shard_count={layout.shard_count} cannot be served: at most one for each of {len(ranks)} ranks"
            )
        yield from self._spaces.preparing(namespace, layout, hello.events)
        engine = self._engines.get(hello.engine)
        if engine is not None:
            self._refuse_odd(engine, hello, namespace)
        space = self._spaces.obtain(namespace, layout, hello.request_blocks, hello.events)
        if engine is None:
            leader = self._early.pop(hello.engine, None)
            self._early_since_s.pop(hello.engine, None)
            label = self._labels.name(
                namespace.model, hello.data_parallel_rank, {other.label for other in self}, hello.kind
            )
            engine = Engine(
                hello.engine,
                hello.rank_count,
                ranks,
                space,
                self._clock(),
                leader,
                label=label,
                part=hello.part,
                part_count=hello.part_count,
            )
            self._engines[hello.engine] = engine
        session.hello = hello
        engine.workers[hello.rank] = session
        if engine.ready:
            engine.missed = ()
        space.arena.touch(hello.shard, hello.numa_node)
        session.send(
            Welcome(
                version=PROTOCOL_VERSION,
                epoch=self._epoch,
                slot_count=space.arena.slot_count,
                slot_bytes=layout.slot_bytes,
                lease_s=LEASE_S,
                tiers=space.tiers(),
                events=self._spaces.publishes,
            ),
            fds=(space.arena.region_fds[hello.shard], space.arena.generation_fd),
        )
        self.fences.joined(engine, session)
        self._send_ready(engine)
        return space

    def _refuse_odd(self, engine: Engine, hello: Hello, namespace: Namespace) -> None:
        """Raise ProtocolError for a rank that does not fit the others of its engine."""
        name = f"rank {hello.rank} of engine {hello.engine}"
        if hello.rank in engine.workers:
            raise ProtocolError(f"{name} is attached already")
        if hello.rank_count != engine.rank_count:
            raise ProtocolError(f"{name} says {hello.rank_count} ranks, its peers {engine.rank_count}")
        if (_ranks_here(hello), hello.part, hello.part_count) != (
            engine.ranks,
            engine.part,
            engine.part_count,
        ):
            raise ProtocolError(
                f"{name} says that {name_ranks(_ranks_here(hello))} find this manager, its peers "
                f"{name_ranks(engine.ranks)}"
            )
        peers = self._spaces.namespace_of(engine.space)
        if namespace.fingerprint != peers.fingerprint:
            raise ProtocolError(f"{name} has another namespace than its peers: {namespace.difference(peers)}")

    def _send_ready(self, engine: Engine) -> None:
        if engine.leader is not None:
            engine.announced = engine.space.tiers()
            engine.lease_blocks = self._lease_blocks(engine.space)
            engine.leader.send(
                Ready(
                    ready=engine.ready,
                    epoch=self._epoch,
                    fingerprint=self._spaces.namespace_of(engine.space).whole.fingerprint,
                    block_bytes=engine.space.layout.block_bytes,
                    lease_s=LEASE_S,
                    tiers=engine.announced,
                    missing=engine.missing if engine.missed else (),
                    lease_blocks=engine.lease_blocks,
                    part=engine.part,
                    part_count=engine.part_count,
                )
            )

    def _lease_blocks(self, space: Space) -> int:
        """The part of host memory that each engine's leases may take: the rest is for stores."""
        engines = sum(engine.space is space for engine in self)
        pinned = sum(len(pin.slots) for pin in space.leases.of(PINS))
        return max(1, int((space.arena.slot_count - pinned) * LEASED_SHARE / max(engines, 1)))


def _ranks_here(hello: Hello) -> tuple[int, ...]:
    """The ranks of a worker's engine that find this manager. Raises ProtocolError for such as cannot be."""
    if not 0 <= hello.part < hello.part_count <= hello.rank_count:
        raise ProtocolError(
            f"part={hello.part} of {hello.part_count} cannot be served: 0 up to {hello.rank_count} ranks"
        )
    if not hello.ranks:
        return tuple(range(hello.rank_count))
    ranks, sound = hello.ranks, range(hello.rank_count)
    if list(ranks) != sorted({*ranks}) or hello.rank not in ranks or not {ranks[0], ranks[-1]} <= {*sound}:
        raise ProtocolError(
            f"ranks={ranks} cannot be served: in order, below {hello.rank_count}, rank {hello.rank} among them"
        )
    return ranks


def _log_missing(engine: str, missing: tuple[int, ...], rank_count: int) -> None:
    log.warning(
        "engine %s runs without a KV cache: of its %d ranks, %s did not attach to this manager within %g s "
        "(a rank on another node finds another one)",
        engine,
        rank_count,
        name_ranks(missing),
        ATTACH_S,
    )

"""The manager's loop: one thread, one selector; sessions in, notifications out.

Everything a manager owns is touched by this thread alone. Disk I/O happens in the tier's own threads and comes back
through its descriptor; nothing in the loop waits on a medium or on a client.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Callable
from itertools import count

from kvbm.clock import Clock
from kvbm.errors import KvbmError, ProtocolError
from kvbm.hashing import split_keys
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.engines import Engine, Fences
from kvbm.manager.leases import Lease
from kvbm.manager.session import Session
from kvbm.manager.space import LEASE_S, Space
from kvbm.manager.traffic import Traffic
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Commit,
    FenceDone,
    Hello,
    Lookup,
    LookupReply,
    Progress,
    Ready,
    Refused,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
    Status,
    StatusQuery,
    ToManager,
    Watch,
    Welcome,
)

log = logging.getLogger("kvbm.manager")

TICK_S = 0.5
SESSIONS_MAX = 1024


class Server:
    """Serves one listening Unix socket until `stop`.

    `spaces` and `traffic` (metrics, hit rates, the line a minute) are owned by the loop's thread while it runs.
    """

    def __init__(
        self, listener: socket.socket, spaces: Callable[[Callable[[Lease], None]], SpaceTable], traffic: Traffic, clock: Clock
    ) -> None:
        self.epoch = int.from_bytes(os.urandom(7), "little")
        self.spaces = spaces(self._announce)
        self.traffic = traffic
        self.last_busy_s = clock()
        self._clock = clock
        self._listener = listener
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._sessions: dict[int, Session] = {}
        self._engines: dict[str, Engine] = {}
        self._fences = Fences()
        self._watchers: dict[tuple[int, int], set[int]] = {}
        self._numbers = count(1)
        self._watched_tiers: set[int] = set()
        self._tick_at_s = clock()
        self._handlers: dict[type, Callable[[Session, ToManager], None]] = {
            Hello: self._hello,
            Lookup: self._lookup,
            Release: self._release,
            Reserve: self._reserve,
            Commit: self._commit,
            Watch: self._watch,
            FenceDone: self._fence_done,
            Reset: self._reset,
            StatusQuery: self._status,
        }

    @property
    def engine_count(self) -> int:
        return len(self._engines)

    def watch_descriptor(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back, in the loop, when `fd` is readable (a signal's wake-up pipe)."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    # ---- the loop

    def step(self, timeout_s: float = TICK_S) -> None:
        """Wait for something to happen, at most `timeout_s`, and deal with it."""
        for key, events in self._selector.select(timeout_s):
            target = key.data
            if not isinstance(target, Session):
                target()
                continue
            if events & selectors.EVENT_WRITE:
                target.flush()
            if events & selectors.EVENT_READ:
                self._read(target)
        for _, space in self.spaces:
            space.pump()
        self._settle_sessions()
        if self._clock() >= self._tick_at_s:
            self._tick_at_s = self._clock() + TICK_S
            self._tick()

    def close(self, keep: bool) -> None:
        """Write what waits, release every tier and every session."""
        for session in self._sessions.values():
            session.close()
        for _, space in list(self.spaces):
            self.spaces.drop(space, keep)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        session = Session(connection, next(self._numbers))
        if session.peer_uid() not in (os.getuid(), 0) or len(self._sessions) >= SESSIONS_MAX:
            session.send(Refused(reason=f"user {session.peer_uid()} is not {os.getuid()}, whose manager this is"))
            session.close()
            return
        self._sessions[session.number] = session
        self._selector.register(connection, selectors.EVENT_READ, session)

    def _read(self, session: Session) -> None:
        try:
            for message in session.receive():
                if session.hello is None and not isinstance(message, Hello):
                    raise ProtocolError(f"{type(message).__name__} before Hello")
                self._handlers[type(message)](session, message)
        except KvbmError as error:
            log.warning("session %d refused: %s", session.number, error)
            session.send(Refused(reason=str(error)))
            session.closed = True

    def _settle_sessions(self) -> None:
        """Forget sessions that closed; ask for writability where bytes wait."""
        for session in list(self._sessions.values()):
            if session.closed:
                self._selector.unregister(session.connection)
                del self._sessions[session.number]
                self._gone(session)
                session.close()
            else:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if session.wants_to_write else 0)
                if self._selector.get_key(session.connection).events != events:
                    self._selector.modify(session.connection, events, session)

    def _tick(self) -> None:
        for engine in list(self._engines.values()):
            overdue = [r for r in engine.space.overdue() if engine.leader and r.owner == engine.leader.number]
            self._fences.raise_for(engine, overdue)
        for _, space in self.spaces:
            space.gauges()
        if self._engines:
            self.last_busy_s = self._clock()
        roles = [s.hello.role for s in self._sessions.values() if s.hello]
        self.traffic.tick(roles, len(self._engines))

    # ---- sessions

    def _hello(self, session: Session, hello: ToManager) -> None:
        assert isinstance(hello, Hello)
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol version={hello.version} cannot be served: this manager speaks {PROTOCOL_VERSION}; "
                "install the same kvbm on both sides"
            )
        if session.hello is not None:
            raise ProtocolError("a second Hello in one session")
        if hello.role == "worker":
            self._welcome_worker(session, hello)
        elif hello.role in ("leader", "admin"):
            session.hello = hello
            session.send(Welcome(version=PROTOCOL_VERSION, epoch=self.epoch, lease_s=LEASE_S))
            engine = self._engines.get(hello.engine)
            if hello.role == "leader" and engine is not None:
                self._join_leader(engine, session)
        else:
            raise ProtocolError(f"role={hello.role!r} cannot be served: leader, worker or admin")

    def _welcome_worker(self, session: Session, hello: Hello) -> None:
        namespace, layout = hello.namespace, hello.layout
        if namespace is None or layout is None or not 0 <= hello.shard < layout.shard_count:
            raise ProtocolError("a worker's Hello needs namespace, layout and a shard of that layout")
        space = self.spaces.obtain(namespace, layout, hello.request_blocks)
        self._watch_tier(space)
        engine = self._engines.get(hello.engine)
        if engine is None:
            engine = self._engines[hello.engine] = Engine(hello.engine, hello.rank_count, space)
            for other in self._sessions.values():
                if other.hello and other.hello.role == "leader" and other.hello.engine == hello.engine:
                    self._join_leader(engine, other)
        if engine.space is not space:
            raise ProtocolError(f"rank {hello.rank} of engine {hello.engine} has another namespace than its peers")
        if hello.rank in engine.workers:
            raise ProtocolError(f"rank {hello.rank} of engine {hello.engine} is attached already")
        session.hello, session.layout = hello, layout
        engine.workers[hello.rank] = session
        session.send(
            Welcome(
                version=PROTOCOL_VERSION,
                epoch=self.epoch,
                slot_count=space.arena.slot_count,
                slot_bytes=layout.slot_bytes,
                lease_s=LEASE_S,
                tiers=_tiers(space),
            ),
            fds=(space.arena.region_fds[hello.shard], space.arena.generation_fd),
        )
        self._tell_ready(engine)

    def _join_leader(self, engine: Engine, session: Session) -> None:
        if engine.leader is not None and not engine.leader.closed:
            raise ProtocolError(f"engine {engine.name} has a leader already")
        engine.leader = session
        self._tell_ready(engine)

    def _tell_ready(self, engine: Engine) -> None:
        if engine.leader is None:
            return
        fingerprint = next(n.fingerprint for n, space in self.spaces if space is engine.space)
        engine.leader.send(
            Ready(
                ready=engine.ready,
                epoch=self.epoch,
                fingerprint=fingerprint,
                block_bytes=engine.space.layout.block_bytes,
                lease_s=LEASE_S,
                tiers=_tiers(engine.space),
            )
        )

    def _gone(self, session: Session) -> None:
        """A session ended: its leases end with it, its half-filled slots once nobody writes to them."""
        hello = session.hello
        if hello is None:
            return
        engine = self._engines.get(hello.engine)
        if hello.role == "worker":
            self._fences.gone(session)
            for watchers in self._watchers.values():
                watchers.discard(session.number)
            if engine is not None and engine.workers.get(hello.rank) is session:
                del engine.workers[hello.rank]
                self._tell_ready(engine)
        elif engine is not None and engine.leader is session:
            engine.leader = None
            for lease in engine.space.leases.of(session.number):
                self._end_lease(engine.space, session.number, lease.number)
            self._fences.raise_for(
                engine, [r for r in engine.space.reservations.of(session.number) if not r.condemned]
            )
        if engine is not None and engine.empty:
            log.info("engine %s has gone", engine.name)
            del self._engines[engine.name]

    def _engine_of(self, session: Session) -> Engine | None:
        return self._engines.get(session.hello.engine) if session.hello else None

    def _led(self, session: Session) -> Engine | None:
        """The engine that this session leads, if its workers are attached."""
        engine = self._engine_of(session)
        return engine if engine is not None and engine.leader is session and engine.ready else None

    # ---- requests

    def _lookup(self, session: Session, message: ToManager) -> None:
        assert isinstance(message, Lookup)
        engine, lease = self._led(session), None
        keys = split_keys(message.keys)
        if engine is not None:
            lease = engine.space.lookup(session.number, message.lookup, keys, message.skip)
            self.traffic.looked_up(engine.name, len(keys) - message.skip, bytes(lease.sources) if lease else b"")
        if lease is None:
            session.send(LookupReply(lookup=message.lookup))
            return
        arena = engine.space.arena if engine else None
        assert arena is not None
        session.send(
            LookupReply(
                lookup=message.lookup,
                slots=tuple(lease.slots),
                generations=tuple(arena.generation(slot) for slot in lease.slots),
                ready=lease.ready,
                sources=bytes(lease.sources),
            )
        )

    def _release(self, session: Session, message: ToManager) -> None:
        assert isinstance(message, Release)
        engine = self._engine_of(session)
        if engine is not None and engine.leader is session:
            lease = self._end_lease(engine.space, session.number, message.lookup)
            if lease is not None and message.loaded:
                loaded = bytes(lease.sources[message.first : message.first + message.loaded])
                self.traffic.loaded(engine.space.layout, loaded, message.seconds)
            if message.failed:
                self.traffic.failed_load(message.failed)

    def _end_lease(self, space: Space, owner: int, number: int) -> Lease | None:
        self._watchers.pop((owner, number), None)
        return space.release(owner, number)

    def _reserve(self, session: Session, message: ToManager) -> None:
        assert isinstance(message, Reserve)
        engine = self._led(session)
        keys = split_keys(message.keys)
        if engine is None:
            slots = [-2] * len(keys)
        else:
            parent = split_keys(message.parent)[0] if message.parent else None
            slots = engine.space.reserve(session.number, message.store, parent, keys)
        session.send(ReserveReply(store=message.store, slots=tuple(slots)))

    def _commit(self, session: Session, message: ToManager) -> None:
        assert isinstance(message, Commit)
        engine = self._engine_of(session)
        if engine is not None and engine.leader is session:
            stored = engine.space.commit(session.number, message.store, message.failed)
            self.traffic.stored(stored, message.seconds)

    def _watch(self, session: Session, message: ToManager) -> None:
        assert isinstance(message, Watch)
        engine = self._engine_of(session)
        lease = None
        if engine is not None and engine.leader is not None:
            lease = engine.space.leases.get(engine.leader.number, message.lookup)
        if lease is None:
            session.send(Progress(lookup=message.lookup, ready=0, final=True))
            return
        if not lease.final:
            self._watchers.setdefault((lease.owner, lease.number), set()).add(session.number)
        session.send(Progress(lookup=message.lookup, ready=lease.ready, final=lease.final))

    def _announce(self, lease: Lease) -> None:
        """A lease's blocks arrived or failed: tell its leader and the workers that watch it."""
        progress = Progress(lookup=lease.number, ready=lease.ready, final=lease.final)
        owner = (lease.owner, lease.number)
        for number in (lease.owner, *self._watchers.get(owner, ())):
            session = self._sessions.get(number)
            if session is not None:
                session.send(progress)
        if lease.final:
            self._watchers.pop(owner, None)

    def _fence_done(self, session: Session, message: ToManager) -> None:
        assert isinstance(message, FenceDone)
        self._fences.answered(message.fence, session)

    def _reset(self, session: Session, message: ToManager) -> None:
        assert isinstance(message, Reset)
        engine = self._engine_of(session)
        spaces = [engine.space] if engine is not None else [space for _, space in self.spaces]
        results = [space.clear(message.tier) for space in spaces]
        session.send(ResetReply(dropped=sum(r[0] for r in results), in_use=sum(r[1] for r in results)))

    def _status(self, session: Session, message: ToManager) -> None:
        session.send(Status(epoch=self.epoch, spaces=tuple(_describe(n.short, n.model, s) for n, s in self.spaces)))

    def _watch_tier(self, space: Space) -> None:
        if space.tier is not None and space.tier.fileno() not in self._watched_tiers:
            self._watched_tiers.add(space.tier.fileno())
            self.watch_descriptor(space.tier.fileno(), lambda: None)


def _tiers(space: Space) -> dict[str, int]:
    """Block counts of the tiers that are on."""
    tiers = {} if space.options.staging else {"host": space.host.slot_count}
    if space.disk is not None:
        tiers["disk"] = space.disk.slot_count
    return tiers


def _describe(short: str, model: str, space: Space) -> dict[str, object]:
    tiers: dict[str, object] = {}
    for pool in (space.host, space.disk):
        if pool is not None:
            counts = pool.counts()
            tiers[pool.tier.name.lower()] = {
                "blocks": pool.slot_count,
                "free": counts.free,
                "filling": counts.filling,
                "resident": counts.resident,
                "leased": counts.leased,
            }
    fault = space.tier.fault if space.tier else ""
    return {"namespace": short, "model": model, "block_bytes": space.layout.block_bytes, "tiers": tiers, "fault": fault}

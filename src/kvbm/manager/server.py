"""The manager's loop: one thread, one selector; sessions in, notifications out.

Answers come first; what policies learn of requests waits until no client does (`usage`).

Everything a manager owns is touched by this thread alone. Blocks are read and written by the tier's own threads, which
report through its descriptor; so do the threads that open a tier, watch it and void its records. The loop never waits
for a client or a medium.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvbm.admin_protocol import Snapshot, WhyQuery
from kvbm.block import Tier
from kvbm.clock import Clock
from kvbm.errors import KvbmError, ProtocolError
from kvbm.manager.administration import Administration
from kvbm.manager.announcements import Announcements, EventsAccount, KeysAccount
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.door import Door
from kvbm.manager.event_stream import EventStream, Publisher
from kvbm.manager.followers import Followers
from kvbm.manager.gauges import publish_gauges
from kvbm.manager.history import History
from kvbm.manager.leases import Lease
from kvbm.manager.lending import Lending
from kvbm.manager.membership import Membership
from kvbm.manager.pins import Pins
from kvbm.manager.prompt_why import PromptQuestions
from kvbm.manager.requests import Requests
from kvbm.manager.resets import Resets
from kvbm.manager.scrapes import Scrapes
from kvbm.manager.session import Session
from kvbm.manager.snapshots import Snapshots
from kvbm.manager.space import Space
from kvbm.manager.traffic import Traffic
from kvbm.protocol import (
    Announce,
    Follow,
    Hello,
    Message,
    Reset,
    Status,
    StatusQuery,
)
from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.manager")

TICK_S = 0.5
PARKED_S = 0.01
TURN_S = 0.001
"""How long a turn of the loop begins new work; what it has begun then, it ends."""
ANSWERS_FIRST = 8
"""While clients ask without a pause, the policies are told in one of so many turns."""
WHY_MAX = 256


class Server:
    """Serves one listening Unix socket until `stop`.

    `spaces` and `traffic` (metrics, hit rates, the line a minute) are owned by the loop's thread while it runs.
    `peer_uids` are the users that are served besides our own and root. `scrapes` are answered from here on; `publisher`
    takes what is told to routers.
    """

    def __init__(
        self,
        listener: socket.socket,
        spaces: Callable[[Callable[[Lease], None]], SpaceTable],
        traffic: Traffic,
        clock: Clock,
        peer_uids: Iterable[int] = (),
        scrapes: Scrapes | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        self.epoch = int.from_bytes(os.urandom(7), "little")
        self.spaces = spaces(self._announce)
        self.membership = Membership(self.spaces, self.epoch, self._drop_unused, clock)
        self.traffic = traffic
        self.last_busy_s = clock()
        self.refused_count = 0
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self.sessions: dict[int, Session] = {}
        self._door = Door(listener, self._selector, self.sessions, frozenset(peer_uids), TICK_S)
        self._resets = Resets(clock)
        self._followers = Followers(clock, self.sessions.get, self.spaces.namespace_of)
        self._announcements = Announcements(self.sessions.get)
        self._events = self._event_stream(publisher) if publisher is not None else None
        self._history = History(clock, self.spaces.namespace_of)
        self._requests = requests = Requests(
            self.membership, traffic, self._followers, self._history, self.sessions.get, clock
        )
        administration = Administration(
            self.spaces,
            self.membership,
            self.sessions,
            traffic.metrics,
            self.epoch,
            lambda: self.refused_count,
            clock,
            self._history,
            publisher,
        )
        self._pins = Pins(self.spaces, clock)
        self._snapshots = Snapshots(administration.description, self.spaces, traffic.metrics, clock)
        self._scrapes = scrapes if scrapes is not None else Scrapes(traffic.metrics, clock)
        self.watch_descriptor(self._scrapes.fileno(), self._scrapes.take)
        # Sessions whose socket or whose messages wait to be read, in the order of their turns.
        self._readable: dict[int, Session] = {}
        # Sessions whose message waits for another thread: looked at each `PARKED_S`.
        self._parked: dict[int, Session] = {}
        self._unfinished = False
        self._turns_untold = self._told_last = 0
        self._failed: list[Space] = []
        self._lending: Lending | None = None
        self._tick_at_s = clock()
        # Each takes the message of its type. One that takes long leaves the rest to an iterator, in slices.
        self._handlers: dict[type, Callable[[Session, Any], Iterator[object] | None]] = {
            Hello: self._hello,
            **requests.handlers,
            Reset: self._reset,
            Announce: self._announce_tiers,
            Follow: self._follow,
            StatusQuery: self._status,
            Snapshot: self._snapshots.answer,
            WhyQuery: self._why,
            **administration.handlers,
            **self._pins.handlers,
            **PromptQuestions(self.spaces, self._history).handlers,
        }

    @property
    def engine_count(self) -> int:
        return len(self.membership)

    @property
    def idle(self) -> bool:
        """The latest turn left nothing over: the next one waits."""
        return not self._unfinished

    def watch_descriptor(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back, in the loop, when `fd` is readable (a signal's wake-up pipe)."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def lend(self, lending: Lending) -> None:
        """From now on readers on other nodes have their turns too."""
        self._lending = lending
        self.watch_descriptor(lending.fileno(), lending.turn)

    # ---- the loop

    def step(self, timeout_s: float = TICK_S) -> None:
        """One turn: wait for something to happen, at most `timeout_s`, and deal with it.

        A turn is bounded by `TURN_S`, so that nobody waits for somebody else's thousandth message: what is left over
        is done in the next turn, which does not wait.
        """
        waits = [timeout_s, self._scrapes.wait_s_max, *(space.below.wait_s_max for _, space in self.spaces)]
        wait_s = 0.0 if self._unfinished else min(waits)
        if self._parked:
            wait_s = min(wait_s, PARKED_S)
            self._readable |= self._parked
            self._parked.clear()
        for key, events in self._selector.select(wait_s):
            target = key.data
            if not isinstance(target, Session):
                target()
                continue
            if events & selectors.EVENT_WRITE:
                target.flush()
            if events & selectors.EVENT_READ:
                self._readable[target.number] = target
        unread = set(self._readable) if self._scrapes.open_count else ()
        until_s = self._clock() + TURN_S
        answered = self._answer(until_s)
        spaces = [space for _, space in self.spaces]
        ended_left = [space.move(until_s) for space in spaces]
        told = self._catch_up(spaces, until_s, answered)
        # What the policies were told may have filled a queue: the next turn submits it.
        self._unfinished = bool(self._readable) or any(ended_left) or told
        self._unfinished = self._requests.tell_dropped() or self._unfinished
        self._unfinished = self._announcements.tell() or self._unfinished
        if self._events is not None:
            self._unfinished = self._events.tell() or self._unfinished
        self._resets.answer()
        self._end_failed(spaces)
        self._update_sessions()
        if self._clock() >= self._tick_at_s:
            self._tick_at_s = self._clock() + TICK_S
            self._tick()
        self._unfinished = self._unfinished or any(space.behind for _, space in self.spaces)
        if self._scrapes.open_count:
            self._scrapes.turn_ended(unread, (space for _, space in self.spaces), self._publish)

    def stop_lending(self) -> None:
        """Readers have no turns any more; call it before `Lending.close`."""
        if self._lending is not None:
            self._selector.unregister(self._lending.fileno())
            self._lending = None

    def close(self, keep: bool) -> None:
        """Let nobody in any more, write the queued blocks, release every tier and every session."""
        # First: an engine that came now would wait for an answer as long as blocks are written.
        self._door.close()
        self._scrapes.close()
        for session in self.sessions.values():
            session.close()
        self.spaces.close(keep)
        self._selector.close()

    def _answer(self, until_s: float) -> bool:
        """Handle messages until that time, one in any case: one of each session in turn. Whether there was one."""
        answered = False
        while self._readable:
            number = next(iter(self._readable))
            session = self._readable.pop(number)
            if session.lingering:
                session.discard()
                continue
            answered = self._answer_one(session) or answered
            if session.parked:
                self._parked[number] = session
            elif session.waiting:
                self._readable[number] = session  # behind the others
            if self._clock() >= until_s:
                break
        return answered

    def _answer_one(self, session: Session) -> bool:
        """Handle the session's next message, or go on with its last one; False when there is none."""
        try:
            if session.work is None:
                message = session.take()
                if message is None:
                    return False
                if session.hello is None and not isinstance(message, Hello):
                    raise ProtocolError(f"{type(message).__name__} before Hello")
                session.work = self._handlers[type(message)](session, message)
            session.advance()
        except KvbmError as error:
            log.warning("session %d refused: %s", session.number, error)
            session.refuse(str(error))
            self.refused_count += 1
        except Exception as error:
            # A defect of ours must cost one session, never the cache of all the others.
            record_swallowed(error)
            log.exception("session %d failed and is closed", session.number)
            session.fail()
        return True

    def _catch_up(self, spaces: list[Space], until_s: float, answered: bool) -> bool:
        """Do what can wait (`Space.catch_up`): when no client does, and at the latest in every `ANSWERS_FIRST`th turn.

        Whether there was something. The spaces take turns.
        """
        self._turns_untold += 1
        if (answered or self._clock() >= until_s) and self._turns_untold < ANSWERS_FIRST:
            return False
        self._turns_untold = 0
        told = False
        for _ in range(len(spaces)):
            self._told_last += 1
            space = spaces[self._told_last % len(spaces)]
            while space.catch_up():
                told = True
                if self._clock() >= until_s:
                    return True
        return told

    def _end_failed(self, spaces: list[Space]) -> None:
        """Say to the engines of spaces that failed just now that their tiers are gone."""
        failed = [space for space in spaces if space.failure and space not in self._failed]
        if failed:
            self._failed += failed
            for space in failed:
                self._ignore_tier(space)
            self.membership.announce_tiers()

    def _update_sessions(self) -> None:
        """End the sessions that closed, also those that closed by that; select for writing where bytes are queued.

        The messages that a client sent before it went are handled first.
        """
        while ended := [
            s
            for s in self.sessions.values()
            if (s.ended_by_peer or (s.closed and not s.lingering)) and not s.waiting
        ]:
            for session in ended:
                self._end(session)
        for session in self.sessions.values():
            if not session.closed:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if session.wants_to_write else 0)
                if self._selector.get_key(session.connection).events != events:
                    self._selector.modify(session.connection, events, session)

    def _end(self, session: Session) -> None:
        """Serve a session no more. Forget it, unless it may write to memory until its other end closes."""
        if not session.lingering:
            self._requests.dropped(self.membership.gone(session))
        if session.writes and not session.ended_by_peer:
            session.linger()
            self._selector.modify(session.connection, selectors.EVENT_READ, session)
            return
        self.membership.ended(session)
        self._selector.unregister(session.connection)
        del self.sessions[session.number]
        self._readable.pop(session.number, None)
        self._parked.pop(session.number, None)
        session.close()

    def _tick(self) -> None:
        self._door.open_again()
        self._pins.expire()
        self._requests.dropped(self.membership.expire())
        for _, space in self.spaces:
            space.below.tick()
        if self._lending is not None:
            self._lending.turn()
        self.membership.announce_tiers()
        self.membership.name_missing()
        self._publish()
        if self.membership.awaited:
            self.last_busy_s = self._clock()
        self.traffic.tick([engine.name for engine in self.membership])
        self._snapshots.tick()

    def _event_stream(self, publisher: Publisher) -> EventStream:
        stream = EventStream(publisher, lambda: self.spaces, self._clock)
        self.watch_descriptor(publisher.fileno(), stream.woken)
        return stream

    def _publish(self) -> None:
        """Bring the gauges up to date."""
        publish_gauges(self.spaces.named(), self.traffic.metrics)
        roles = [s.hello.role for s in self.sessions.values() if s.hello and not s.closed]
        self.traffic.publish(roles, len(self.membership))

    # ---- messages about the manager itself

    def _hello(self, session: Session, message: Hello) -> Iterator[object]:
        space = yield from self.membership.admit(session, message)
        if space is not None:
            self._watch_tier(space)

    def _reset(self, session: Session, message: Reset) -> Iterator[None]:
        engine = self.membership.of(session)
        if engine is None:
            spaces = [space for _, space in self.spaces]
        else:
            # Its keys are other ones from now on; blocks under the old keys may be another engine's.
            spaces = [] if self.membership.shared(engine) else [engine.space]
        on_disk = spaces if message.tier in ("", Tier.DISK.name.lower()) else []
        for space in on_disk:
            while space.indexing and space.catch_up():
                yield
        spaces = self._served(spaces)  # some may have been dropped meanwhile
        results = [space.begin_clear(message.tier) for space in spaces]
        for space in on_disk:
            while space.clearing and space.catch_up():
                yield
        self._resets.note(
            session, self._served(on_disk), sum(r[0] for r in results), sum(r[1] for r in results)
        )

    def _served(self, spaces: list[Space]) -> list[Space]:
        """Those that have not been dropped."""
        served = [space for _, space in self.spaces]
        return [space for space in spaces if space in served]

    def _announce_tiers(self, session: Session, message: Announce) -> None:
        engine = self.membership.led_by(session)
        if engine is not None:
            account = KeysAccount(engine.space) if message.keys else EventsAccount(engine.space)
            self._announcements.begin(session, account)

    def _follow(self, session: Session, message: Message) -> None:
        self._followers.add(session)

    def _status(self, session: Session, message: Message) -> None:
        described = tuple(
            {"namespace": namespace.short, "model": namespace.model, **space.describe()}
            for namespace, space in self.spaces
        )
        session.send(Status(epoch=self.epoch, spaces=described))

    def _why(self, session: Session, message: WhyQuery) -> None:
        session.send(self._history.reply(message.request, min(message.limit, WHY_MAX)))

    def _announce(self, lease: Lease) -> None:
        self._requests.announce(lease)

    def _drop_unused(self, space: Space) -> None:
        """Give up the memory of a space without engines; and its disk, where no other engine can ask for it."""
        self._ignore_tier(space)
        if space in self._failed:
            self._failed.remove(space)
        self.spaces.drop(space, not self.spaces.namespace_of(space).ephemeral)

    def _ignore_tier(self, space: Space) -> None:
        for fd in space.below.filenos():
            if fd in self._selector.get_map():
                self._selector.unregister(fd)

    def _watch_tier(self, space: Space) -> None:
        if space.failure:
            return
        for fd in space.below.filenos():
            if fd not in self._selector.get_map():
                self.watch_descriptor(fd, lambda: None)

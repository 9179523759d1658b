"""The requests of leaders and workers: one method per message, answered at once, or after some turns of the loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import msgspec

from kvbm.block import GROUP_MAX, KEY_BYTES, BlockKey, Tier
from kvbm.clock import Clock
from kvbm.errors import ProtocolError
from kvbm.framing import TOKEN_BYTES
from kvbm.hashing import split_keys
from kvbm.hints import as_tuples, latest
from kvbm.manager.followers import Followers
from kvbm.manager.hearing import count, decided_here, heard
from kvbm.manager.history import UNAVAILABLE, History
from kvbm.manager.leases import Lease
from kvbm.manager.membership import Membership
from kvbm.manager.session import Session
from kvbm.manager.slot_facts import SlotFact, note_facts
from kvbm.manager.space import Space
from kvbm.manager.traffic import Traffic
from kvbm.observe import moves_log
from kvbm.protocol import (
    KEYS_PER_MESSAGE_MAX,
    REFUSED,
    Commit,
    CopiesHang,
    FenceDone,
    Finished,
    Lookup,
    LookupReply,
    Progress,
    RankReport,
    Release,
    Report,
    Reserve,
    ReserveReply,
    Says,
    Shorten,
    Watch,
)

log = logging.getLogger("kvbm.manager")

OUTPUT_TOKENS_MAX = 1 << 31
RESERVED_AT_ONCE = 512
SPLIT_AT_ONCE = 8192
DROPPED_AT_ONCE = 64


class Requests:
    """Handlers of the messages of formed engines. Owned by the manager's thread.

    `session_by_number` finds the session that a notification goes to, or None when it has gone.
    """

    def __init__(
        self,
        membership: Membership,
        traffic: Traffic,
        followers: Followers,
        history: History,
        session_by_number: Callable[[int], Session | None],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._membership = membership
        self._traffic = traffic
        self._followers = followers
        self._history = history
        self._session_by_number = session_by_number
        self._watchers: dict[tuple[int, int], set[int]] = {}
        # Lookups under way: their replies tell how far they are.
        self._unanswered: set[tuple[int, int]] = set()
        # Lookups whose leases have ended, and the sessions that watched them, which have yet to be told.
        self._dropped: deque[tuple[int, set[int]]] = deque()

    @property
    def watched_count(self) -> int:
        """Lookups that workers watch: no more than there are leases with blocks under way."""
        return len(self._watchers)

    @property
    def handlers(self) -> dict[type, Callable[[Session, Any], Iterator[None] | None]]:
        """Each takes the message of its type."""
        return {
            Lookup: self.lookup,
            Says: self.says,
            Release: self.release,
            Shorten: self.shorten,
            Reserve: self.reserve,
            Commit: self.commit,
            Watch: self.watch,
            FenceDone: self.fence_done,
            CopiesHang: self.copies_hang,
            Finished: self.finished,
            Report: self.report,
        }

    def lookup(self, session: Session, message: Lookup) -> Iterator[None]:
        """Find and lease the longest run; bring up its blocks that are on disk, a part of them in a turn."""
        keys = yield from _split_keys(message.keys)
        if not 0 <= message.skip <= len(keys):
            raise ProtocolError(f"lookup skip={message.skip} cannot be served: 0 to {len(keys)}")
        engine = self._membership.led_by(session)
        if engine is None:
            session.send(LookupReply(lookup=message.lookup))
            self._history.unavailable(session.number, message)
            self._traffic.missed(UNAVAILABLE)
            return
        space, name, asker = engine.space, (session.number, message.lookup), heard(message)
        self._unanswered.add(name)
        try:
            lease, no_room, refused, full, judged = yield from space.looking_up(
                session.number, message.lookup, keys, message.skip, asker
            )
            if len(keys) > SPLIT_AT_ONCE:
                yield
            reached = message.skip + len(space.prompt_sources(lease)) + no_room + refused
            decided = yield from space.heard(asker, keys, max(reached, full), message.again)
            generations = (yield from _generations(space, lease)) if lease is not None else ()
        finally:
            self._unanswered.discard(name)
        if self._membership.led_by(session) is not engine:  # it lost a rank meanwhile
            self._end_lease(space, session, message.lookup)
            lease = None
        if lease is not None and (lease.expired or not space.leases.lasts(lease)):  # its deadline has passed
            lease = None
        self._followers.asked(space, message.keys)
        told = decided_here(asker.verdicts, judged, decided)
        verdicts = latest(asker.verdicts, told)
        if message.again:
            self._traffic.tried_again("lookup")
        else:  # it is the same request's
            count(verdicts, self._traffic.metrics)
        found = bytes(lease.sources) if lease is not None else b""
        counted, asked = space.prompt_sources(lease), len(keys) - message.skip
        moves_log.matched(
            counted.count(Tier.HOST), len(counted) - counted.count(Tier.HOST), asked, message.request
        )
        self._traffic.looked_up(engine.name, asked, counted)
        self._traffic.asked(engine.label, space.layout, asked, counted)
        why = self._history.looked_up(session.number, message, keys, space, counted, no_room + refused, full)
        self._traffic.missed(why)
        self._history.heard(session.number, message.lookup, verdicts)
        reply = LookupReply(
            lookup=message.lookup, no_room=no_room, refused=refused, full=full, verdicts=as_tuples(told)
        )
        session.send(reply if lease is None else _with_lease(reply, space, lease, found, generations))

    def says(self, session: Session, message: Says) -> Iterator[None]:
        """Do what a client says later of a chain that was looked up before."""
        keys = yield from _split_keys(message.keys)
        engine, asker = self._membership.led_by(session), heard(message)
        if engine is not None:
            judged = yield from engine.space.judged(keys, asker)
            told = decided_here(asker.verdicts, judged, ())
            count(latest(asker.verdicts, told), self._traffic.metrics)

    def release(self, session: Session, message: Release) -> None:
        """End a lease and count the blocks that it brought to the device."""
        engine = self._membership.of(session)
        if engine is None or engine.leader is not session:
            return
        lease = self._end_lease(engine.space, session, message.lookup)
        if lease is not None and message.loaded > 0:
            loaded = bytes(lease.sources[message.first : message.first + message.loaded])
            self._traffic.loaded(
                engine.space.layout, engine.space.counted_sources(loaded), message.seconds, message.prefill_s
            )
        if message.failed > 0:
            self._traffic.failed_load(engine.label, _failed_where(engine.space, lease, message))
        begun = max(0, message.loaded) + max(0, message.failed)
        self._traffic.matched(engine.space.layout, _of_prompt(lease, begun))
        self._traffic.unloaded(message.unloaded)
        self._traffic.waited(engine.label, message.answer_s, message.wait_s)
        self._history.released(session.number, message, _of_prompt(lease, max(0, message.loaded)))

    def shorten(self, session: Session, message: Shorten) -> None:
        """The leader can use no more than the first blocks of a lease."""
        engine = self._membership.of(session)
        if engine is not None and engine.leader is session and message.blocks >= 0:
            engine.space.shorten(session.number, message.lookup, message.blocks)

    def reserve(self, session: Session, message: Reserve) -> Iterator[None]:
        """Slots for blocks that are not held yet; so many at once that other sessions need not wait for long."""
        blocks, parents = _count_keys(message.keys), _keys(message.parent)
        hashes, group, groups = message.hashes, message.group, message.groups
        if len(hashes) not in (0, len(message.keys)):
            raise ProtocolError(
                f"reserve hashes of {len(hashes)} bytes cannot be served: none, or {len(message.keys)}"
            )
        if not 0 <= group <= GROUP_MAX:
            raise ProtocolError(f"reserve group={group} cannot be served: 0 to {GROUP_MAX}")
        if len(groups) not in (0, blocks):
            raise ProtocolError(f"reserve groups of {len(groups)} bytes cannot be served: none, or {blocks}")
        _check_facts(message, blocks)
        if message.again:
            self._traffic.tried_again("store")
        slots, generations = list[int](), list[int]()
        parent = parents[-1] if parents else None
        for start in range(0, blocks, RESERVED_AT_ONCE):
            if start:
                yield
            engine = self._membership.led_by(session)  # it may have lost a rank meanwhile
            if engine is None or slots[-1:] == [REFUSED]:
                rest = blocks - start
                slots += [REFUSED] * rest
                if engine is not None:
                    self._traffic.metrics.add("kvbm_skipped_offloads_total", rest, reason="full")
                break
            end = start + RESERVED_AT_ONCE
            part, names = _part(message.keys, start, end), hashes[start * KEY_BYTES : end * KEY_BYTES]
            kinds = groups[start:end] or group
            given = engine.space.reserve(
                session.number, message.store, parent, part, names, kinds, start > 0, message.tenant
            )
            if message.tokens:
                told = _facts(message, blocks, start, part)
                note_facts(engine.space.facts, engine.space.host_pool, part, given, told)
            slots += given
            generations += engine.space.arena.generations([slot for slot in given if slot >= 0])
            parent = part[-1]
        if blocks > SPLIT_AT_ONCE:
            yield  # the reply takes as long as a part
        if self._membership.led_by(session) is None:
            # What was reserved by then ends with the session, or at its deadline.
            slots, generations = [REFUSED] * blocks, []
        session.send(ReserveReply(store=message.store, slots=tuple(slots), generations=tuple(generations)))

    def commit(self, session: Session, message: Commit) -> Iterator[None]:
        """All ranks wrote their slots: the blocks can be found from now on."""
        engine = self._membership.of(session)
        if engine is not None and engine.leader is session:
            stored = yield from engine.space.committing(session.number, message.store, message.failed)
            self._traffic.stored(engine.space.layout, stored, message.seconds)
            self._traffic.reserved(engine.label, message.answer_s)

    def finished(self, session: Session, message: Finished) -> None:
        """A request ended; the policies learn how much it generated."""
        keys = _keys(message.key)
        engine = self._membership.led_by(session)
        if engine is not None and len(keys) == 1 and 0 <= message.output_tokens < OUTPUT_TOKENS_MAX:
            engine.space.finished(keys[0], message.output_tokens)
            self._followers.ended(engine.space, keys[0], message.output_tokens)

    def watch(self, session: Session, message: Watch) -> None:
        """A worker follows a lookup's progress."""
        engine, lease = self._membership.of(session), None
        if engine is not None and engine.leader is not None:
            lease = engine.space.leases.get(engine.leader.number, message.lookup)
        if lease is None or lease.expired:
            session.send(Progress(lookup=message.lookup, ready=0, final=True))
            return
        if not lease.final:
            self._watchers.setdefault((lease.owner, lease.number), set()).add(session.number)
        session.send(Progress(lookup=message.lookup, ready=lease.ready, final=lease.final))

    def report(self, session: Session, message: Report) -> None:
        """A worker tells the leader of its engine what it has copied; its rank is the one that it attached with."""
        engine, hello = self._membership.of(session), session.hello
        if engine is None or hello is None or engine.workers.get(hello.rank) is not session:
            return
        if engine.leader is not None:
            engine.leader.send(RankReport(rank=hello.rank, stored=message.stored, loaded=message.loaded))

    def fence_done(self, session: Session, message: FenceDone) -> None:
        """A worker is past a fence."""
        self._membership.fences.answered(message.fence, session)

    def copies_hang(self, session: Session, message: CopiesHang) -> None:
        """A worker may write into slots until its process ends: its session ends now, and lingers."""
        log.warning(
            "session %d ends: copies of this rank hang, and slots that it writes stay reserved until its engine has "
            "ended. Restart the engine",
            session.number,
        )
        session.fail()

    def announce(self, lease: Lease) -> None:
        """A lease's blocks arrived or failed: notify its leader and the workers that watch it."""
        if (lease.owner, lease.number) in self._unanswered:
            return
        at_s = self._clock() if lease.final and lease.ready else 0.0
        progress = Progress(lookup=lease.number, ready=lease.ready, final=lease.final, at_s=at_s)
        for number in (lease.owner, *self._watchers.get((lease.owner, lease.number), ())):
            session = self._session_by_number(number)
            if session is not None:
                session.send(progress)
        if lease.final:
            self._watchers.pop((lease.owner, lease.number), None)

    def _end_lease(self, space: Space, session: Session, lookup: int) -> Lease | None:
        """End a lease of the session; None where it had ended already."""
        lease = space.release(session.number, lookup)
        if lease is not None:
            self.dropped([lease])
        return lease

    def dropped(self, leases: list[Lease]) -> None:
        """Leases ended by their owner, with it, or by their deadline: workers that watch them are told that no more
        blocks come (`tell_dropped`)."""
        names = [(lease.owner, lease.number) for lease in leases]
        self._dropped.extend((name[1], self._watchers.pop(name)) for name in names if name in self._watchers)
        self.tell_dropped()

    def tell_dropped(self) -> bool:
        """Tell the workers that watched some of the leases. Whether others are left."""
        for _ in range(min(DROPPED_AT_ONCE, len(self._dropped))):
            lookup, numbers = self._dropped.popleft()
            for number in numbers:
                if (session := self._session_by_number(number)) is not None:
                    session.send(Progress(lookup=lookup, ready=0, final=True))
        return bool(self._dropped)


def _generations(space: Space, lease: Lease) -> Generator[None, None, tuple[int, ...]]:
    """The generations of a lease's slots, in several turns; they are of use while it lasts."""
    found: tuple[int, ...] = ()
    while space.leases.lasts(lease) and len(found) < len(lease.slots):
        found += space.arena.generations(lease.slots[len(found) : len(found) + SPLIT_AT_ONCE])
        if len(found) < len(lease.slots):
            yield
    return found


def _with_lease(
    reply: LookupReply, space: Space, lease: Lease, sources: bytes, generations: tuple[int, ...]
) -> LookupReply:
    return msgspec.structs.replace(
        reply,
        slots=tuple(lease.slots),
        generations=generations[: len(lease.slots)],
        ready=lease.ready,
        sources=sources,
        arrival_s=space.arrival_s(lease),
        boundary=lease.boundary,
    )


def _failed_where(space: Space, lease: Lease | None, message: Release) -> bytes:
    """The tiers in which the promised blocks had been found that did not reach the device, a byte each.

    Blocks that a lease no longer names are of a tier below: a run is only cut where that did not give a block. Of a
    lease that ended before its load nothing is known, and its blocks count as host memory's, where that is a tier.
    """
    first = message.first + max(0, message.loaded)
    found = bytes(lease.sources[first : first + message.failed]) if lease is not None else b""
    below = Tier.DISK if space.disk is not None else Tier.REMOTE
    nameless = bytes((below if lease is not None else Tier.HOST,))
    return space.counted_sources(found + nameless * (message.failed - len(found)))


def _of_prompt(lease: Lease | None, blocks: int) -> int:
    """How many blocks of the prompt a load stands for: with several groups all of the run's, or none."""
    if lease is None or not lease.boundary:
        return blocks
    return lease.prompt_blocks if blocks >= len(lease.slots) > 0 else 0


def _count_keys(joined: bytes) -> int:
    """How many keys these are. Raises ProtocolError."""
    blocks, rest = divmod(len(joined), KEY_BYTES)
    if rest:
        raise ProtocolError(f"keys of {len(joined)} bytes cannot be served: a multiple of {KEY_BYTES}")
    if blocks > KEYS_PER_MESSAGE_MAX:
        raise ProtocolError(f"{blocks} keys cannot be served in one message: at most {KEYS_PER_MESSAGE_MAX}")
    return blocks


def _part(joined: bytes, start: int, end: int) -> list[BlockKey]:
    """The keys from number `start` up to `end`."""
    return split_keys(joined[start * KEY_BYTES : end * KEY_BYTES])


def _keys(joined: bytes) -> list[BlockKey]:
    """The few keys of a message. Raises ProtocolError."""
    return _part(joined, 0, _count_keys(joined))


def _split_keys(joined: bytes) -> Generator[None, None, list[BlockKey]]:
    """The many keys of a message, in several turns. Raises ProtocolError."""
    keys = _part(joined, 0, min(_count_keys(joined), SPLIT_AT_ONCE))
    while len(keys) * KEY_BYTES < len(joined):
        yield
        keys += _part(joined, len(keys), len(keys) + SPLIT_AT_ONCE)
    return keys


def _check_facts(message: Reserve, blocks: int) -> None:
    """Raise ProtocolError for what cannot be said of so many blocks."""
    if not message.tokens:
        return
    each, rest = divmod(len(message.tokens), blocks) if blocks else (0, 1)
    if rest or each % TOKEN_BYTES or len(message.before or message.parent) not in (0, KEY_BYTES):
        raise ProtocolError(
            f"reserve tokens of {len(message.tokens)} bytes for {blocks} blocks cannot be served: as many for each"
        )
    if len(message.facts) not in (0, blocks):
        raise ProtocolError(
            f"reserve facts of {len(message.facts)} blocks cannot be served: none, or {blocks}"
        )


def _facts(message: Reserve, blocks: int, start: int, part: list[BlockKey]) -> list[SlotFact]:
    """What is said of a part of the blocks, from number `start` on."""
    each, end = len(message.tokens) // blocks, start + len(part)
    hashes = _part(message.hashes, start, end) if message.hashes else part
    before = message.before or message.parent
    if start:
        before = (message.hashes or message.keys)[(start - 1) * KEY_BYTES : start * KEY_BYTES]
    facts = message.facts[start:end] or (b"",) * len(part)
    tokens = (message.tokens[i * each : (i + 1) * each] for i in range(start, end))
    return [SlotFact(*fact) for fact in zip(hashes, (before, *hashes), tokens, facts, strict=False)]

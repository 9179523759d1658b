"""What a space does about the sessions that clients name: it brings blocks up before they are asked for, and lets them
go.

What is said counts from when it can: `prefetch`, and of a session that ends its `parent`, when the request is looked
up, since bytes need the time that it is computed; `expect_s` and `demote` from its end. Whatever cannot be done is
answered with a verdict.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from operator import itemgetter

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.clock import Clock
from kvbm.grouping import Grouping, in_group
from kvbm.groups import Group
from kvbm.hashing import join_keys, split_keys
from kvbm.hints import ClientHint, Hint, Outcome, Verdict, Why
from kvbm.manager.letting_go import LettingGo
from kvbm.manager.prefetching import Cause, Prefetching, Tiers
from kvbm.manager.sessions import KnownSession, KnownSessions
from kvbm.observe.metrics import Metrics

EARLY_SHARE = 0.5
"""A session that is expected back has its blocks in host memory after this share of the time that it was to stay away:
clients are wrong by a factor of two."""
EARLY_S_MAX = 120.0
"""But no earlier than this before it is expected: blocks that wait for longer take the place of others."""
LAST_LOOK_S = 1.0
"""Blocks that were evicted meanwhile are brought up again this long before the session is expected."""

NO_TIER = "host memory keeps no blocks of a disk here"
NO_SESSION = "no session is named"
UNKNOWN_PARENT = "no such session is known"

Decided = tuple[Verdict, ...]


class Foresight:
    """The sessions of one space. Owned by the manager's thread. Without a disk below host memory there is nothing that
    could be brought up, and no session is kept: `on` is False."""

    def __init__(
        self, tiers: Tiers, groups: Sequence[Group], on: bool, metrics: Metrics, clock: Clock
    ) -> None:
        self._tiers = tiers
        self._clock = clock
        self.on = on
        self._grouping = Grouping(groups) if groups else None
        self.sessions = KnownSessions()
        self.prefetching = Prefetching(tiers, metrics, clock)
        self._letting_go = LettingGo(clock)

    def heard(
        self, asker: ClientHint, keys: Sequence[BlockKey], reached: int, again: bool = False
    ) -> Generator[None, None, Decided]:
        """A request came for this chain, of which the first `reached` blocks were held. Verdicts on those parts of its
        hint that are not done as they were said; of the others there is none. `again`: it is not its first lookup."""
        hint = asker.hint
        if not self.on:
            return _without_tier(hint)
        self.prefetching.asked(keys)
        named = self.sessions.get(asker.tenant, hint.session) if hint.session is not None else None
        known = _beyond(named, keys) if named is not None and hint.prefetch else b""
        if named is not None and not again:
            self.prefetching.cancel(named)
            self._letting_go.cancel(named)
        session = self.sessions.asked(asker.tenant, hint, keys, reached)
        if again:
            return ()
        verdicts = list[Verdict]()
        if hint.session is not None and session is None:
            why = (Why.BUDGET, "it has too many blocks") if keys else (Why.NOTHING, "it has no whole block")
            verdicts.append(_rejected("session", *why))
        if hint.demote and session is None:
            verdicts.append(_rejected("demote", Why.NOTHING, "no session is known of which it could be"))
        parent = self.sessions.get(asker.tenant, hint.parent) if hint.parent is not None else None
        if hint.prefetch:
            verdicts += yield from self._prefetch(named, known, parent)
        if hint.parent is not None:
            verdicts += yield from self._of_parent(hint, parent)
        return tuple(verdicts)

    def stored(self, parent: BlockKey | None, keys: Sequence[BlockKey], group: int | bytes) -> None:
        """These blocks, behind `parent`, are being stored: what was generated is asked for when the session goes on."""
        if not self.sessions.count or not keys:
            return
        if self._grouping is not None:
            number = self._grouping.plain_group
            if number is None:
                return  # a block of the prompt is several; its next request will name them
            if isinstance(group, bytes):
                keys = [key for key, its in zip(keys, group, strict=False) if its == number]
            elif group != number:
                return
            if number:
                keys = split_keys(in_group(join_keys(keys), number))
                parent = BlockKey(in_group(parent, number)) if parent is not None else None
        self.sessions.continued(parent, keys, self._clock())

    def finished(self, key: BlockKey) -> None:
        """The request whose prompt ended with this key has ended."""
        if not self.sessions.count:
            return
        now_s = self._clock()
        session = self.sessions.finished(key, now_s)
        if session is None:
            return
        hint = session.hint
        if hint.demote:
            self._letting_go.begin(session, self._own(session))
        if hint.final:
            self.prefetching.cancel(session)
            self.sessions.drop(session)
        elif hint.expect_s is not None:
            session.due_s = now_s + hint.expect_s
            early_s = max(hint.expect_s * EARLY_SHARE, hint.expect_s - EARLY_S_MAX)
            self.sessions.look(session, max(now_s, now_s + early_s - self._read_s(session)))

    def advance(self) -> bool:
        """Begin what it is time for. Whether it is to be called again at once."""
        if not self.on:
            return False
        now_s = self._clock()
        while (session := self.sessions.next_look(now_s)) is not None:
            self.prefetching.later(session, Cause.EXPECTED)
            last_s = session.due_s - self._read_s(session) - LAST_LOOK_S
            if last_s > now_s + LAST_LOOK_S:
                self.sessions.look(session, last_s)
        again = self._letting_go.advance(self._tiers.host_pool, self._tiers.disk)
        return self.prefetching.advance() or again

    # ---- inside

    def _prefetch(
        self, named: KnownSession | None, known: bytes, parent: KnownSession | None
    ) -> Generator[None, None, list[Verdict]]:
        """Bring up what was `known` of the session before, or of its parent where it is new."""
        if named is not None:
            if not known:
                text = "the request itself asks for all that is known of its session"
                return [_rejected("prefetch", Why.NOTHING, text)]
            return (yield from self._bring_up("prefetch", named, split_keys(known), Cause.SESSION))
        if parent is None:
            return [_rejected("prefetch", Why.NOTHING, "nothing is known of the session")]
        return (yield from self._bring_up("prefetch", parent, parent.keys(), Cause.SESSION))

    def _of_parent(self, hint: Hint, parent: KnownSession | None) -> Generator[None, None, list[Verdict]]:
        if hint.session is None and not hint.prefetch:
            return [_rejected("parent", Why.NOTHING, NO_SESSION)]
        if hint.parent == hint.session:
            return [_rejected("parent", Why.NOTHING, "it is the session itself")]
        if not hint.final:
            return []
        if parent is None:
            return [_rejected("parent", Why.NOTHING, UNKNOWN_PARENT)]
        if parent.running or hint.prefetch:
            return []  # it has what it needs
        return (yield from self._bring_up("parent", parent, parent.keys(), Cause.PARENT))

    def _bring_up(
        self, part: str, session: KnownSession, keys: list[BlockKey], cause: Cause
    ) -> Generator[None, None, list[Verdict]]:
        needed = yield from self.prefetching.needed(keys)
        if not session.known:
            return []
        allowed = self.prefetching.begin(needed, cause, session)
        if allowed == needed.below:
            return []
        text = f"{allowed} of {needed.below} blocks: what may be brought up unasked is used up"
        return [Verdict(part, Outcome.CLIPPED if allowed else Outcome.REJECTED, text, Why.BUDGET)]

    def _own(self, session: KnownSession) -> bytes:
        """The keys of the blocks that only this session asked for, joined."""
        if self._grouping is None:
            return bytes(session.chain[session.own_from * KEY_BYTES :])
        keys, grouping = session.keys(), self._grouping
        start, end = -(-session.own_from // grouping.step) * grouping.step, grouping.floor(len(keys))
        return join_keys(grouping.keys(keys, grouping.run(end, start))) if start < end else b""

    def _read_s(self, session: KnownSession) -> float:
        return self._tiers.below.read_s(len(session))


def _beyond(session: KnownSession, keys: Sequence[BlockKey]) -> bytes:
    """The chain of a session, joined; empty where a request for these keys asks for all of it."""
    return b"" if session.common(join_keys(keys)) == len(session) else bytes(session.chain)


def _rejected(part: str, why: Why, reason: str) -> Verdict:
    return Verdict(part, Outcome.REJECTED, reason, why)


def _without_tier(hint: Hint) -> Decided:
    said = [("prefetch", hint.prefetch), ("demote", hint.demote), ("parent", hint.final and hint.parent)]
    return tuple(
        _rejected(part, Why.NOTHING, NO_TIER) for part in map(itemgetter(0), filter(itemgetter(1), said))
    )

"""Tells leaders what the tiers hold, so that their engines can announce it to routers.

A leader that asked (`protocol.Announce`) is told of all that the tiers of its namespace hold, then of what comes and
goes; some at a time, and nothing while it reads more slowly than that. What it is to be told waits as marks of slots,
so that a slow reader costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvbm.block import KEY_BYTES
from kvbm.manager.session import Session
from kvbm.manager.slot_facts import SlotFacts, TierListener
from kvbm.manager.space import Space
from kvbm.protocol import RemovedBlocks, StoredRun, TierEvents

TOLD_AT_ONCE = 256
"""Stored blocks of a tier in one message; a turn sends each leader one."""
REMOVED_AT_ONCE = 4096
"""Removed ones, of which there is only a hash to tell."""


class Announcements:
    """The leaders that asked. Owned by the manager's thread."""

    def __init__(self, session_by_number: Callable[[int], Session | None]) -> None:
        self._session_by_number = session_by_number
        self._listeners: dict[int, list[TierListener]] = {}
        self._told_all: set[int] = set()

    def begin(self, session: Session, tiers: Iterable[SlotFacts]) -> None:
        """Tell this leader of what these tiers hold, from the start."""
        self.end(session.number)
        self._listeners[session.number] = [facts.listen() for facts in tiers]

    def end(self, number: int) -> None:
        """The session has ended."""
        for listener in self._listeners.pop(number, ()):
            listener.facts.ignore(listener)
        self._told_all.discard(number)

    def tell(self) -> bool:
        """Send what there is to tell; whether something is left that a reader could take now."""
        left = False
        for number, listeners in list(self._listeners.items()):
            session = self._session_by_number(number)
            if session is None or session.closed:
                self.end(number)
            elif not session.wants_to_write:
                left = self._tell(session, listeners) or left
        return left

    def _tell(self, session: Session, listeners: list[TierListener]) -> bool:
        complete = all(listener.complete for listener in listeners)
        if complete and session.number in self._told_all:
            return False
        removed, stored = next_events(listeners)
        complete = all(listener.complete for listener in listeners)
        first = complete and session.number not in self._told_all
        if complete:
            self._told_all.add(session.number)
        if removed or stored or first:
            session.send(TierEvents(removed=removed, stored=stored, complete=first))
        return not complete


def told_tiers(space: Space) -> list[SlotFacts]:
    """The tiers of a space whose blocks are told of: those in which blocks can be found."""
    if space.failure:
        return []
    tiers = [] if space.options.staging else [space.facts]
    return tiers + ([space.disk.facts] if space.disk is not None else [])


def next_events(
    listeners: Iterable[TierListener],
) -> tuple[tuple[RemovedBlocks, ...], tuple[StoredRun, ...]]:
    """What there is to tell next, bounded: what has gone, then what has come."""
    removed, stored = list[RemovedBlocks](), list[StoredRun]()
    for listener in listeners:
        if gone := listener.take_removed(REMOVED_AT_ONCE):
            removed.append(RemovedBlocks(listener.facts.tier, b"".join(gone)))
        stored += _runs(listener)
    return tuple(removed), tuple(stored)


def _runs(listener: TierListener) -> Iterator[StoredRun]:
    """The next blocks to tell of, those that follow one another in a chain together."""
    hashes, before, tokens, facts = list[bytes](), b"", list[bytes](), list[bytes]()
    tier = listener.facts.tier
    for fact in listener.take_stored(TOLD_AT_ONCE):
        if hashes and fact.before != hashes[-1]:
            yield _run(tier, hashes, before, tokens, facts)
            hashes, tokens, facts = [], [], []
        if not hashes:
            before = fact.before
        hashes.append(fact.engine_hash)
        tokens.append(fact.tokens)
        facts.append(fact.facts)
    if hashes:
        yield _run(tier, hashes, before, tokens, facts)


def _run(tier: int, hashes: list[bytes], before: bytes, tokens: list[bytes], facts: list[bytes]) -> StoredRun:
    assert all(len(each) == KEY_BYTES for each in hashes)
    return StoredRun(tier, b"".join(hashes), before, b"".join(tokens), tuple(facts) if any(facts) else ())

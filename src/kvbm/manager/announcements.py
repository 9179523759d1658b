"""Tells leaders what the tiers hold: what their engines can announce to routers, or the keys alone, for a mirror.

A leader that asked (`protocol.Announce`) is told of all that the tiers of its namespace hold, then of what comes and
goes; some at a time, and nothing while it reads more slowly than that. What it is to be told waits as marks of slots,
so that a slow reader costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from kvbm.block import KEY_BYTES
from kvbm.framing import TOKEN_BYTES, announced_keys_max
from kvbm.hashing import join_keys
from kvbm.manager.held_keys import KeyListener
from kvbm.manager.session import Session
from kvbm.manager.slot_facts import SlotFacts, TierListener
from kvbm.manager.space import Space
from kvbm.protocol import (
    HeldBlocks,
    Message,
    RemovedBlocks,
    StoredRun,
    TierEvents,
)

TOLD_AT_ONCE = 256
"""Stored blocks of a tier in one message; a turn sends each leader one."""
TIERS_MAX = 8
"""So many tiers fit into one message, however large their blocks are."""
REMOVED_AT_ONCE = 4096
"""Removed ones, of which there is only a hash to tell."""
KEYS_AT_ONCE = 4096
"""Blocks of a tier in one message of a mirror."""


class Account(Protocol):
    """What one leader has yet to be told of the tiers."""

    @property
    def complete(self) -> bool:
        """All has been told."""

    @property
    def idle(self) -> bool:
        """There is nothing to tell now: all has been told, or what is left is being read."""

    def next(self, told_all: bool) -> Message | None:
        """What there is to tell next, bounded; `told_all`: this leader was once told all."""

    def end(self) -> None:
        """It listens no more."""


class Announcements:
    """The leaders that asked. Owned by the manager's thread."""

    def __init__(self, session_by_number: Callable[[int], Session | None]) -> None:
        self._session_by_number = session_by_number
        self._accounts: dict[tuple[int, type[Account]], Account] = {}
        self._told_all: set[tuple[int, type[Account]]] = set()

    def begin(self, session: Session, account: Account) -> None:
        """Tell this leader of what the account's tiers hold, from the start. It may have one of each kind."""
        name = session.number, type(account)
        self._end(name)
        self._accounts[name] = account

    def tell(self) -> bool:
        """Send what there is to tell; whether something is left that a reader could take now."""
        left = False
        for name, account in list(self._accounts.items()):
            session = self._session_by_number(name[0])
            if session is None or session.closed:
                self._end(name)
            elif not session.wants_to_write:
                left = self._tell(session, name, account) or left
        return left

    def _tell(self, session: Session, name: tuple[int, type[Account]], account: Account) -> bool:
        if account.complete and name in self._told_all:
            return False
        message = account.next(name in self._told_all)
        if account.complete:
            self._told_all.add(name)
        if message is not None:
            session.send(message)
        return not account.idle

    def _end(self, name: tuple[int, type[Account]]) -> None:
        account = self._accounts.pop(name, None)
        if account is not None:
            account.end()
        self._told_all.discard(name)


class EventsAccount:
    """What an engine can announce to routers."""

    def __init__(self, space: Space) -> None:
        self._listeners = [facts.listen() for facts in told_tiers(space)]

    @property
    def complete(self) -> bool:
        return all(listener.complete for listener in self._listeners)

    @property
    def idle(self) -> bool:
        return all(listener.idle for listener in self._listeners)

    def next(self, told_all: bool) -> TierEvents | None:
        removed, stored = next_events(self._listeners)
        first = self.complete and not told_all
        return (
            TierEvents(removed=removed, stored=stored, complete=first) if removed or stored or first else None
        )

    def end(self) -> None:
        for listener in self._listeners:
            listener.facts.ignore(listener)


class KeysAccount:
    """The keys of all blocks, for a mirror."""

    def __init__(self, space: Space) -> None:
        held = [] if space.options.staging or space.failure else [space.held]
        if space.disk is not None and not space.failure:
            held.append(space.disk.held)
        self._listeners: list[KeyListener] = [tier.listen() for tier in held]

    @property
    def complete(self) -> bool:
        return all(listener.complete for listener in self._listeners)

    @property
    def idle(self) -> bool:
        return self.complete

    def next(self, told_all: bool) -> HeldBlocks | None:
        removed, stored = dict[int, bytes](), dict[int, bytes]()
        for listener in self._listeners:
            gone, come = listener.take(KEYS_AT_ONCE)
            tier = int(listener.held.tier)
            if gone:
                removed[tier] = join_keys(gone)
            if come:
                stored[tier] = join_keys(come)
        first = self.complete and not told_all
        if not (removed or stored or first):
            return None
        return HeldBlocks(removed=removed, stored=stored, complete=first)

    def end(self) -> None:
        for listener in self._listeners:
            listener.held.ignore(listener)


def told_tiers(space: Space) -> list[SlotFacts]:
    """The tiers of a space whose blocks are told of: those in which blocks can be found."""
    if space.failure:
        return []
    tiers = [] if space.options.staging else [space.facts]
    tiers += [space.disk.facts] if space.disk is not None else []
    return tiers + [remote.facts.slots for remote in space.remotes]


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
    share = announced_keys_max(listener.facts.token_bytes // TOKEN_BYTES) // TIERS_MAX
    for fact in listener.take_stored(min(TOLD_AT_ONCE, share)):
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

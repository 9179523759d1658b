"""What an engine has announced of the tiers, and what is left to announce.

The manager tells of blocks that came and went. An engine's events go to routers that keep an account of them: a block
is announced once when it comes into a tier and once when it leaves, also where the manager was restarted in between
and tells everything anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvbm.block import KEY_BYTES
from kvbm.clock import Clock
from kvbm.hashing import split_keys
from kvbm.leader.link import Link
from kvbm.protocol import Announce, RemovedBlocks, StoredRun, TierEvents

ABSENT_S_MAX = 30.0
"""A manager that is gone for longer may never come back: its blocks are announced as removed."""
UNTAKEN_MAX = 1 << 14
"""Events that the engine leaves untaken; past that everything is announced anew."""

TierEvent = StoredRun | RemovedBlocks


class Announced:
    """The leader's account. Owned by the engine's thread."""

    def __init__(self, link: Link, clock: Clock, on: bool) -> None:
        self._link = link
        self._on = on
        self._clock = clock
        self._told: dict[int, set[bytes]] = {}
        # Announced in an earlier session, or before the engine emptied its device's cache, and not told of since.
        self._earlier: dict[int, set[bytes]] = {}
        self._events: deque[TierEvent] = deque()
        self._repeats = False
        self._absent_since_s = clock()

    @property
    def facts_wanted(self) -> bool:
        """Whether stores go with what may be announced of their blocks: by this engine, or by the manager."""
        return self._on or self._link.wants_facts

    def begin(self) -> None:
        """There is a manager, which may be another one: it is asked for everything."""
        if self._on:
            for tier, told in self._told.items():
                self._earlier.setdefault(tier, set()).update(told)
            self._told = {}
            self._link.send(Announce())

    def again(self) -> None:
        """The engine says that its cache is empty, and routers may take that for all tiers: everything is announced
        once more."""
        self._repeats = True
        untaken, self._events = self._events, deque()
        for event in untaken:
            if isinstance(event, StoredRun):  # it is told again
                self._told.get(event.tier, set()).difference_update(split_keys(event.hashes))
            else:
                self._events.append(event)
        if self._link.ready is not None:
            self.begin()

    def take_in(self, message: TierEvents) -> None:
        """The manager's account of what came and went."""
        for gone in message.removed:
            self._removed(gone.tier, split_keys(gone.hashes))
        for run in message.stored:
            self._stored(run)
        if message.complete:
            for tier, hashes in self._earlier.items():
                self._say_removed(tier, hashes)
            self._earlier, self._repeats = {}, False
        if len(self._events) > UNTAKEN_MAX:
            self._events.clear()
            self.again()

    def take(self) -> list[TierEvent]:
        """What is to be announced now, in order."""
        if self._link.ready is not None:
            self._absent_since_s = self._clock()
        elif self._clock() - self._absent_since_s > ABSENT_S_MAX:
            for accounts in (self._told, self._earlier):
                for tier, hashes in accounts.items():
                    self._say_removed(tier, hashes)
                accounts.clear()
        taken = list(self._events)
        self._events.clear()
        return taken

    def _removed(self, tier: int, hashes: Iterable[bytes]) -> None:
        told = self._told.get(tier, set())
        known = [each for each in hashes if each in told]
        told.difference_update(known)
        self._say_removed(tier, known)

    def _stored(self, run: StoredRun) -> None:
        told, earlier = self._told.setdefault(run.tier, set()), self._earlier.get(run.tier, set())
        hashes = split_keys(run.hashes)
        new = [each not in told and (self._repeats or each not in earlier) for each in hashes]
        told.update(hashes)
        earlier.difference_update(hashes)
        start = 0
        while start < len(new):
            end = start + 1
            while end < len(new) and new[end] == new[start]:
                end += 1
            if new[start]:
                self._events.append(part_of(run, hashes, start, end))
            start = end

    def _say_removed(self, tier: int, hashes: Iterable[bytes]) -> None:
        joined = b"".join(hashes)
        if joined:
            self._events.append(RemovedBlocks(tier, joined))


def part_of(run: StoredRun, hashes: Sequence[bytes], start: int, end: int) -> StoredRun:
    """The blocks of a run from `start` up to `end`."""
    if (start, end) == (0, len(hashes)):
        return run
    each = len(run.tokens) // len(hashes)
    before = hashes[start - 1] if start else run.before
    tokens = run.tokens[start * each : end * each]
    return StoredRun(
        run.tier, run.hashes[start * KEY_BYTES : end * KEY_BYTES], before, tokens, run.facts[start:end]
    )

"""What host memory holds, for the readers on other nodes: one account that all of them share.

A reader is told of all that is held, then of what came and went. What happens is written into a ring of bounded length,
and each reader has its place there; one that falls too far behind is told everything again. So a reader costs a few
numbers, however much is held and however slow it is.

Needs numpy, which takes too long to load to be imported before there is an arena.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvbm.block import KEY_BYTES, BlockState
from kvbm.manager.held_keys import HeldKeys
from kvbm.tiers.peers.wire import PRINT_BYTES, PRINTS_AT_ONCE, Held, joined_prints

RING_MAX = 1 << 16
LOOKED_AT_ONCE = 8192
WALKED_AT_ONCE = 1 << 16
_CAME, _CAME_AS_TAIL, _GONE = range(3)


class _Event(NamedTuple):
    each: int
    kind: int


class SlotNews:
    """The account of one namespace's host memory. Owned by the manager's thread.

    `happened` is called when there is something new. A block whose print is 0, one of 2⁶⁴, is not spoken of.
    """

    def __init__(self, held: HeldKeys, happened: Callable[[], None]) -> None:
        self.held = held
        self._happened = happened
        count = held.slot_count
        # One print and the number of its commit for each slot; 0 where nothing is told.
        self._prints, self._numbers = array("Q", bytes(8 * count)), array("Q", bytes(8 * count))
        self._tails = bytearray(count)
        self._prints_at = np.frombuffer(self._prints, np.uint64)
        self._numbers_at = np.frombuffer(self._numbers, np.uint64)
        self._tails_at = np.frombuffer(self._tails, np.uint8)
        self._ring: list[_Event] = []
        self.event_count = 0
        self.commit_count = count  # those that were there before come before all others
        self.looked_at = 0
        held.follow(self)

    def close(self) -> None:
        """Listen no more."""
        self.held.ignore(self)

    # ---- from the pool

    def committed(self, slots: Sequence[int]) -> None:
        pool = self.held.pool
        assert pool is not None
        for slot in slots:
            each = int.from_bytes(pool.key_of(slot)[:PRINT_BYTES], "little")
            self.commit_count += 1
            tail = pool.is_tail(slot)
            self._prints[slot], self._numbers[slot], self._tails[slot] = each, self.commit_count, tail
            self._write(_Event(each, _CAME_AS_TAIL if tail else _CAME))
        self._happened()

    def emptied(self, slots: Iterable[int]) -> None:
        for slot in slots:
            each = self._prints[slot]
            if each:
                self._prints[slot] = 0
                self._write(_Event(each, _GONE))
        self._happened()

    def again(self) -> None:
        self.looked_at = 0
        self._happened()

    def look(self) -> bool:
        """Take in a part of what was held before. False: nothing was left."""
        pool, first = self.held.pool, self.looked_at
        if pool is None or first >= self.held.slot_count:
            return False
        self.looked_at = min(first + LOOKED_AT_ONCE, self.held.slot_count)
        for slot in range(first, self.looked_at):
            if not self._prints[slot] and pool.state_of(slot) is BlockState.RESIDENT:
                each = int.from_bytes(pool.key_of(slot)[:PRINT_BYTES], "little")
                self._prints[slot], self._numbers[slot] = each, slot + 1
                self._tails[slot] = pool.is_tail(slot)
        return True

    def _write(self, event: _Event) -> None:
        if not event.each:
            return
        if len(self._ring) < RING_MAX:
            self._ring.append(event)
        else:
            self._ring[self.event_count % RING_MAX] = event
        self.event_count += 1

    # ---- to a reader

    def events(self, first: int, end: int) -> list[_Event]:
        """What happened from event number `first` to before `end`, oldest first."""
        return [self._ring[number % RING_MAX] for number in range(first, end)]

    def walked(self, first: int, prints_max: int, after: int) -> tuple[int, bytes, bytes]:
        """What is held in slots from `first` on, committed after number `after`: at most so many prints.

        The slot to go on from, and the prints, of tails apart.
        """
        end = min(first + WALKED_AT_ONCE, self.looked_at)
        told = (self._prints_at[first:end] != 0) & (self._numbers_at[first:end] > np.uint64(after))
        slots = np.flatnonzero(told)[:prints_max] + first
        if len(slots) == prints_max:
            end = int(slots[-1]) + 1
        tails = self._tails_at[slots] != 0
        return end, self._prints_at[slots[~tails]].tobytes(), self._prints_at[slots[tails]].tobytes()


class NewsCursor:
    """How far one reader was told, of whose news at most the newest `known_max` blocks are of use to it."""

    def __init__(self, news: SlotNews, known_max: int) -> None:
        self._known_max = known_max
        self.news = news
        self._restart()

    def _restart(self) -> None:
        self._next, self._slot, self._again, self._said_complete = self.news.event_count, 0, True, False
        self._after = max(0, self.news.commit_count - self._known_max)

    @property
    def _walking(self) -> bool:
        return self._slot < self.news.held.slot_count

    @property
    def something(self) -> bool:
        """Whether `take` has something to tell, as far as it was looked at."""
        news = self.news
        return self._next < news.event_count or self._slot < news.looked_at or self._again

    def take(self) -> Held:
        """What to tell next, bounded. What happened comes before what is found held: so the order is that of time."""
        news = self.news
        if news.event_count - self._next > RING_MAX:
            self._restart()
        again, self._again = self._again, False
        if self._next < news.event_count:
            end = min(self._next + PRINTS_AT_ONCE, news.event_count)
            last = {event.each: event.kind for event in news.events(self._next, end)}
            self._next = end
            gone, came, tails = (
                joined_prints([each for each, kind in last.items() if kind == wanted])
                for wanted in (_GONE, _CAME, _CAME_AS_TAIL)
            )
            return Held(gone=gone, came=came, tails=tails, again=again)
        came = tails = b""
        if self._slot < news.looked_at:
            self._slot, came, tails = news.walked(self._slot, PRINTS_AT_ONCE, self._after)
        complete = not self._walking and not self._said_complete
        self._said_complete = self._said_complete or complete
        return Held(came=came, tails=tails, again=again, complete=complete)


assert KEY_BYTES >= PRINT_BYTES

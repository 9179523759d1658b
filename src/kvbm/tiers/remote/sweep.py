"""Looking through a store for packs that no log told of: a part of them at a time, within a bound of requests. Pure.

A node that is killed between a pack and its note of it leaves a pack that nobody hears of. So every node lists the
packs now and then, all of them where they are few, a share of their directories else, and looks at those that came
since the last time and that it does not know. Times are the store's.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import ceil
from typing import NamedTuple

from kvbm.tiers.remote.packs import PACK_PREFIX

LISTINGS_A_ROUND = 16
"""A round asks for about so many pages of names."""
PAGE_NAMES = 1000
READS_A_ROUND = 64
"""So many unknown packs are read in a round at most, the newest ones."""
SETTLED_SHARE = 10
"""What is younger than one part in this many of the period is left to the logs, and to the next round."""
_DIRECTORIES = 256


class Part(NamedTuple):
    """What to list: packs that were written after `since_s` and not after `until_s` were to be told of by now."""

    prefix: str
    since_s: float
    until_s: float


class Sweep:
    """Whose turn it is. It belongs to one thread."""

    def __init__(self, period_s: float) -> None:
        assert period_s > 0.0
        self._period_s = period_s
        self._settled_s = period_s / SETTLED_SHARE
        self._begun_s: float | None = None
        self._names = 0
        self._next = 0
        # When each directory was listed last.
        self._listed_s = [0.0] * _DIRECTORIES

    def due(self, now_s: float) -> bool:
        """Whether a round is to begin, by our own clock. None is before all packs were listed once."""
        return self._begun_s is not None and now_s - self._begun_s >= self._period_s

    def listed_all(self, names: int, now_s: float, store_now_s: float) -> None:
        """All packs were listed, for another reason: there were so many names."""
        self._begun_s, self._names = now_s, names
        self._listed_s = [store_now_s] * _DIRECTORIES

    def begin(self, now_s: float, store_now_s: float) -> Sequence[Part]:
        """The parts of this round; `end` when they were listed. Where that fails, they are those of the next one."""
        self._begun_s = now_s
        until_s = store_now_s - self._settled_s
        count = self._directories()
        if count == _DIRECTORIES:
            return [Part(PACK_PREFIX, self._since_s(min(self._listed_s)), until_s)]
        numbers = [(self._next + n) % _DIRECTORIES for n in range(count)]
        return [
            Part(f"{PACK_PREFIX}{number:02x}/", self._since_s(self._listed_s[number]), until_s)
            for number in numbers
        ]

    def end(self, parts: Sequence[Part], names: int, cut: Container[Part] = ()) -> None:
        """These parts were listed, and had so many names. Those that were `cut` had more to be read than a round reads:
        their next turn begins where this one began."""
        store_now_s = parts[0].until_s + self._settled_s
        if parts[0].prefix == PACK_PREFIX:
            self._names = names
            if parts[0] not in cut:
                self._listed_s = [store_now_s] * _DIRECTORIES
            return
        self._names = names * _DIRECTORIES // len(parts)
        for part in parts:
            if part not in cut:
                self._listed_s[self._next] = store_now_s
            self._next = (self._next + 1) % _DIRECTORIES

    def _directories(self) -> int:
        """How many directories a round lists."""
        if self._names <= LISTINGS_A_ROUND * PAGE_NAMES:
            return _DIRECTORIES
        return max(1, LISTINGS_A_ROUND // ceil(self._names / (_DIRECTORIES * PAGE_NAMES)))

    def _since_s(self, listed_s: float) -> float:
        """Twice, as a store may date a blob by the beginning of its upload."""
        return listed_s - 2 * self._settled_s

"""Two admission policies: every block may enter the disk tier, or those that pass KVBM's frequency filter."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Sequence

DECAY_INTERVAL_S = 600.0
ENTRIES_MAX = 1_000_000
FREQUENCY_MAX = 1 << 20
ADMIT_FREQUENCY = 2


class AdmitAll:
    """Every block may enter."""

    def offered(self, key: Hashable, now_s: float) -> bool:
        return True

    def offered_all(self, keys: Sequence[Hashable], now_s: float) -> list[bool]:
        return [True] * len(keys)

    def hit(self, key: Hashable, now_s: float) -> None:
        return None

    def hit_all(self, keys: Sequence[Hashable], now_s: float) -> None:
        return None


class DiskFilter:
    """KVBM's disk offload filter, exact: a frequency starts at 1, doubles when seen again, and disk admits from 2.

    Every 600 s each frequency falls by one and zeros are dropped; above a million entries the decay repeats until
    they fit. Frequencies are capped here, unlike the original's.
    """

    def __init__(self, now_s: float = 0.0, entries_max: int = ENTRIES_MAX) -> None:
        assert entries_max > 0
        # A frequency is kept as the number of the decay at which it reaches zero, so that a decay costs no pass
        # over a million entries: it raises `_decays`. `_ending` counts entries by that number, `_soonest` is a heap
        # of its keys; dropped entries leave `_end` when there are many.
        self._end: dict[Hashable, int] = {}
        self._ending: dict[int, int] = {}
        self._soonest: list[int] = []
        self._decays = 0
        self._dropped = 0
        self._decayed_s = now_s
        self._entries_max = entries_max

    def __len__(self) -> int:
        return len(self._end) - self._dropped

    def offered(self, key: Hashable, now_s: float) -> bool:
        """Count the block; True from the second time on."""
        self._count(key, now_s)
        return self._end.get(key, 0) - self._decays >= ADMIT_FREQUENCY

    def hit(self, key: Hashable, now_s: float) -> None:
        """Count the block."""
        self._count(key, now_s)

    def offered_all(self, keys: Sequence[Hashable], now_s: float) -> list[bool]:
        """Count the blocks; True for those that were counted before."""
        if not self._fit(keys):
            return [self.offered(key, now_s) for key in keys]
        self._count_all(keys, now_s)
        admitted_end = self._decays + ADMIT_FREQUENCY
        return [end >= admitted_end for end in map(self._end.__getitem__, keys)]

    def hit_all(self, keys: Sequence[Hashable], now_s: float) -> None:
        """Count the blocks."""
        if self._fit(keys):
            self._count_all(keys, now_s)
            return
        for key in keys:
            self._count(key, now_s)

    def _fit(self, keys: Sequence[Hashable]) -> bool:
        """Whether the keys, each of which stands there once, can be counted without dropping others for room."""
        return len(self) + len(keys) <= self._entries_max and len(set(keys)) == len(keys)

    def _count_all(self, keys: Sequence[Hashable], now_s: float) -> None:
        """`_count` for keys that fit: one step of Python for each frequency among them, not for each key."""
        if not keys:
            return
        self._decay_if_due(now_s)
        before = list(map(self._end.get, keys))
        after: dict[int | None, int] = {}
        for end, blocks in Counter(before).items():
            after[end] = self._raise(end, blocks)
        if any(end != raised for end, raised in after.items()):
            self._end.update(zip(keys, map(after.__getitem__, before), strict=True))

    def _raise(self, end: int | None, blocks: int) -> int:
        """So many blocks whose frequency ends at this decay (None: unknown ones) were seen again. Where it ends now."""
        frequency = (end or 0) - self._decays
        if end is not None and frequency > 0:
            self._ending[end] -= blocks
            frequency = min(frequency * 2, FREQUENCY_MAX)
        else:
            self._dropped -= blocks if end is not None else 0
            frequency = 1
        raised = frequency + self._decays
        if raised not in self._ending:
            self._ending[raised] = 0
            heapq.heappush(self._soonest, raised)
        self._ending[raised] += blocks
        return raised

    def _decay_if_due(self, now_s: float) -> None:
        due = int((now_s - self._decayed_s) // DECAY_INTERVAL_S)
        if due > 0:
            self._decayed_s += due * DECAY_INTERVAL_S
            self._decay(self._decays + due)

    def _count(self, key: Hashable, now_s: float) -> None:
        self._decay_if_due(now_s)
        self._end[key] = self._raise(self._end.get(key), 1)
        if len(self) > self._entries_max:
            while not self._ending[self._soonest[0]]:
                del self._ending[heapq.heappop(self._soonest)]
            self._decay(self._soonest[0])
            self._decayed_s = now_s

    def _decay(self, decays: int) -> None:
        """Go on to this number of decays; drop what reaches zero."""
        self._decays = decays
        while self._soonest and self._soonest[0] <= decays:
            self._dropped += self._ending.pop(heapq.heappop(self._soonest))
        if self._dropped > self._entries_max // 4:
            self._end = {key: end for key, end in self._end.items() if end > decays}
            self._dropped = 0

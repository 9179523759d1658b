"""Two admission policies: every block may enter the disk tier, or those that pass KVBM's frequency filter."""

from __future__ import annotations

import heapq
from collections.abc import Hashable

DECAY_INTERVAL_S = 600.0
ENTRIES_MAX = 1_000_000
FREQUENCY_MAX = 1 << 20
ADMIT_FREQUENCY = 2


class AdmitAll:
    """Every block may enter."""

    def offered(self, key: Hashable, now_s: float) -> bool:
        return True

    def hit(self, key: Hashable, now_s: float) -> None:
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

    def _count(self, key: Hashable, now_s: float) -> None:
        due = int((now_s - self._decayed_s) // DECAY_INTERVAL_S)
        if due > 0:
            self._decayed_s += due * DECAY_INTERVAL_S
            self._decay(self._decays + due)
        frequency = self._end.get(key, 0) - self._decays
        if frequency > 0:
            self._ending[frequency + self._decays] -= 1
            frequency = min(frequency * 2, FREQUENCY_MAX)
        else:
            self._dropped -= key in self._end
            frequency = 1
        end = self._end[key] = frequency + self._decays
        if end not in self._ending:
            self._ending[end] = 0
            heapq.heappush(self._soonest, end)
        self._ending[end] += 1
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

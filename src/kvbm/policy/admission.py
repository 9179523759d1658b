"""What may enter the disk tier: everything, or KVBM's frequency filter that spares the SSD."""

from __future__ import annotations

from kvbm.block import BlockKey

DECAY_INTERVAL_S = 600.0
ENTRIES_MAX = 1_000_000
FREQUENCY_MAX = 1 << 20
ADMIT_FREQUENCY = 2


class AdmitAll:
    """Every block may enter."""

    def offered(self, key: BlockKey, now_s: float) -> bool:
        return True

    def hit(self, key: BlockKey, now_s: float) -> None:
        return None


class DiskFilter:
    """KVBM's disk offload filter, exact: a frequency starts at 1, doubles when seen again, and disk admits from 2.

    Every 600 s each frequency falls by one and zeros are dropped; above a million entries the decay repeats until
    they fit. Frequencies are capped, which the original's are not.
    """

    def __init__(self, now_s: float = 0.0, entries_max: int = ENTRIES_MAX) -> None:
        assert entries_max > 0
        self._frequency: dict[BlockKey, int] = {}
        self._decayed_s = now_s
        self._entries_max = entries_max

    def __len__(self) -> int:
        return len(self._frequency)

    def offered(self, key: BlockKey, now_s: float) -> bool:
        self._count(key, now_s)
        return self._frequency.get(key, 0) >= ADMIT_FREQUENCY

    def hit(self, key: BlockKey, now_s: float) -> None:
        self._count(key, now_s)

    def _count(self, key: BlockKey, now_s: float) -> None:
        while now_s - self._decayed_s >= DECAY_INTERVAL_S:
            self._decay()
            self._decayed_s = self._decayed_s + DECAY_INTERVAL_S if self._frequency else now_s
        known = self._frequency.get(key)
        self._frequency[key] = 1 if known is None else min(known * 2, FREQUENCY_MAX)
        if len(self._frequency) > self._entries_max:
            while len(self._frequency) > self._entries_max:
                self._decay()
            self._decayed_s = now_s

    def _decay(self) -> None:
        self._frequency = {key: count - 1 for key, count in self._frequency.items() if count > 1}

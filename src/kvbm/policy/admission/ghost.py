"""Disk admission by a ghost list: the keys of blocks that were offered lately and are not on disk."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

GHOSTS_PER_SLOT = 2
"""The list is this many times as long as the tier has slots: a block that comes back within the time in which the tier
is filled twice was worth its write."""
GHOSTS_MAX = 1_000_000
"""The list is never longer than this: a key in it takes some 120 bytes."""


class GhostAdmission:
    """A block enters from the second time it is offered, as long as it is remembered from the first.

    Unlike `DiskFilter` it forgets as new keys come, not by the clock: a quiet night costs nothing. The key offered
    longest ago is forgotten first.
    """

    def __init__(self, slot_count: int) -> None:
        """`slot_count` of the tier that blocks enter."""
        assert slot_count > 0
        self._ghosts_max = min(slot_count * GHOSTS_PER_SLOT, GHOSTS_MAX)
        # In order of the last offer: a dict keeps the order in which its keys came.
        self._ghosts: dict[Hashable, None] = {}

    def __len__(self) -> int:
        return len(self._ghosts)

    def offered(self, key: Hashable, now_s: float) -> bool:
        """Remember the block; True when it was remembered already."""
        known = key in self._ghosts
        if known:
            del self._ghosts[key]
        elif len(self._ghosts) >= self._ghosts_max:
            del self._ghosts[next(iter(self._ghosts))]
        self._ghosts[key] = None
        return known

    def hit(self, key: Hashable, now_s: float) -> None:
        """Not used: a block on disk needs no ghost, and gets one when it is offered again."""

    def offered_all(self, keys: Sequence[Hashable], now_s: float) -> list[bool]:
        """`offered` for each."""
        return [self.offered(key, now_s) for key in keys]

    def hit_all(self, keys: Sequence[Hashable], now_s: float) -> None:
        """Not used, as `hit`."""

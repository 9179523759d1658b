"""Ghost entries of one space: when a block left a tier, or did not enter it, and why. Keys and times, no bytes.

They answer "why did this miss?" later. They are written in bulk, where blocks leave anyway, and only the newest are
kept: an entry takes about 170 bytes, so that those of all tiers of a space never take more than 37 MB.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvbm.block import BlockKey, Tier
from kvbm.clock import Clock
from kvbm.manager.pool import ABORTED, EXPIRED, RESET

GENERATION_BLOCKS = 2048
"""So many entries are forgotten together, the oldest of a tier."""
GENERATIONS = 32

EVICTED, CORRUPT, NO_SLOT = "evicted", "corrupt", "no_slot"
"""The policy chose it; its checksum was wrong; there was no slot for it. `pool` has `RESET`, `ABORTED` and `EXPIRED`.
The other fates are the reasons of `kvbm_skipped_offloads_total` and `kvbm_remote_skipped_blocks_total`: the block was
not written to disk, or to a store."""
TOO_LATE = "too_late"
"""Of those, the one called `evicted`: host memory evicted the block before its turn to be written."""
GONE = "gone"
"""The store did not have it any more, when it was asked for the block."""


class Fate(NamedTuple):
    """What became of blocks in a tier, at `at_s` on the manager's clock."""

    at_s: float
    what: str


class Missing(NamedTuple):
    """Why the blocks of a chain are missing: `first` of them shared the fates of the first one, the other `unknown`
    ones are in no tier and have no ghost entry."""

    host: Fate | None
    disk: Fate | None
    first: int
    unknown: int
    remote: Fate | None = None


class _Fates:
    """The newest fates of one tier's blocks."""

    def __init__(self) -> None:
        self.generations: deque[dict[BlockKey, Fate]] = deque([{}], maxlen=GENERATIONS)
        self.forgotten = False
        """Entries have been given up: a block without one may have been here long ago."""

    def add(self, keys: Sequence[BlockKey], fate: Fate) -> None:
        if len(keys) > GENERATION_BLOCKS * GENERATIONS:  # a whole tier at once
            keys, self.forgotten = keys[: GENERATION_BLOCKS * GENERATIONS], True
        for start in range(0, len(keys), GENERATION_BLOCKS):
            part = keys[start : start + GENERATION_BLOCKS]
            if len(self.generations[-1]) + len(part) > GENERATION_BLOCKS:
                self.forgotten = self.forgotten or len(self.generations) == GENERATIONS
                self.generations.append({})
            self.generations[-1].update(dict.fromkeys(part, fate))

    def get(self, key: BlockKey) -> Fate | None:
        return next((found for fates in reversed(self.generations) if (found := fates.get(key))), None)

    def __len__(self) -> int:
        return sum(map(len, self.generations))


class Departed:
    """The ghost entries of one space. Owned by the manager's thread.

    `staging`: host memory is only the way to disk and back, and a block that leaves it is not lost. `on_left_host` is
    told of blocks that were resident there, if set.
    """

    def __init__(self, clock: Clock, staging: bool = False) -> None:
        self._clock = clock
        self._staging = staging
        self.on_left_host: Callable[[Sequence[BlockKey]], None] | None = None
        self._host, self._disk, self._remote = _Fates(), _Fates(), _Fates()

    def emptied(self, tier: Tier, keys: Sequence[BlockKey], reason: str) -> None:
        """These blocks left the tier, as a `SlotPool` reports it."""
        if tier is Tier.DISK and reason == ABORTED:
            return  # a write that did not come about: who gave it up notes why
        if tier is Tier.HOST and reason != ABORTED:
            if self.on_left_host is not None:
                self.on_left_host(keys)
            if self._staging:
                return
        self.note(tier, keys, reason if reason in (ABORTED, RESET, EXPIRED) else EVICTED)

    def note(self, tier: Tier, keys: Sequence[BlockKey], what: str) -> None:
        """What became of these blocks in that tier."""
        fates = {Tier.HOST: self._host, Tier.DISK: self._disk, Tier.REMOTE: self._remote}[tier]
        fates.add(keys, Fate(self._clock(), what))

    def not_written(self, keys: Sequence[BlockKey], what: str) -> None:
        """These blocks were offered to disk, and are not written to it."""
        self.note(Tier.DISK, keys, TOO_LATE if what == EVICTED else what)

    def not_sent(self, keys: Sequence[BlockKey], what: str) -> None:
        """These blocks were offered to a store, and are not written to it; or it did not give them back."""
        self.note(Tier.REMOTE, keys, TOO_LATE if what == EVICTED else what)

    @property
    def forgotten(self) -> bool:
        """Older entries have been given up."""
        return self._host.forgotten or self._disk.forgotten or self._remote.forgotten

    def __len__(self) -> int:
        return len(self._host) + len(self._disk) + len(self._remote)

    def missing(self, keys: Sequence[BlockKey]) -> Missing:
        """Why a chain's blocks from `keys[0]` on, which is in no tier, are missing.

        A chain's last blocks go first, so those that are known lie before those that are not: a few look-ups find the
        border.
        """
        if not self._known(keys[0]):
            return Missing(None, None, 0, len(keys))
        border = bisect_left(range(len(keys)), True, key=lambda i: not self._known(keys[i]))
        host, disk, remote = (fates.get(keys[0]) for fates in (self._host, self._disk, self._remote))
        return Missing(host, disk, border, len(keys) - border, remote)

    def _known(self, key: BlockKey) -> bool:
        return any(fates.get(key) is not None for fates in (self._host, self._disk, self._remote))

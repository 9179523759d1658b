"""Where blocks below host memory are read from: what an `Onboarder` needs of a tier, and a disk as such a source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from kvbm.block import BlockKey, Outcome, SlotIndex, Tier, alike
from kvbm.manager.disk_health import is_slow
from kvbm.manager.pool import CORRUPT, MISSING, SlotPool
from kvbm.tiers.contract import RunTier
from kvbm.tiers.host import HostArena


class Source(Protocol):
    """Blocks at *places*: numbers, of which those that follow one another are read together.

    `scattered`: the host slots of one read need not follow one another.
    """

    tier: Tier
    scattered: bool

    @property
    def run_blocks_max(self) -> int:
        """The most blocks of one read."""

    @property
    def room(self) -> int:
        """So many reads can be submitted now; an upper bound."""

    def leading(self, keys: list[BlockKey]) -> list[int]:
        """The places of the first of these blocks that are there: distinct, and all of a tail or all not."""

    def is_tail(self, place: int) -> bool:
        """Whether the block there is one of a tail of other groups (see `grouping`)."""

    def pin(self, places: Sequence[int]) -> None:
        """These blocks are about to be read: they stay where they are."""

    def unpin(self, places: Sequence[int]) -> None:
        """Undo one `pin`."""

    def submit(
        self,
        job_id: int,
        keys: Sequence[BlockKey],
        place: int,
        host_slots: Sequence[int],
        tenant: str | None,
    ) -> Outcome:
        """Start reading the blocks at the places from `place` on; as `RunTier.submit_load`."""

    def missed(self, place: int, key: BlockKey, corrupt: bool) -> None:
        """The block was not there, or was wrong there."""

    def expected_s(self, blocks: int) -> float:
        """Expected seconds until a read of so many blocks that begins now has ended; 0 if unknown, or not worth it."""

    def patience_s(self, expected_s: float) -> float:
        """How long a block may wait in the queue that is expected after so many seconds; then it is given up."""


@dataclass(slots=True, eq=False)
class DiskSource:
    """The disk of a space. `on_corrupt` is told of blocks whose checksum was wrong."""

    pool: SlotPool[BlockKey]
    medium: RunTier
    arena: HostArena
    on_corrupt: Callable[[Sequence[BlockKey]], None] | None = None
    tier: Tier = Tier.DISK
    scattered: bool = False

    @property
    def run_blocks_max(self) -> int:
        """As `Source`."""
        return self.medium.run_blocks_max

    @property
    def room(self) -> int:
        """As `Source`."""
        return self.medium.load_room

    def leading(self, keys: list[BlockKey]) -> list[int]:
        """As `Source`."""
        if is_slow(self.medium):
            return []
        slots = self.pool.find_leading(keys)
        return distinct(slots[: alike(self.pool.tails, slots)])

    def is_tail(self, place: int) -> bool:
        """As `Source`."""
        return self.pool.is_tail(place)

    def pin(self, places: Sequence[int]) -> None:
        """As `Source`."""
        self.pool.lease_all(places)

    def unpin(self, places: Sequence[int]) -> None:
        """As `Source`."""
        self.pool.unlease_all(places)

    def submit(
        self,
        job_id: int,
        keys: Sequence[BlockKey],
        place: int,
        host_slots: Sequence[int],
        tenant: str | None,
    ) -> Outcome:
        """As `Source`."""
        targets = self.arena.slot_views(host_slots[0], len(keys))
        return self.medium.submit_load(job_id, keys, SlotIndex(place), targets)

    def missed(self, place: int, key: BlockKey, corrupt: bool) -> None:
        """As `Source`."""
        if not self.pool.is_leased(place):
            self.pool.evict(place, CORRUPT if corrupt else MISSING)
        if corrupt and self.on_corrupt is not None:
            self.on_corrupt((key,))

    def expected_s(self, blocks: int) -> float:
        """As `Source`: what reads took so far says enough of a disk."""
        return 0.0

    def patience_s(self, expected_s: float) -> float:
        """As `Source`: a disk is waited for, because leases have deadlines of their own."""
        return inf


def distinct(places: list[int]) -> list[int]:
    """The first of these that are no repetition: no engine's chain has a block twice, a hostile client's may."""
    if len(set(places)) == len(places):
        return places
    before: set[int] = set()
    for place in places:
        if place in before:
            break
        before.add(place)
    return places[: len(before)]

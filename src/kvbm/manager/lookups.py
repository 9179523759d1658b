"""Lookups: find a chain in both tiers, pin what is in host memory, and bring up what is only on disk.

A lookup of a long chain takes several turns of the manager's thread, so that nobody waits for it for long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbm.block import NO_SLOT, BlockKey, Tier, counted_as_disk
from kvbm.clock import Clock
from kvbm.layout import BlockLayout
from kvbm.manager.disk_side import DiskSide
from kvbm.manager.leases import HoldTable, Lease, LeaseState, Owner
from kvbm.manager.pool import SlotPool
from kvbm.manager.prefix_heat import PrefixHeat
from kvbm.manager.usage import Usage
from kvbm.observe.metrics import Metrics

LEASE_S = 120.0


class Found(NamedTuple):
    """What a lookup found: the lease, or None, and by how many blocks it is shorter than the run that was found.

    `no_room`: host memory had no slots for them. `refused`: the disk did not take them up.
    """

    lease: Lease | None = None
    no_room: int = 0
    refused: int = 0


LookingUp = Generator[None, None, Found]
"""A lookup that yields where it gives others their turn."""


@dataclass(slots=True, eq=False)
class Lookups:
    """The lookups of one space. Owned by the manager's thread."""

    layout: BlockLayout
    host_pool: SlotPool[BlockKey]
    disk: DiskSide | None
    leases: HoldTable[Lease]
    usage: Usage
    staging: bool
    metrics: Metrics
    clock: Clock
    heat: PrefixHeat

    def begin(self, owner: Owner, number: int, keys: Sequence[BlockKey], skip: int) -> LookingUp:
        """Lease the longest run from `keys[skip]` on, and start bringing up its blocks that are only on disk.

        No lease when nothing was found, or the owner holds too many leases. While it is under way the lease can get
        shorter, and ends with its owner.
        """
        now_s = self.clock()
        if not self.leases.has_room(owner) or self.leases.get(owner, number) is not None:
            self.metrics.add("kvbm_lookups_total", outcome="throttled")
            return Found()
        lease = Lease(owner, number, [], [], bytearray(), bytearray(), now_s + LEASE_S)
        self._gather(lease, keys, skip)
        found = len(lease.slots)
        try:
            if lease.slots:
                self.leases.add(lease)
            if self.disk is not None:
                for _ in self.disk.onboarder.bring_up(lease, keys[skip - 1] if skip else None):
                    self.disk.onboarder.pump()
                    yield
            if lease.slots and self.leases.get(owner, number) is not lease:  # it ended meanwhile
                return Found()
            kept = len(lease.slots)
            self.usage.note(list(keys), skip + kept)
            lease.advance()
            if lease.slots and self.disk is not None:
                self.disk.onboarder.pump()
        except BaseException:
            self._give_back(lease)
            raise
        if owner >= 0:  # hit rates and heat are of what engines ask for
            self._account(lease, len(keys) - skip)
            if self.heat.asked(keys, skip + found, len(keys) - skip, len(lease.slots)):
                self.metrics.add("kvbm_lost_prefixes_total")
        cut = found - kept, kept - len(lease.slots)
        if not lease.slots:  # nothing was found, or the tier refused the first block just now
            self.leases.pop(owner, number)
            return Found(None, *cut)
        return Found(lease, *cut)

    def counted_sources(self, sources: bytes) -> bytes:
        """The tiers as they are counted: blocks that pass through a staging area are from disk."""
        return counted_as_disk(sources) if self.staging else sources

    def _give_back(self, lease: Lease) -> None:
        """End the pins of a lookup that failed half-way, or whose owner has gone."""
        self.leases.pop(lease.owner, lease.number)
        pinned = lease.pinned()
        lease.drop()
        if self.disk is not None:
            self.disk.onboarder.released()
        with contextlib.suppress(Exception):  # what failed first is told
            self.host_pool.unlease_all(pinned)

    def _gather(self, lease: Lease, keys: Sequence[BlockKey], skip: int) -> None:
        """Note the run's blocks, and lease those in host memory: room for the others must not be made of them."""
        wanted = list(keys[skip:])
        slots = self.host_pool.find_leading(wanted)
        run = len(slots)
        sources, states = bytearray((Tier.HOST,)) * run, bytearray((LeaseState.PINNED,)) * run
        disk_pool = self.disk.pool_if_on if self.disk is not None else None
        if run < len(wanted) and disk_pool is not None:
            rest = wanted[run:]
            on_host, on_disk = self.host_pool.find_all(rest), disk_pool.find_all(rest)
            first = on_disk.index(None) if None in on_disk else len(rest)
            if on_host.count(None) == len(rest):  # the common case without a step of Python per block
                slots += [NO_SLOT] * first
                sources += bytes((Tier.DISK,)) * first
                states += bytes((LeaseState.ONBOARDING,)) * first
                rest = []
            for slot, below in zip(on_host, on_disk, strict=True) if rest else ():
                if slot is None and below is None:
                    break
                slots.append(NO_SLOT if slot is None else slot)
                sources.append(Tier.DISK if slot is None else Tier.HOST)
                states.append(LeaseState.ONBOARDING if slot is None else LeaseState.PINNED)
        lease.keys, lease.slots = wanted[: len(slots)], slots
        lease.sources, lease.states = sources, states
        self.host_pool.lease_all(lease.pinned())

    def _account(self, lease: Lease, queried: int) -> None:
        hits, on_host = len(lease.slots), self.counted_sources(bytes(lease.sources)).count(Tier.HOST)
        self.metrics.add("kvbm_queried_blocks_total", queried)
        self.metrics.add("kvbm_lookups_total", outcome="hit" if hits else "miss")
        for tier, blocks in (("host", on_host), ("disk", hits - on_host)):
            self.metrics.add("kvbm_hit_blocks_total", blocks, tier=tier)
            self.metrics.add("kvbm_hit_bytes_total", blocks * self.layout.block_bytes, tier=tier)


def advance(looking: LookingUp) -> Found | None:
    """Go on with a lookup until it gives others their turn, which is None, or ends."""
    try:
        next(looking)
    except StopIteration as end:
        found: Found = end.value
        return found
    return None

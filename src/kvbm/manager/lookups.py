"""Lookups: find a chain in all tiers, pin what is in host memory, and bring up what is only below it.

A lookup of a long chain takes several turns of the manager's thread, so that nobody waits for it for long.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile
from operator import or_
from typing import NamedTuple

from kvbm.block import NO_SLOT, BlockKey, Tier, counted_as_disk
from kvbm.clock import Clock
from kvbm.grouping import Grouping, sources_of_prompt
from kvbm.hints import UNHINTED, ClientHint, Verdict
from kvbm.layout import BlockLayout
from kvbm.manager.below import Below
from kvbm.manager.hearing import word_of
from kvbm.manager.leases import HoldTable, Lease, LeaseState, Owner
from kvbm.manager.onboard import cut
from kvbm.manager.pool import SlotPool
from kvbm.manager.prefix_heat import PrefixHeat
from kvbm.manager.retaining import Retaining
from kvbm.manager.usage import Usage
from kvbm.observe.metrics import Metrics
from kvbm.strict import record_swallowed

LEASE_S = 120.0


class Found(NamedTuple):
    """What a lookup found: the lease, or None, and by how many blocks it is shorter than the run that was found.

    `no_room`: host memory had no slots for them. `refused`: the disk did not take them up. With several groups `full`
    leading blocks of the prompt are held as far as all their tokens are needed: the boundary may lie before that.
    `judged` has a verdict for each range that the client named.
    """

    lease: Lease | None = None
    no_room: int = 0
    refused: int = 0
    full: int = 0
    judged: tuple[Verdict, ...] = ()


class _Wanted(NamedTuple):
    """The blocks that a lookup wants, the one before them, and the chain that policies are told of: its first `used`
    blocks are on the device or, with several groups, wanted too. With several groups they are told of `tails` too, the
    one at the boundary first."""

    run: list[BlockKey]
    before: BlockKey | None
    chain: list[BlockKey]
    used: int
    boundary: int = 0
    prompt_blocks: int = 0
    full: int = 0
    tails: Sequence[list[BlockKey]] = ()


LookingUp = Generator[None, None, Found]
"""A lookup that yields where it gives others their turn."""


@dataclass(slots=True, eq=False)
class Lookups:
    """The lookups of one space. Owned by the manager's thread."""

    layout: BlockLayout
    host_pool: SlotPool[BlockKey]
    below: Below
    leases: HoldTable[Lease]
    usage: Usage
    staging: bool
    metrics: Metrics
    clock: Clock
    heat: PrefixHeat
    retaining: Retaining
    found_at_once: int
    _grouping: Grouping | None = field(init=False)

    def __post_init__(self) -> None:
        self._grouping = Grouping(self.layout.groups) if self.layout.groups else None

    def begin(
        self, owner: Owner, number: int, keys: Sequence[BlockKey], skip: int, asker: ClientHint = UNHINTED
    ) -> LookingUp:
        """Lease the longest run from `keys[skip]` on, and start bringing up its blocks that are only below.

        No lease when nothing was found, or the owner holds too many leases. While it is under way the lease can get
        shorter, and ends with its owner.
        """
        now_s = self.clock()
        if not self.leases.has_room(owner) or self.leases.get(owner, number) is not None:
            self.metrics.add("kvbm_lookups_total", outcome="throttled")
            return Found()
        # Before anything is leased, as it may take several turns.
        judged = (yield from self.retaining.judge(keys, asker)) if owner >= 0 else ()
        if self._grouping is None:
            wanted = self._wanted_plain(keys, skip)
        else:
            wanted = yield from self._wanted(keys, skip, self._grouping)
        lease = Lease(owner, number, [], [], bytearray(), bytearray(), now_s + LEASE_S)
        lease.tenant = asker.tenant if owner >= 0 else None  # an operator asks for anybody's blocks
        # What is read for the request, whether or not it is given up again.
        brought = set[BlockKey]()
        try:
            for start in range(0, len(wanted.run), self.found_at_once):
                part = wanted.run[start : start + self.found_at_once]
                if lease.slots:
                    yield
                    if not self.leases.lasts(lease):  # it ended meanwhile
                        return Found(judged=judged)
                count = self._gather(lease, part, brought)
                if count == len(lease.slots) > 0:
                    self.leases.add(lease)
                if count < len(part):
                    break
            found = len(lease.slots)
            if self.below:
                for _ in self.below.bring_up(lease, wanted.before):
                    self.below.pump()
                    yield
            if lease.slots and not self.leases.lasts(lease):  # it ended meanwhile
                return Found(judged=judged)
            kept = len(lease.slots)
            if wanted.boundary and kept < len(wanted.run):  # a part of it is worth nothing to the engine
                self._give_back(lease)
                lease.slots, lease.sources, kept, found = [], bytearray(), 0, wanted.prompt_blocks
            self._note(wanted, kept, asker, lease.tenant, brought)
            lease.boundary, lease.prompt_blocks = wanted.boundary, wanted.prompt_blocks or kept
            lease.advance()
            if lease.slots:
                self.below.pump()
        except BaseException:
            self._give_back(lease)
            raise
        sources = self.prompt_sources(lease)
        if owner >= 0:  # hit rates and heat are of what engines ask for
            self._account(sources, self.counted_sources(bytes(lease.sources)), len(keys) - skip)
            reached = skip + (wanted.prompt_blocks or found)
            if self.heat.asked(keys, reached, len(keys) - skip, len(sources)):
                self.metrics.add("kvbm_lost_prefixes_total")
        cut = found - kept, kept - len(lease.slots)
        if wanted.boundary and lease.slots:
            cut = 0, 0
        if not lease.slots:  # nothing was found, or the tier refused the first block just now
            self.leases.pop(owner, number)
            return Found(None, *cut, wanted.full, judged)
        return Found(lease, *cut, wanted.full, judged)

    def shorten(self, owner: Owner, number: int, blocks: int) -> None:
        """The owner can use no more than the first blocks of the lease: the others are given back."""
        lease = self.leases.get(owner, number)
        if lease is not None and blocks < len(lease.slots):
            final = lease.final
            cut(self.host_pool, lease, blocks)
            lease.advance()
            if not final:
                self.below.released()

    def prompt_run(self, keys: Sequence[BlockKey]) -> Generator[None, None, tuple[list[BlockKey], int]]:
        """The blocks that a request for this prompt would wait for, and how many of the prompt they stand for. With
        several groups all of them are held; else the prompt may be held to a lesser part. Nothing is leased."""
        if self._grouping is None:
            return list(keys), len(keys)
        wanted = yield from self._wanted(keys, 0, self._grouping)
        return wanted.run, wanted.prompt_blocks

    def bring_piece(
        self, owner: Owner, number: int, keys: list[BlockKey], before: BlockKey | None
    ) -> Lease | None:
        """Lease these few blocks, which lie behind `before`, and start bringing up those that are only on disk; None
        where nothing can be had. It is nobody's request: the policies are not told of it, and nothing is counted."""
        lease = Lease(owner, number, [], [], bytearray(), bytearray(), self.clock() + LEASE_S)
        if not self._gather(lease, keys, set()):
            return None
        try:
            self.leases.add(lease)
            if self.below:
                for _ in self.below.bring_up(lease, before):
                    pass
                lease.advance()
                self.below.pump()
        except BaseException:
            self._give_back(lease)
            raise
        if not lease.slots:
            self.leases.pop(owner, number)
            return None
        return lease

    def _wanted_plain(self, keys: Sequence[BlockKey], skip: int) -> _Wanted:
        """Every block is of all layers: the longest run."""
        return _Wanted(list(keys[skip:]), keys[skip - 1] if skip else None, list(keys), skip)

    def _wanted(
        self, keys: Sequence[BlockKey], skip: int, grouping: Grouping
    ) -> Generator[None, None, _Wanted]:
        """What all groups need at the largest boundary at which they hold it."""
        found, chain = yield from grouping.searching(keys, self._held)
        tails = [grouping.keys(keys, grouping.tail(boundary)) for boundary in grouping.uses(found)]
        before, boundary = grouping.chain_length(skip), found.boundary
        if boundary <= skip:
            return _Wanted([], None, chain, before, full=found.full, tails=tails)
        end = grouping.chain_length(boundary)
        run = chain[before:end] + grouping.keys(keys, grouping.tail(boundary, skip))
        parent = chain[before - 1] if before else None
        return _Wanted(run, parent, chain, end, boundary, boundary - skip, found.full, tails)

    def _held(self, keys: list[BlockKey]) -> bytes:
        """Which of these blocks are resident in a tier, a byte each."""
        there = bytes(slot is not None for slot in self.host_pool.find_all(keys))
        return bytes(map(or_, there, self.below.held(keys))) if self.below else there

    def _note(
        self,
        wanted: _Wanted,
        kept: int,
        asker: ClientHint,
        tenant: str | None,
        brought: Set[BlockKey],
    ) -> None:
        """Tell the policies of the request."""
        word = word_of(asker, len(wanted.chain) * self.layout.block_tokens)
        found = wanted.used if wanted.boundary else wanted.used + kept
        self.usage.note(
            wanted.chain,
            found,
            wanted.tails,
            taken_up=wanted.boundary > 0,
            word=word,
            tenant=tenant,
            brought=brought,
        )

    def counted_sources(self, sources: bytes) -> bytes:
        """The tiers as they are counted: blocks that pass through a staging area are from disk."""
        return counted_as_disk(sources) if self.staging else sources

    def prompt_sources(self, lease: Lease) -> bytes:
        """The tiers of the blocks of the prompt that a lease stands for, as they are counted."""
        sources = self.counted_sources(bytes(lease.sources))
        return sources_of_prompt(sources, lease.prompt_blocks) if lease.boundary else sources

    def _give_back(self, lease: Lease) -> None:
        """End the pins of a lookup that failed half-way, or whose owner has gone."""
        self.leases.pop(lease.owner, lease.number)
        pinned = lease.pinned()
        lease.drop()
        self.below.released()
        try:
            self.host_pool.unlease_all(pinned)
        except Exception as error:  # the first error is reported
            record_swallowed(error)

    def _gather(self, lease: Lease, wanted: list[BlockKey], brought: set[BlockKey]) -> int:
        """Add the run's next blocks to the lease, and lease those in host memory: room for the others must not be made
        of them. The others are `brought` too. How many were found, of the first on."""
        slots = self.host_pool.find_leading(wanted)
        run = len(slots)
        sources, states = bytearray((Tier.HOST,)) * run, bytearray((LeaseState.PINNED,)) * run
        rest = wanted[run:] if self.below else []
        on_host = self.host_pool.find_all(rest)
        # As few steps of Python as there are stretches of one kind.
        start = 0
        while start < len(rest):
            absent = next((n for n in range(start, len(rest)) if on_host[n] is not None), len(rest))
            tiers = self.below.leading(rest[start:absent])
            brought.update(rest[start : start + len(tiers)])
            slots += [NO_SLOT] * len(tiers)
            sources += tiers
            states += bytes((LeaseState.ONBOARDING,)) * len(tiers)
            if start + len(tiers) < absent:
                break
            here = [slot for slot in takewhile(_is_here, on_host[absent:]) if slot is not None]
            slots += here
            sources += bytes((Tier.HOST,)) * len(here)
            states += bytes((LeaseState.PINNED,)) * len(here)
            start = absent + len(here)
        self.host_pool.lease_all([slot for slot in slots if slot != NO_SLOT] if run < len(slots) else slots)
        lease.keys += wanted[: len(slots)]
        lease.slots += slots
        lease.sources += sources
        lease.states += states
        return len(slots)

    def _account(self, sources: bytes, leased: bytes, queried: int) -> None:
        """Count a lookup: the prompt's blocks by `sources`, and the bytes of all blocks `leased` for them."""
        hits = len(sources)
        self.metrics.add("kvbm_queried_blocks_total", queried)
        self.metrics.add("kvbm_lookups_total", outcome="hit" if hits else "miss")
        for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE):
            name, size = tier.name.lower(), self.layout.block_bytes
            self.metrics.add("kvbm_hit_blocks_total", sources.count(tier), tier=name)
            self.metrics.add("kvbm_hit_bytes_total", leased.count(tier) * size, tier=name)


def _is_here(slot: int | None) -> bool:
    return slot is not None

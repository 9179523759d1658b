"""One namespace's blocks: the index, the leases and reservations, and the moves between tiers.

Pure of transport: `server` drives a Space for engines, `library` drives one in process. It is owned by one thread.
Calls that may take long are generators, or leave slices to `catch_up`; blocks that arrive later are announced through
`on_progress`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain

import msgspec

from kvbm.block import NO_COUNT, BlockKey
from kvbm.clock import Clock
from kvbm.groups import GroupKind
from kvbm.hints import UNHINTED, ClientHint
from kvbm.layout import BlockLayout
from kvbm.manager.below import Below
from kvbm.manager.closing import close_spaces
from kvbm.manager.departed import Departed
from kvbm.manager.disk_side import DiskSide
from kvbm.manager.foresight import Decided, Foresight
from kvbm.manager.hearing import doubted, word_of
from kvbm.manager.host_side import DEFAULT_OPTIONS, HostSide, SpaceOptions, make_host_side
from kvbm.manager.leases import HoldTable, Lease, Owner, Reservation
from kvbm.manager.lookups import LookingUp, Lookups
from kvbm.manager.names import EngineName
from kvbm.manager.pool import SlotPool
from kvbm.manager.prefix_heat import PrefixHeat
from kvbm.manager.remote_side import sides_of
from kvbm.manager.retaining import Judging, Retaining
from kvbm.manager.storing import Storing
from kvbm.manager.usage import Usage
from kvbm.manager.write_behind import RemoteRules
from kvbm.observe import moves_log
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy
from kvbm.protocol import REFUSED
from kvbm.slices import Backlog, at_once
from kvbm.tiers.contract import RunTier
from kvbm.tiers.host import HostArena
from kvbm.tiers.remote.contract import RemoteTier

RELEASED_AT_ONCE = 4096
"""Blocks whose leases end in one slice."""


class Space:
    """Index, leases and queues of one namespace.

    Guarantees: a leased block is neither evicted nor overwritten; a block is found only after `commit`; every
    lease and reservation ends by release, commit, its owner's end or its deadline.
    """

    def __init__(
        self,
        layout: BlockLayout,
        arena: HostArena,
        medium: RunTier | None,
        admission: AdmissionPolicy,
        metrics: Metrics,
        clock: Clock,
        on_progress: Callable[[Lease], None],
        options: SpaceOptions = DEFAULT_OPTIONS,
        remotes: Sequence[tuple[RemoteTier, RemoteRules, AdmissionPolicy]] = (),
    ) -> None:
        """`remotes` are the remote tiers, first the one to be asked first, each with what is done with it."""
        self.layout, self.arena, self.options = layout, arena, options
        self.failure = ""
        """Empty while the space works (see `guarded_space`)."""
        self.on_progress = on_progress
        self._metrics, self._clock = metrics, clock
        self._backlog = Backlog()
        self.leases: HoldTable[Lease] = HoldTable()
        self.reservations: HoldTable[Reservation] = HoldTable()
        self.departed = Departed(clock, options.staging)
        tail_groups = frozenset(n for n, g in enumerate(layout.groups) if g.kind is not GroupKind.FULL)
        elsewhere = self._elsewhere if remotes else None
        host = make_host_side(arena, options, self.departed, elsewhere)
        self._names, self.host_pool, self.facts, self.held = host.names, host.pool, host.facts, host.held
        self.disk = self._make_disk(medium, host, admission, tail_groups) if medium is not None else None
        self.remotes = sides_of(remotes, host, options, metrics, clock, on_progress, self.departed.not_sent)
        self.below = Below(host, self.disk, self.remotes, options.brought_at_once)
        self.usage = Usage(lambda: self.pools, self.below.downward, clock)
        self.heat = PrefixHeat()
        self.retaining = Retaining(layout, self._keeping_pools, clock)
        self.lookups = self._make_lookups()
        self._storing = self._make_storing(tail_groups)
        brings_up = bool(self.below) and not options.staging
        self.foresight = Foresight(self, layout.groups, brings_up, metrics, clock)
        self.departed.on_left_host = self.foresight.prefetching.left

    def _make_disk(
        self, medium: RunTier, host: HostSide, admission: AdmissionPolicy, tail_groups: frozenset[int]
    ) -> DiskSide:
        return DiskSide(
            medium=medium,
            host_pool=self.host_pool,
            arena=self.arena,
            names=self._names,
            host_facts=host.facts,
            rising=host.rising,
            admission=admission,
            eviction=self.options.eviction,
            staging=self.options.staging,
            in_flight_max=self.options.in_flight_max,
            brought_at_once=self.options.brought_at_once,
            metrics=self._metrics,
            clock=self._clock,
            on_progress=self.on_progress,
            departed=self.departed,
            tail_groups=tail_groups,
            keeps_facts=self.options.keeps_facts,
            salt_share=self.options.salt_share,
            backlog=self._backlog,
            slice_blocks=self.options.slice_blocks,
        )

    def _make_lookups(self) -> Lookups:
        return Lookups(
            self.layout,
            self.host_pool,
            self.below,
            self.leases,
            self.usage,
            self.options.staging,
            self._metrics,
            self._clock,
            self.heat,
            self.retaining,
            self.options.found_at_once,
        )

    def _make_storing(self, tail_groups: frozenset[int]) -> Storing:
        return Storing(
            layout=self.layout,
            host_pool=self.host_pool,
            names=self._names,
            disk=self.disk,
            below=self.below,
            downward=self.below.downward,
            reservations=self.reservations,
            usage=self.usage,
            deadlines=self.retaining.deadlines,
            departed=self.departed,
            full=moves_log.FullPool("host", self._clock),
            staging=self.options.staging,
            tail_groups=tail_groups,
            slice_blocks=self.options.slice_blocks,
            metrics=self._metrics,
            clock=self._clock,
        )

    def _keeping_pools(self) -> Sequence[SlotPool[BlockKey]]:
        """The pools of the tiers that keep blocks: host memory that only passes them on is none."""
        return self.pools[1:] if self.options.staging else self.pools

    def _elsewhere(self, key: BlockKey) -> bool:
        return any(self.below.away([key]))

    def engine_name(self, slot: int, key: BlockKey) -> EngineName:
        """The engine's own name of the block in a slot of host memory."""
        return self._names.of(slot, key)

    # ---- lookups

    def lookup(
        self, owner: Owner, number: int, keys: Sequence[BlockKey], skip: int, asker: ClientHint = UNHINTED
    ) -> Lease | None:
        """Lease the longest run from `keys[skip]` on, and start bringing up its blocks that are only on disk.

        None when nothing was found, or the owner holds too many leases.
        """
        return at_once(self.looking_up(owner, number, keys, skip, asker)).lease

    def looking_up(
        self, owner: Owner, number: int, keys: Sequence[BlockKey], skip: int, asker: ClientHint = UNHINTED
    ) -> LookingUp:
        """`lookup` in several turns (see `lookups`)."""
        return self.lookups.begin(owner, number, keys, skip, asker)

    def heard(
        self, asker: ClientHint, keys: Sequence[BlockKey], reached: int, again: bool = False
    ) -> Generator[None, None, Decided]:
        """Do what the client of a request says of its session, in several turns (see `foresight`)."""
        decided = yield from self.foresight.heard(asker, keys, reached, again)
        return (*decided, *doubted(asker, self.host_pool.policy, decided))

    def judged(self, keys: Sequence[BlockKey], asker: ClientHint) -> Judging:
        """Do what a client says of a chain that it does not ask for now (see `retaining`)."""
        judged = yield from self.retaining.judge(keys, asker)
        word = word_of(asker, len(keys) * self.layout.block_tokens)
        if word is not None and keys:
            self.usage.note_word(keys[-1], word)
        return judged

    def arrival_s(self, lease: Lease) -> float:
        """Expected seconds until the blocks of a lease that was just taken are all in host memory; 0 if unknown."""
        return self.below.arrival_s(lease)

    def counted_sources(self, sources: bytes) -> bytes:
        """The tiers as they are counted: blocks that pass through a staging area are from disk."""
        return self.lookups.counted_sources(sources)

    def prompt_sources(self, lease: Lease | None) -> bytes:
        """The same of a lease, for each block of the prompt."""
        return self.lookups.prompt_sources(lease) if lease is not None else b""

    def release(self, owner: Owner, number: int) -> Lease | None:
        """End a lease. Returns it as it was, or None when it had ended already."""
        lease = self.leases.pop(owner, number)
        if lease is not None:
            pinned = lease.pinned()
            self.host_pool.unlease_all(pinned)
            moves_log.returned(len(pinned), "host")
            if not lease.final:
                self.below.released()
            lease.drop()
        return lease

    def shorten(self, owner: Owner, number: int, blocks: int) -> None:
        self.lookups.shorten(owner, number, blocks)

    # ---- stores

    def reserve(
        self,
        owner: Owner,
        number: int,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        hashes: bytes = b"",
        group: int | bytes = 0,
        more: bool = False,
        tenant: str = "",
    ) -> list[int]:
        """Slots to fill for the blocks that are not held yet; HELD or REFUSED for the others (see `storing`)."""
        self.foresight.stored(parent, keys, group)
        return self._storing.reserve(owner, number, parent, keys, hashes, group, more, tenant)

    def refuse(self, keys: Sequence[BlockKey]) -> list[int]:
        """The answer of `reserve` where no block gets a slot."""
        return [REFUSED] * len(keys)

    def commit(self, owner: Owner, number: int, failed: Sequence[int] = ()) -> int:
        """The owner's workers filled the slots, except those at positions `failed`. Returns the number committed."""
        return at_once(self.committing(owner, number, failed))

    def committing(self, owner: Owner, number: int, failed: Sequence[int] = ()) -> Generator[None, None, int]:
        """`commit` in several turns."""
        return self._storing.committing(owner, number, failed)

    def release_later(self, leases: Sequence[Lease]) -> None:
        """End many leases, in slices."""
        self.work_later(self._releasing(deque(leases)))

    def _releasing(self, leases: deque[Lease]) -> Iterator[None]:
        blocks = 0
        while leases:
            if blocks >= RELEASED_AT_ONCE:
                blocks = 0
                yield
            lease = leases.popleft()  # it is freed in its slice: the keys of all take a while
            self.release(lease.owner, lease.number)
            blocks += len(lease.states)

    def abort(self, reservation: Reservation) -> None:
        """Free a reservation's slots. The caller knows that no worker writes to them any more."""
        at_once(self._storing.aborting(reservation))

    def abort_later(self, reservations: Sequence[Reservation]) -> None:
        """`abort` for many, in slices."""
        self.work_later(chain.from_iterable(map(self._storing.aborting, reservations)))

    def finished(self, key: BlockKey, output_tokens: int) -> None:
        """The request whose prompt ended with this key has ended."""
        self.usage.note_end(key, output_tokens)
        self.foresight.finished(key)

    # ---- time

    def pump(self) -> None:
        """Take all completions, tell the policies everything, and submit queued blocks; drop some of what is due."""
        self._drop_expired()
        self.below.collect()
        while self.catch_up():
            pass
        while self.below and (self.below.advance() or self.foresight.advance()):
            pass

    def move(self, until_s: float) -> bool:
        """Take completions until that time, one in any case, and submit queued blocks. Whether something is left."""
        if not self.below:
            return False
        left = self.below.collect(until_s)
        left = self.below.advance() or left
        return self.foresight.advance() or left

    def catch_up(self) -> bool:
        """Do a slice of what can wait while clients are answered: index a disk, give back the slots of cleared blocks,
        end leases, tell the policies what happened. False: nothing was left."""
        done = sum(pool.offer_ended() for pool in self.pools) + self._backlog.advance()
        return self.usage.tell() or done > 0

    def work_later(self, work: Iterator[None]) -> None:
        """Do the first slice of this now, and the others in `catch_up`."""
        if next(work, self) is not self:
            self._backlog.add(work)

    def expire_leases(self) -> list[Lease]:
        """End the leases past their deadline, and return them."""
        expired = [lease for lease in self.leases.overdue(self._clock()) if not lease.expired]
        for lease in expired:
            lease.expired = True
        self._metrics.add("kvbm_leases_expired_total", len(expired))
        self.release_later(expired)
        return expired

    def overdue(self) -> list[Reservation]:
        """Drop some of the blocks past their deadline. Returns the reservations past theirs, which the caller
        condemns."""
        self._drop_expired()
        return [r for r in self.reservations.overdue(self._clock()) if not r.condemned]

    def _drop_expired(self) -> None:
        self.retaining.deadlines.drop(self.pools, self._clock())

    def clear(self, tier: str = "") -> tuple[int, int]:
        """Drop every block that is not in use, of one tier or of all. Returns (dropped, in use)."""
        found = self.begin_clear(tier)
        while self._backlog.advance():
            pass
        if self.disk is not None:
            self.disk.void_emptied()
        return found

    def begin_clear(self, tier: str = "") -> tuple[int, int]:
        """As `clear`, in slices: none of the dropped blocks can be found from now on, and their slots count as free.
        `catch_up` forgets them; only then they stay dropped from disk after a crash (`clearing`). Where a disk is
        cleared that is `indexing`, that is ended first."""
        if self.disk is not None and tier in ("", self.disk.pool.tier.name.lower()):
            while self.indexing and self._backlog.advance():
                pass
        if tier in ("", self.host_pool.tier.name.lower()):
            for reservation in self.reservations:
                reservation.stale = True
        dropped = in_use = 0
        for pool in self.pools:
            if tier in ("", pool.tier.name.lower()):
                gone, kept = pool.clear()
                dropped, in_use = dropped + gone, in_use + kept
                self.work_later(pool.tidying(self.options.slice_blocks))
        if not tier:
            self.work_later(self.retaining.deadlines.clearing())
        return dropped, in_use

    @property
    def indexing(self) -> bool:
        """Some of the blocks that the disk had when it was opened cannot be found yet."""
        return self.disk is not None and not self.failure and self.disk.pool.unindexed_count > 0

    @property
    def clearing(self) -> bool:
        """Blocks that were cleared from disk may be there again after a crash."""
        return self.disk is not None and not self.failure and self.disk.pool.cleared_count > 0

    @property
    def behind(self) -> bool:
        """There is something left to do for `catch_up`."""
        left = self._backlog or self.usage or any(pool.has_ended for pool in self.pools)
        return bool(left) and not self.failure

    @property
    def busy(self) -> bool:
        """Blocks are on their way between host memory and the tiers below."""
        return bool(self.below) and (self.below.queued_count > 0 or bool(self.usage))

    @property
    def pools(self) -> tuple[SlotPool[BlockKey], ...]:
        """The slots of host memory, and those of the disk where there is one."""
        return (self.host_pool,) if self.disk is None else (self.host_pool, self.disk.pool)

    def tiers(self) -> dict[str, int]:
        """Block counts of the tiers that are on, as engines learn them (see `protocol.Ready`)."""
        tiers = {} if self.options.staging else {"host": self.host_pool.slot_count}
        if (disk_pool := self.below.disk_pool) is not None:
            tiers["disk"] = disk_pool.slot_count
        if not all(remote.fault for remote in self.remotes):
            tiers["remote"] = NO_COUNT
        return tiers

    def describe(self) -> dict[str, object]:
        """This space's part of a `Status`."""
        tiers = {
            pool.tier.name.lower(): {"blocks": pool.slot_count, **msgspec.structs.asdict(pool.counts())}
            for pool in self.pools
        }
        fault, queued = (self.disk.trouble, self.disk.queued_count) if self.disk is not None else ("", 0)
        remote = [each.describe() for each in self.remotes]
        facts = {"block_bytes": self.layout.block_bytes, "fault": fault, "queued": queued}
        return {**facts, "tiers": tiers, "remote": remote}

    def check(self) -> None:
        """Assert the conservation law in every tier."""
        for pool in self.pools:
            pool.check()

    def stop(self) -> None:
        """The first step of the end: leases and slices of work end."""
        self.foresight.on = False
        for lease in list(self.leases):
            self.release(lease.owner, lease.number)
        self._backlog.clear()  # it is of no use any more

    def close(self, keep: bool) -> None:
        """Write queued blocks (bounded in time) and release the tiers."""
        close_spaces([self], keep)

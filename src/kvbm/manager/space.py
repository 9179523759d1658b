"""One namespace's blocks: what is where, who holds it, and what moves next.

Pure of transport: `server` drives a Space for engines, `library` drives one in process. It is owned by one thread.
Calls answer at once; what takes time is announced through `on_progress`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from kvbm.block import BlockKey, SlotIndex, Tier, counted_as_disk
from kvbm.clock import Clock
from kvbm.layout import BlockLayout
from kvbm.manager.leases import Cut, HoldTable, Lease, Owner, Place, Reservation
from kvbm.manager.names import EngineNames
from kvbm.manager.offload import Offloader
from kvbm.manager.onboard import Onboarder
from kvbm.manager.pool import SlotPool
from kvbm.manager.usage import Usage
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmissionPolicy, make_policy
from kvbm.policy.departures import Departures
from kvbm.protocol import HELD, REFUSED
from kvbm.tiers.contract import SlotTier
from kvbm.tiers.host import HostArena

LEASE_S = 120.0
RESERVATION_S = 120.0
HEAL_INTERVAL_S = 10.0
CLOSE_S_MAX = 5.0


class SpaceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a space treats its tiers. `staging`: host memory is only a bounded way to disk.

    `eviction` names the policy of both tiers; a staging area keeps no order but that of use. `write_on_eviction`: a
    block is offered to disk only when host memory is about to give it up; a staging area always hands on at once.
    """

    staging: bool = False
    eviction: str = "lru"
    write_on_eviction: bool = False
    in_flight_max: int = 64


class Space:
    """Index, leases and queues of one namespace.

    Guarantees: a leased block is neither evicted nor overwritten; a block is found only after `commit`; every
    lease and reservation ends by release, commit, its owner's end or its deadline.
    """

    def __init__(
        self,
        layout: BlockLayout,
        arena: HostArena,
        tier: SlotTier | None,
        admission: AdmissionPolicy,
        metrics: Metrics,
        clock: Clock,
        on_progress: Callable[[Lease], None],
        options: SpaceOptions = SpaceOptions(),
    ) -> None:
        self.layout = layout
        self.arena = arena
        self.tier = tier
        self.options = options
        self._metrics = metrics
        self._clock = clock
        self._admission = admission
        self._on_progress = on_progress
        self._jobs = count(1)
        self.leases: HoldTable[Lease] = HoldTable()
        self.reservations: HoldTable[Reservation] = HoldTable()
        self.cut = Cut(0, 0)
        self._usage = Usage()
        self._names = EngineNames(arena.slot_count)
        # Staged blocks need no order (`chained`): each lies on disk before it may go, and is found there.
        eviction = "lru" if options.staging else options.eviction
        policy = make_policy(eviction, arena.slot_count)
        self.departures: Departures | None = None
        if options.write_on_eviction and tier is not None and not options.staging:
            policy = self.departures = Departures(policy, arena.slot_count)
        chained, keeps_parents = not options.staging, self.departures is not None
        self.host = SlotPool(
            Tier.HOST, arena.slot_count, policy, self._host_emptied, chained, keeps_parents=keeps_parents
        )
        self.disk: SlotPool | None = None
        self.onboarder: Onboarder | None = None
        self.offloader: Offloader | None = None
        self._heal_at_s = 0.0
        if tier is not None:
            self._attach_disk(tier)

    # ---- lookups

    def lookup(self, owner: Owner, number: int, keys: Sequence[BlockKey], skip: int) -> Lease | None:
        """Lease the longest run from `keys[skip]` on and start bringing up what is below G2.

        None when nothing was found, or the owner holds too many leases. `cut` says what was found and is not leased.
        """
        now_s = self._clock()
        self.cut = Cut(0, 0)
        if not self.leases.has_room(owner) or self.leases.get(owner, number) is not None:
            self._metrics.add("kvbm_lookups_total", outcome="throttled")
            return None
        lease = Lease(owner, number, [], [], bytearray(), bytearray(), now_s + LEASE_S)
        self._gather(lease, keys, skip)
        found = len(lease.slots)
        if self.onboarder is not None:
            self.onboarder.bring_up(lease, keys[skip - 1] if skip else None)
        kept = len(lease.slots)
        self._usage.note(list(keys), skip + kept)
        if lease.slots:
            self.leases.add(lease)
            lease.advance()
            if self.onboarder is not None:
                self.onboarder.pump()
        self.cut = Cut(found - kept, kept - len(lease.slots))
        self._account(lease, len(keys) - skip)
        if not lease.slots:  # nothing was found, or the tier refused the first block just now
            self.release(owner, number)
            return None
        return lease

    def told(self, sources: bytes) -> bytes:
        """The tiers as they are counted: what passes through a staging area is from disk."""
        return counted_as_disk(sources) if self.options.staging else sources

    def release(self, owner: Owner, number: int) -> Lease | None:
        """End a lease; the lease as it was, or None when it had ended already."""
        lease = self.leases.pop(owner, number)
        if lease is not None:
            self.host.unlease_all(lease.pinned())
            lease.places = bytearray((Place.DROPPED,)) * len(lease.places)
        return lease

    def _gather(self, lease: Lease, keys: Sequence[BlockKey], skip: int) -> None:
        """Note the run's blocks; pin those in host memory now, so that making room below cannot evict them."""
        wanted = list(keys[skip:])
        on_host = self.host.find_all(wanted)
        run = on_host.index(None) if None in on_host else len(on_host)
        slots: list[int] = [slot for slot in on_host[:run] if slot is not None]
        sources, places = bytearray((Tier.HOST,)) * run, bytearray((Place.PINNED,)) * run
        if run < len(wanted) and (disk := self._disk_if_on()) is not None:
            for i in range(run, len(wanted)):
                slot = on_host[i]
                if slot is None and disk.find(wanted[i]) is None:
                    break
                slots.append(-1 if slot is None else slot)
                sources.append(Tier.DISK if slot is None else Tier.HOST)
                places.append(Place.WAITING if slot is None else Place.PINNED)
        lease.keys, lease.slots = wanted[: len(slots)], slots
        lease.sources, lease.places = sources, places
        self.host.lease_all(lease.pinned())

    def _account(self, lease: Lease, queried: int) -> None:
        hits, on_host = len(lease.slots), self.told(bytes(lease.sources)).count(Tier.HOST)
        self._metrics.add("kvbm_queried_blocks_total", queried)
        self._metrics.add("kvbm_lookups_total", outcome="hit" if hits else "miss")
        for tier, blocks in (("host", on_host), ("disk", hits - on_host)):
            self._metrics.add("kvbm_hit_blocks_total", blocks, tier=tier)
            self._metrics.add("kvbm_hit_bytes_total", blocks * self.layout.block_bytes, tier=tier)

    # ---- stores

    def reserve(
        self,
        owner: Owner,
        number: int,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        hashes: bytes = b"",
        group: int = 0,
    ) -> list[int]:
        """Slots to fill for the blocks that are not held yet; HELD or REFUSED for the others.

        `hashes` is what the engine calls each of them, 32 bytes each; empty where those are the keys.
        """
        now_s = self._clock()
        if not self.reservations.has_room(owner) or self.reservations.get(owner, number):
            self._metrics.add("kvbm_skipped_offloads_total", len(keys), reason="queue_full")
            return [REFUSED] * len(keys)
        # Staging only hands blocks on: what has reached the disk needs no place in it again.
        below = self._disk_if_on() if self.options.staging else None
        answer: list[int] = []
        mine = Reservation(owner, number, [], [], [], now_s + RESERVATION_S)
        while len(answer) < len(keys):
            run = self._missing_run(keys, len(answer), below)
            if not run:
                answer.append(HELD)
                parent = keys[len(answer) - 1]
                continue
            if parent is not None and not self._held_anywhere(parent):
                break  # without its prefix the run could never be found: do not spend slots on it
            if self.departures is not None and parent is not None:
                held = self.host.find(parent)
                if held is not None:
                    self.departures.keep(held, now_s)
            # Above a disk, host memory is the way into it: which blocks stay is decided when others need the room.
            slots = self.host.reserve_chain(run, parent, now_s, insist=self._disk_if_on() is not None)
            self._names.reserved(slots, run, hashes, len(answer), group)
            answer += slots
            mine.keys += run[: len(slots)]
            mine.parents += [parent, *run][: len(slots)]
            mine.slots += slots
            if len(slots) < len(run):
                break
            parent = run[-1]
        refused = len(keys) - len(answer)
        if refused:
            self._metrics.add("kvbm_skipped_offloads_total", refused, reason="full")
            answer += [REFUSED] * refused
        if mine.slots:
            self.reservations.add(mine)
        return answer

    def commit(self, owner: Owner, number: int, failed: Sequence[int] = ()) -> int:
        """The owner's workers filled the slots, but for those at positions `failed`; the number committed."""
        mine = self.reservations.get(owner, number)
        if mine is None or mine.condemned:
            return 0
        self.reservations.pop(owner, number)
        bad = set(range(len(mine.slots))) if mine.stale else set(failed)
        for i in reversed(range(len(mine.slots))):
            if i in bad:
                self.host.abort(mine.slots[i])
        good = [i for i in range(len(mine.slots)) if i not in bad]
        for i in good:
            self.host.commit(mine.slots[i])
        self._metrics.add("kvbm_offload_blocks_d2h", 0 if self.options.staging else len(good))
        self._metrics.add(
            "kvbm_transfer_bytes_total",
            len(good) * self.layout.shard_bytes * self.layout.shard_count,
            source="device",
            target="host",
        )
        if self.offloader is not None:
            for i in good:
                self.offloader.committed(mine.keys[i], mine.parents[i])
            self.offloader.pump()
        return len(good)

    def condemn(self, reservation: Reservation) -> None:
        """Refuse a later commit; the slots stay filling until `abort`, when no worker can write to them any more."""
        reservation.condemned = True

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation's slots back. The caller knows that nobody writes to them any more."""
        self.reservations.pop(reservation.owner, reservation.number)
        for slot in reversed(reservation.slots):
            self.host.abort(slot)

    def finished(self, key: BlockKey, output_tokens: int) -> None:
        """The request whose lookup ended with this key is through."""
        self._usage.note_end(key, output_tokens)

    def _missing_run(self, keys: Sequence[BlockKey], start: int, below: SlotPool | None) -> list[BlockKey]:
        """The keys from `start` up to one that needs no slot; distinct whatever the engine sent."""
        run: dict[BlockKey, None] = {}
        for i in range(start, len(keys)):
            key = keys[i]
            if key in run or self.host.holds(key) or (below is not None and below.holds(key)):
                break
            run[key] = None
        return list(run)

    def _held_anywhere(self, key: BlockKey) -> bool:
        return self.host.holds(key) or (self.disk is not None and self.disk.holds(key))

    def _disk_if_on(self) -> SlotPool | None:
        return self.disk if self.tier is not None and not self.tier.fault else None

    # ---- time

    def pump(self) -> None:
        """Collect completions and submit what waits. Called often; costs microseconds when there is nothing."""
        if self.tier is not None:
            assert self.onboarder is not None and self.offloader is not None
            for completion in self.tier.poll():
                if not self.onboarder.completed(completion):
                    self.offloader.completed(completion)
            self._tell_usage()
            self.onboarder.pump()
            if self.departures is not None:
                self.departures.advance(self._clock())
            self.offloader.pump()
            if self.tier.fault:
                self._heal(self.tier)
        else:
            self._tell_usage()

    def overdue(self) -> list[Reservation]:
        """End leases past their deadline; the reservations past theirs, for the owner of sessions to condemn."""
        now_s = self._clock()
        for lease in self.leases.overdue(now_s):
            self.release(lease.owner, lease.number)
            self._metrics.add("kvbm_leases_expired_total")
        return [r for r in self.reservations.overdue(now_s) if not r.condemned]

    def clear(self, tier: str = "") -> tuple[int, int]:
        """Drop every block that is not in use, of one tier or of all; (dropped, in use)."""
        if tier in ("", self.host.tier.name.lower()):
            for reservation in self.reservations:
                reservation.stale = True
        dropped = in_use = 0
        for pool in (self.host, self.disk):
            if pool is not None and tier in ("", pool.tier.name.lower()):
                gone, kept = pool.clear()
                dropped, in_use = dropped + gone, in_use + kept
        return dropped, in_use

    @property
    def busy(self) -> bool:
        """Blocks are on their way between host memory and disk."""
        queues = (self.onboarder, self.offloader)
        return any(queue is not None and queue.queued_count for queue in queues)

    def tiers(self) -> dict[str, int]:
        """Block counts of the tiers that are on, as engines are told."""
        tiers = {} if self.options.staging else {"host": self.host.slot_count}
        if (disk := self._disk_if_on()) is not None:
            tiers["disk"] = disk.slot_count
        return tiers

    def describe(self) -> dict[str, object]:
        """What `kvbm status` shows of this space."""
        tiers: dict[str, object] = {}
        for pool in (self.host, self.disk):
            if pool is not None:
                tiers[pool.tier.name.lower()] = {
                    "blocks": pool.slot_count,
                    **msgspec.structs.asdict(pool.counts()),
                }
        fault = self.tier.fault if self.tier is not None else ""
        return {"block_bytes": self.layout.block_bytes, "tiers": tiers, "fault": fault}

    def check(self) -> None:
        """Assert the conservation law in every tier."""
        for pool in (self.host, self.disk):
            if pool is not None:
                pool.check()

    def close(self, keep: bool) -> None:
        """Write what waits (bounded), release the tiers."""
        for lease in list(self.leases):
            self.release(lease.owner, lease.number)
        if self.tier is not None:
            if self.departures is not None and keep:
                self.departures.advance_all(self._clock())
            self._write_out(self.tier)
            self.tier.close(keep)
        self.arena.close()

    # ---- the tier below

    def _attach_disk(self, tier: SlotTier) -> None:
        """Build the index of the disk tier from what it recovered, and the queues to and from it."""
        policy = make_policy(self.options.eviction, tier.slot_count)
        disk = SlotPool(Tier.DISK, tier.slot_count, policy, self._disk_emptied)
        found = sorted(tier.recovered(), key=lambda block: block.sequence)
        disk.recover([(block.key, block.parent, block.slot) for block in found], self._clock())
        self.disk = disk
        between = self.host, self._names, self.arena, disk, tier
        self.onboarder = Onboarder(*between, self._metrics, self._clock, self._on_progress, self._next_job)
        self.offloader = Offloader(
            *between,
            self._admission,
            self._metrics,
            self._clock,
            self._next_job,
            self.options.in_flight_max,
            self.options.staging,
            self.departures.settled if self.departures is not None else None,
        )
        if self.departures is not None:
            self.departures.attach(self.host, self.offloader)

    def _write_out(self, tier: SlotTier) -> None:
        """Let what is queued for the tier reach it, while it gets there and at most for a few seconds."""
        assert self.offloader is not None
        deadline_s = self._clock() + CLOSE_S_MAX
        self.pump()
        waiting = self.offloader.queued_count
        while waiting and tier.drain(max(0.0, deadline_s - self._clock())):
            self.pump()
            before, waiting = waiting, self.offloader.queued_count
            if waiting >= before or self._clock() >= deadline_s:
                return

    def _heal(self, tier: SlotTier) -> None:
        """A tier that is off is tried again now and then; what it still holds is found anew."""
        now_s = self._clock()
        assert self.onboarder is not None and self.offloader is not None
        busy = self.onboarder.queued_count + self.offloader.queued_count
        if busy or now_s < self._heal_at_s:
            return
        self._heal_at_s = now_s + HEAL_INTERVAL_S
        if tier.heal():
            self.onboarder.settle()
            self._attach_disk(tier)

    def _tell_usage(self) -> None:
        if self._usage:
            self._usage.tell((self.host, self.disk), self.offloader, self._clock())

    def _next_job(self) -> int:
        return next(self._jobs)

    def _host_emptied(self, slot: int, key: BlockKey, was_resident: bool) -> None:
        self.arena.invalidate(slot)
        self._names.forget(slot)

    def _disk_emptied(self, slot: int, key: BlockKey, was_resident: bool) -> None:
        if was_resident and self.tier is not None:
            self.tier.forget(SlotIndex(slot))

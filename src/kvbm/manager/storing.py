"""Stores: slots for blocks that an engine has computed, and their commit.

A block is found only after its commit; until then its slot is filling, and belongs to a reservation.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import or_

from kvbm.block import BlockKey, Tier
from kvbm.clock import Clock
from kvbm.layout import BlockLayout
from kvbm.manager.below import Below
from kvbm.manager.deadlines import Deadlines
from kvbm.manager.departed import NO_SLOT, Departed
from kvbm.manager.disk_side import DiskSide
from kvbm.manager.downward import Downward
from kvbm.manager.leases import HoldTable, Owner, Reservation
from kvbm.manager.names import EngineNames
from kvbm.manager.pool import SlotPool
from kvbm.manager.usage import OFFERED_AT_ONCE, Usage
from kvbm.observe import moves_log
from kvbm.observe.metrics import Metrics
from kvbm.protocol import HELD, REFUSED

RESERVATION_S = 120.0


@dataclass(slots=True, eq=False, kw_only=True)
class Storing:
    """The stores of one space. Owned by the manager's thread. `staging`, `tail_groups` and `slice_blocks` are the
    space's; `full` logs that host memory is."""

    layout: BlockLayout
    host_pool: SlotPool[BlockKey]
    names: EngineNames
    disk: DiskSide | None
    below: Below
    downward: Downward
    reservations: HoldTable[Reservation]
    usage: Usage
    deadlines: Deadlines
    departed: Departed
    full: moves_log.FullPool
    staging: bool
    tail_groups: frozenset[int]
    slice_blocks: int
    metrics: Metrics
    clock: Clock

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
        """Slots to fill for the blocks that are not held yet; HELD or REFUSED for the others.

        `hashes` has the engine's own name of each of them, 32 bytes each; empty where those are the keys. `more`: these
        blocks continue those of an earlier call with this number, and are committed with them.
        `tenant` is as in `Reserve`.
        """
        now_s = self.clock()
        known = self.reservations.get(owner, number)
        if (known.condemned or not more) if known else not self.reservations.has_room(owner):
            self.metrics.add("kvbm_skipped_offloads_total", len(keys), reason="queue_full")
            return [REFUSED] * len(keys)
        # A staging area only passes blocks on: those that have reached the disk need no slot in it again.
        below = self._disk_pool_if_on() if self.staging else None
        answer: list[int] = []
        mine = known or Reservation(owner, number, [], [], [], now_s + RESERVATION_S)
        held = self._held(keys, below)
        groups = group if isinstance(group, bytes) else repeat(group, len(keys))
        tails = bytes(map(self.tail_groups.__contains__, groups))
        while len(answer) < len(keys):
            done = len(answer)
            if held[done]:
                # One of them may just have made room for a block before it: then it is lost as if a moment later.
                answer += [HELD] * (_end_of(held, done) - done)
                parent = keys[len(answer) - 1]
                continue
            run = keys[done : min(_end_of(held, done), _end_of(tails, done))]
            if parent is not None and not self._held_anywhere(parent):
                break  # without its prefix the run could never be found: do not spend slots on it
            # Host memory is the way into what is below: the policy decides when room is needed, not on entry.
            insist = self.below.takes
            slots = self.host_pool.reserve_chain(run, parent, now_s, insist, tails[done] > 0, tenant)
            self.names.reserved(slots, run, hashes, done, group)
            answer += slots
            self.deadlines.stored(parent, run[: len(slots)])
            moves_log.offloading(run[: len(slots)], "device", "host")
            mine.keys += run[: len(slots)]
            mine.parents += [parent, *run][: len(slots)]
            mine.slots += slots
            if len(slots) < len(run):
                break
            parent = run[-1]
        refused = len(keys) - len(answer)
        if refused:
            self.metrics.add("kvbm_skipped_offloads_total", refused, reason="full")
            self.departed.note(Tier.HOST, keys[len(answer) :], NO_SLOT)
            answer += [REFUSED] * refused
            self.full.skipped(refused, self.host_pool.all_in_use)
        if mine.slots and known is None:
            self.reservations.add(mine)
        return answer

    def committing(self, owner: Owner, number: int, failed: Sequence[int] = ()) -> Generator[None, None, int]:
        """The owner's workers filled the slots, except those at positions `failed`. Returns the number committed.

        In slices, the first blocks first: what is condemned or stale when its turn comes is not committed.
        """
        mine = self.reservations.get(owner, number)
        bad, done, committed = frozenset(failed), 0, 0
        short = mine is not None and len(mine.slots) <= OFFERED_AT_ONCE
        while mine is not None and not mine.condemned:
            part = mine.take(self.slice_blocks)
            good = [i for i in range(len(part.slots)) if done + i not in bad] if not mine.stale else []
            done += len(part.slots)
            if not mine.slots:
                self.reservations.pop(owner, number)
            committed += self._commit_part(part, good, short)
            if not mine.slots:
                break
            yield
        return committed

    def _commit_part(self, part: Reservation, good: Sequence[int], short: bool) -> int:
        """Commit the blocks at the positions `good`, and free the slots of the others. Returns how many were good.
        The tiers below are offered those of a `short` store at once, and learn of others later."""
        keys, parents, slots = part.keys, part.parents, part.slots
        if len(good) < len(slots):
            bad = sorted({*range(len(slots))}.difference(good), reverse=True)
            self.host_pool.abort_all([slots[i] for i in bad])
            keys, parents = [keys[i] for i in good], [parents[i] for i in good]
            slots = [slots[i] for i in good]
        self.host_pool.commit_all(slots)
        moves_log.added(len(good), "host")
        self.metrics.add("kvbm_offload_blocks_d2h", 0 if self.staging else len(good))
        size = len(good) * self.layout.shard_bytes * self.layout.shard_count
        self.metrics.add("kvbm_transfer_bytes_total", size, source="device", target="host")
        if self.downward:
            # Blocks in a staging area are safe from eviction once they are queued: that cannot wait.
            if self.staging or short:
                self.downward.committed(keys, parents)
            else:
                self.usage.note_stored(keys, parents)
            self.downward.pump()
        return len(good)

    def aborting(self, reservation: Reservation) -> Generator[None, None, None]:
        """Free a reservation's slots, the last ones first, in slices. The caller knows that no worker writes to them
        any more."""
        slots = reservation.slots
        if self.reservations.lasts(reservation):
            while slots:
                self.host_pool.abort_all(slots[: -self.slice_blocks - 1 : -1])
                del slots[-self.slice_blocks :]
                yield
            self.reservations.pop(reservation.owner, reservation.number)

    def _held(self, keys: Sequence[BlockKey], below: SlotPool[BlockKey] | None) -> bytes:
        """Which of the keys need no slot, a byte each; a key that the engine sent twice needs one only."""
        held = self.host_pool.held(keys)
        if below is not None:
            held = bytes(map(or_, held, below.held(keys)))
        if len(set(keys)) < len(keys):
            first: dict[BlockKey, int] = {}
            for i, key in enumerate(keys):
                first.setdefault(key, i)
            held = bytes(
                known or first[key] < i for i, (known, key) in enumerate(zip(held, keys, strict=True))
            )
        return held

    def _held_anywhere(self, key: BlockKey) -> bool:
        if self.host_pool.holds(key) or (self.disk is not None and self.disk.pool.holds(key)):
            return True
        return any(self.below.held([key]))

    def _disk_pool_if_on(self) -> SlotPool[BlockKey] | None:
        return self.disk.pool_if_on if self.disk is not None else None


def _end_of(held: bytes, start: int) -> int:
    """Where the flags stop being what they are at `start`."""
    end = held.find(1 - held[start], start)
    return end if end >= 0 else len(held)

"""The tiers below host memory together: which blocks are there, bringing up those that a lease wants, and their turns.

A block is brought up out of the first tier that has it: the disk, then the remote tiers in their order. Each has queues
of its own (`onboard`, `offload`, `write_behind`), so that a slow store delays nobody's reads from disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import inf

from kvbm.block import BlockKey, Tier
from kvbm.manager.disk_side import DiskSide
from kvbm.manager.downward import Downward
from kvbm.manager.host_side import HostSide
from kvbm.manager.leases import Lease, LeaseState
from kvbm.manager.offload import Offloader
from kvbm.manager.onboard import WAITING_CHECKED_EACH, Onboarder, Rising, Wanted, cut
from kvbm.manager.pool import SlotPool
from kvbm.manager.remote_side import RemoteSide

ASKED_AT_ONCE = 64
"""So many blocks are looked for in remote tiers at a time, as long as all are there."""


@dataclass(slots=True, eq=False)
class Below:
    """The tiers below one host memory, top down. Owned by the manager's thread."""

    host: HostSide
    disk: DiskSide | None
    remotes: Sequence[RemoteSide]
    brought_at_once: int
    downward: Downward = field(init=False)

    def __post_init__(self) -> None:
        self.downward = Downward(self._offloader, self.remotes)

    @property
    def sides(self) -> Sequence[DiskSide | RemoteSide]:
        """All of them."""
        return self.remotes if self.disk is None else (self.disk, *self.remotes)

    @property
    def disk_pool(self) -> SlotPool[BlockKey] | None:
        """The index of the disk, None without one that works."""
        return self.disk.pool_if_on if self.disk is not None else None

    @property
    def takes(self) -> bool:
        """Whether host memory is the way into a tier that takes blocks."""
        return self.disk_pool is not None or any(
            side.writer is not None and not side.tier.store_fault for side in self.remotes
        )

    @property
    def queued_count(self) -> int:
        """Blocks on their way between host memory and here."""
        return sum(side.queued_count for side in self.sides)

    def __bool__(self) -> bool:
        """Whether there is anything below."""
        return bool(self.sides)

    # ---- turns

    def collect(self, until_s: float = inf) -> bool:
        """Take completions; of each tier until that time, one in any case. Whether there are some left."""
        return sum(side.collect(until_s) for side in self.sides) > 0

    def advance(self) -> bool:
        """Submit queued blocks. Whether to call it again."""
        return sum(side.advance() for side in self.sides) > 0

    @property
    def wait_s_max(self) -> float:
        """How long the next turn may wait for something to happen, in seconds."""
        return self.disk.wait_s_max if self.disk is not None else inf

    def filenos(self) -> list[int]:
        """Descriptors that become readable when `collect` would take something."""
        fds = [] if self.disk is None else [self.disk.medium.fileno()]
        return fds + [remote.tier.fileno() for remote in self.remotes]

    def tick(self) -> None:
        """Called about twice a second."""
        for remote in self.remotes:
            remote.tick()

    def flush(self) -> None:
        """As the space ends: what waits to be written together with more is written now."""
        for remote in self.remotes:
            if remote.writer is not None:
                remote.writer.flush()

    def write_more(self) -> bool:
        """As the space ends: write queued blocks. Whether there is more to wait for."""
        return sum(side.write_more() for side in self.sides) > 0

    def _offloader(self) -> Offloader[BlockKey] | None:
        return self.disk.offloader if self.disk is not None else None

    def _onboarders(self) -> list[Onboarder]:
        return [side.onboarder for side in self.sides]

    # ---- what is there

    def leading(self, keys: list[BlockKey]) -> bytearray:
        """The tiers of the first of these blocks that are held below host memory, a byte each."""
        pool, tiers = self.disk_pool, bytearray()
        if pool is not None:
            on_disk = pool.find_all(keys)
            first = on_disk.index(None) if None in on_disk else len(keys)
            tiers += bytes((Tier.DISK,)) * first
        else:
            on_disk = [None] * len(keys)
        while self.remotes and len(tiers) < len(keys):
            start = len(tiers)
            for slot, away in zip(
                on_disk[start : start + ASKED_AT_ONCE],
                self.away(keys[start : start + ASKED_AT_ONCE]),
                strict=True,
            ):
                if slot is None and not away:
                    return tiers
                tiers.append(Tier.REMOTE if slot is None else Tier.DISK)
        return tiers

    def held(self, keys: list[BlockKey]) -> bytes:
        """Which of these blocks are held below host memory, a byte each."""
        pool = self.disk_pool
        held = bytearray(len(keys))
        if pool is not None:
            held[:] = bytes(slot is not None for slot in pool.find_all(keys))
        if self.remotes and 0 in held:
            absent = bytes(1 - there for there in held)
            away = iter(self.away(list(compress(keys, absent))))
            held[:] = bytes(there or next(away) for there in held)
        return bytes(held)

    def away(self, keys: list[BlockKey]) -> bytes:
        """Which of these blocks a remote tier that works has, a byte each."""
        away = bytearray(len(keys))
        for remote in self.remotes:
            for i, there in enumerate(remote.holds(keys)):
                away[i] |= there
        return bytes(away)

    # ---- bringing up

    def bring_up(self, lease: Lease, before: BlockKey | None) -> Iterator[None]:
        """Give a host slot to every block of the lease that is only below; the run ends at the first that gets none.

        `before` is the block before the run. Where the run is longer than host memory, its own end makes room for
        the blocks before. Of a long run it yields first, and after every `brought_at_once` blocks: what the lease does
        not pin may have come or gone when it goes on.
        """
        i = brought = 0
        if lease.states.count(LeaseState.ONBOARDING) > self.brought_at_once:
            yield
        while (i := lease.states.find(LeaseState.ONBOARDING, i)) >= 0:
            count = self._bring_up_some(lease, i, lease.keys[i - 1] if i else before)
            if not count:
                cut(self.host.pool, lease, i)
                return
            i, brought = i + count, brought + count
            if brought >= self.brought_at_once:
                brought = 0
                yield

    def pump(self) -> None:
        """Submit as many reads as the tiers take."""
        for onboarder in self._onboarders():
            onboarder.pump()

    def released(self) -> None:
        """A lease ended that waited for blocks."""
        for onboarder in self._onboarders():
            onboarder.released()

    def arrival_s(self, lease: Lease) -> float:
        """Expected seconds until all blocks of the newest lease are here, behind what is queued; 0 if unknown."""
        if lease.final:
            return 0.0
        sources = set(lease.sources)
        return max(
            (each.arrival_s(lease) for each in self._onboarders() if each.source.tier in sources), default=0.0
        )

    @property
    def rising_count(self) -> int:
        """Blocks that are queued or being read."""
        return sum(each.queued_count for each in self._onboarders())

    def read_s(self, blocks: int) -> float:
        """Expected seconds until so many blocks, of which nobody knows where they lie, are read; 0 if unknown."""
        return max((each.read_s(blocks) for each in self._onboarders()), default=0.0)

    def _bring_up_some(self, lease: Lease, i: int, parent: BlockKey | None) -> int:
        """The next blocks from the i-th on; how many they are."""
        filling = self.host.pool.find_filling(lease.keys[i])
        if filling is not None:
            # Where it is not on its way up, an engine is storing the same block right now.
            run = self.host.rising.get(filling)
            return _join(run, lease, i, int(filling)) if run is not None else 0
        slot = self.host.pool.find(lease.keys[i])
        if slot is None:
            return self._enqueue(lease, i, parent)
        self.host.pool.lease(slot)  # it came since the lookup began
        lease.slots[i], lease.states[i] = slot, LeaseState.PINNED
        return 1

    def _enqueue(self, lease: Lease, i: int, parent: BlockKey | None) -> int:
        """Queue the blocks from the i-th on that are only below; how many got host slots."""
        wanted = self._only_below(lease, i)
        for onboarder in self._onboarders():
            if places := onboarder.source.leading(wanted):
                break
        else:
            return 0
        keys = wanted[: len(places)]
        # It may be another tier than where the lookup found them.
        lease.sources[i : i + len(keys)] = bytes((onboarder.source.tier,)) * len(keys)
        while not (count := onboarder.enqueue(lease, i, keys, places, parent)):
            if not self._give_back(lease, i + len(keys), len(keys)):
                break
        return count

    def _give_back(self, lease: Lease, start: int, count: int) -> bool:
        """End the lease before the last `count` blocks from `start` on that are in host memory; False when none are."""
        end = len(lease.states)
        for _ in range(count):
            if (last := lease.states.rfind(LeaseState.PINNED, start, end)) < 0:
                break
            end = last
        if end == len(lease.states):
            return False
        cut(self.host.pool, lease, end)
        return True

    def _only_below(self, lease: Lease, i: int) -> list[BlockKey]:
        """The blocks from the i-th on that are neither in host memory nor on their way there."""
        states = lease.states
        end = len(states) - len(states[i:].lstrip(_ONBOARDING))
        keys = lease.keys[i : min(end, i + self.brought_at_once)]
        if self.host.pool.holds_any(keys):
            keys = keys[: next(n for n, key in enumerate(keys) if self.host.pool.holds(key))]
        return keys


def _join(run: Rising, lease: Lease, i: int, host_slot: int) -> int:
    """Wait for a block that is on its way to this slot, and for those behind it; how many they are."""
    place = run.host_slots.index(host_slot)
    wanted = lease.keys[i : i + len(run.keys) - place]
    count = len(wanted)
    if run.keys[place : place + count] != wanted or lease.states[i : i + count].strip(_ONBOARDING):
        same = (
            run.keys[place + n] == wanted[n] and lease.states[i + n] == LeaseState.ONBOARDING
            for n in range(count)
        )
        count = next((n for n, is_same in enumerate(same) if not is_same), count)
    lease.slots[i : i + count] = run.host_slots[place : place + count]
    if len(run.waiting) % WAITING_CHECKED_EACH == 0:
        # A tier that hangs must not keep all the leases that were taken and given up meanwhile.
        run.waiting = [each for each in run.waiting if each.still()]
    run.waiting.append(Wanted(lease, i, place, count))
    return count


_ONBOARDING = bytes((LeaseState.ONBOARDING,))

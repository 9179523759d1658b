"""G3, G4 → G2: bring leased blocks up out of one tier, in the order in which they will be needed.

The unit is a run: blocks of a chain whose places follow one another where they lie, and from a disk their slots in host
memory too. Each of its blocks fills one host slot and is pinned where it lies. Leases that want the same blocks wait
for them together. A run that the tier refuses for now stays queued; a block that fails is dropped from both tiers, as a
miss, and costs no other block. `below` says which tier a block is brought out of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from kvbm.block import BlockKey, Outcome, Tier
from kvbm.clock import Clock
from kvbm.manager.leases import Lease, LeaseState
from kvbm.manager.names import EngineNames
from kvbm.manager.pool import SlotPool
from kvbm.manager.read_rate import ReadRate
from kvbm.manager.slot_facts import SlotFacts
from kvbm.manager.sources import Source
from kvbm.observe import moves_log
from kvbm.observe.metrics import Metrics
from kvbm.tiers.contract import BlockEnd, Completion

LOOKED_AT_MAX = 512
"""Queued runs among which a new lease's last one is looked for, from the end."""
UNREAD_MAX = 1024
"""Blocks that leave the queue unread in one go, or a run of them."""
DOUBTED_AT_ONCE = 64
"""Queued runs that are looked at in one go for whether a lease still waits for them."""
WAITING_CHECKED_EACH = 64
"""After so many leases that joined a read, those that have ended are dropped from it."""


class Wanted(NamedTuple):
    """A lease that waits for `length` blocks of a run from `place` on; the first of them is its block `start`."""

    lease: Lease
    start: int
    place: int
    length: int

    def still(self) -> int:
        """How many of them it still waits for: the first ones, because a lease is cut from its end."""
        return self.lease.states.count(LeaseState.ONBOARDING, self.start, self.start + self.length)


@dataclass(slots=True, eq=False)
class Rising:
    """A run that is queued or being read: into these host slots, from the places from `place` on, for the leases that
    want blocks of it, since when; it is not begun after `until_s`. `tenant` is whose it is, None where nobody knows."""

    keys: list[BlockKey]
    host_slots: Sequence[int]
    place: int
    waiting: list[Wanted]
    since_s: float
    until_s: float
    tenant: str | None = None
    queued: bool = True
    """Not being read yet."""

    @property
    def places(self) -> range:
        return range(self.place, self.place + len(self.keys))

    def wanted(self) -> tuple[int, int]:
        """The first place of a block that a lease still waits for, and the one after the last; equal for none."""
        spans = [(each.place, each.place + still) for each in self.waiting if (still := each.still())]
        if not spans:
            return 0, 0
        return min(first for first, _ in spans), max(end for _, end in spans)

    def part(self, first: int, end: int) -> Rising:
        """The blocks from `first` to before `end`."""
        waiting = []
        for lease, start, place, length in self.waiting:
            low, high = max(place, first), min(place + length, end)
            if low < high:
                waiting.append(Wanted(lease, start + low - place, low - first, high - low))
        slots = self.host_slots[first:end]
        return Rising(
            self.keys[first:end], slots, self.place + first, waiting, self.since_s, self.until_s, self.tenant
        )


@dataclass(slots=True, eq=False)
class Onboarder:
    """The queue of runs on their way up out of one source. Owned by the manager's thread.

    `rising` has the run that fills each host slot, for all sources of one host memory.
    """

    host_pool: SlotPool[BlockKey]
    source: Source
    rising: dict[int, Rising]
    names: EngineNames
    facts: SlotFacts
    metrics: Metrics
    clock: Clock
    on_progress: Callable[[Lease], None]
    job_ids: Iterator[int]
    brought_at_once: int
    _blocks: int = field(default=0, init=False)
    _queue: deque[Rising] = field(default_factory=deque, init=False)
    _in_flight: dict[int, Rising] = field(default_factory=dict, init=False)
    # Queued runs that may be wanted no more, the last one first to be looked at; and whether leases ended since.
    _doubted: list[Rising] = field(default_factory=list, init=False)
    _doubt_again: bool = field(default=False, init=False)
    _rate: ReadRate = field(default_factory=ReadRate, init=False)
    # Host slots of failed reads that the medium may still write to.
    _unusable: list[int] = field(default_factory=list, init=False)

    @property
    def queued_count(self) -> int:
        """Blocks that are queued or being read."""
        return self._blocks

    def oldest_s(self) -> float:
        """How long the oldest block has waited for its turn and for the disk, in seconds; 0 without any."""
        while self._queue and not self._queue[0].keys:
            self._queue.popleft()  # given up
        run = next(chain(self._in_flight.values(), self._queue), None)
        return 0.0 if run is None else self.clock() - run.since_s

    def arrival_s(self, lease: Lease) -> float:
        """Expected seconds until all blocks of the newest lease are here, behind what is queued; 0 if unknown."""
        if lease.final:
            return 0.0
        behind = 0  # where it only waits for what others asked for, much may be queued behind that
        for run in islice(reversed(self._queue), LOOKED_AT_MAX):
            if run.waiting[-1].lease is lease:
                break
            behind += len(run.keys)
        return self.read_s(self.queued_count - behind)

    def read_s(self, blocks: int) -> float:
        """Expected seconds until so many blocks are read; 0 if unknown."""
        return max(self._rate.seconds_for(blocks), self.source.expected_s(blocks)) if blocks else 0.0

    def enqueue(
        self, lease: Lease, i: int, keys: list[BlockKey], places: list[int], parent: BlockKey | None
    ) -> int:
        """Queue the lease's blocks from the i-th on, which lie at these places; how many got host slots."""
        now_s, tail = self.clock(), self.source.is_tail(places[0])
        # Loads go through host memory, whatever its policy says of the blocks.
        host_slots: Sequence[int] = self.host_pool.reserve_chain(
            keys, parent, now_s, True, tail, lease.tenant
        )
        count = len(host_slots)
        if not count:
            return 0
        places = places[:count]
        self.source.pin(places)
        lease.slots[i : i + count] = host_slots
        moves_log.onboarding(count, self.source.tier.name.lower(), "host")
        until_s = now_s + self.source.patience_s(self.read_s(self.queued_count + count))
        for first, end in _neighbours(host_slots, places, self.source.run_blocks_max, self.source.scattered):
            waiting = [Wanted(lease, i + first, 0, end - first)]
            run = Rising(
                keys[first:end], host_slots[first:end], places[first], waiting, now_s, until_s, lease.tenant
            )
            self.rising.update(dict.fromkeys(run.host_slots, run))
            self._queue.append(run)
        self._blocks += count
        return count

    def pump(self) -> bool:
        """Submit as many runs as the tier takes. True when it stopped before that, as it met too many blocks that are
        not read: call it again."""
        unread = self._drop_abandoned()
        while self._queue and self.source.room:
            if unread >= UNREAD_MAX:
                return True
            queued = self._queue.popleft()
            queued.queued = False
            if not queued.keys:
                continue
            if queued.until_s <= self.clock():  # whoever waits for it computes by now
                self._finish(queued, [BlockEnd(Outcome.THROTTLED)] * len(queued.keys))
                unread += len(queued.keys)
                continue
            run = self._trimmed(queued)
            if run is None:
                unread += len(queued.keys)
                continue
            job_id = next(self.job_ids)
            outcome = self.source.submit(job_id, run.keys, run.place, run.host_slots, run.tenant)
            if outcome is Outcome.THROTTLED:
                run.queued = True
                self._queue.appendleft(run)
                return bool(self._doubted)
            if outcome is Outcome.PENDING:
                self._in_flight[job_id] = run
                self._rate.submitted(len(run.keys), self.clock())
            else:
                self._finish(run, [BlockEnd(outcome)] * len(run.keys))
                unread += len(run.keys)
        return bool(self._doubted)

    def released(self) -> None:
        """A lease ended that waited for blocks: runs that nobody waits for any more shall not keep their host slots."""
        self._doubt_again = True

    def _drop_abandoned(self) -> int:
        """Look at some of the queued runs, and give up those that no lease waits for; how many blocks those had."""
        if not self._doubted and self._doubt_again:
            self._doubted, self._doubt_again = list(self._queue), False
        unread = 0
        for _ in range(min(DOUBTED_AT_ONCE, len(self._doubted))):
            run = self._doubted.pop()
            if run.queued and run.keys and run.wanted() == (0, 0):
                unread += len(run.keys)
                self._finish(run, [BlockEnd(Outcome.THROTTLED)] * len(run.keys))
                run.keys = []  # its place in the queue is left when its turn comes
            if unread >= UNREAD_MAX:
                break
        return unread

    def _trimmed(self, run: Rising) -> Rising | None:
        """The run without the blocks at its ends that nobody waits for any more: the tier is not spent on those."""
        first, end = run.wanted()
        if (first, end) == (0, len(run.keys)):
            return run
        for gone in (run.part(end, len(run.keys)), run.part(0, first)):
            if gone.keys:
                self._finish(gone, [BlockEnd(Outcome.THROTTLED)] * len(gone.keys))
        if first == end:
            return None
        run = run.part(first, end)
        self.rising.update(dict.fromkeys(run.host_slots, run))
        return run

    def completed(self, completion: Completion) -> bool:
        """Take a completion; False when it is not of a read."""
        run = self._in_flight.pop(completion.job_id, None)
        if run is None:
            return False
        self._rate.ended(len(run.keys), self.clock())
        tier = self.source.tier.name.lower()
        if completion.bytes_moved:
            bytes_moved = completion.bytes_moved
            self.metrics.add("kvbm_transfer_bytes_total", bytes_moved, source=tier, target="host")
            self.metrics.observe("kvbm_transfer_seconds", completion.seconds, source=tier, target="host")
            self.metrics.observe("kvbm_transfer_size_bytes", bytes_moved, source=tier, target="host")
        ends = completion.blocks
        # Strict: a block whose end a tier does not tell must never count as one that came.
        for slot, key, end in zip(run.host_slots, run.keys, ends, strict=True):
            if end.outcome is Outcome.HIT:
                self.names.brought(slot, key, end.engine_hash, end.group)
                if end.facts:
                    self.facts.brought(slot, end.engine_hash or key, end.facts)
            elif end.corrupt or end.outcome is Outcome.RETRY or self.source.tier is not Tier.REMOTE:
                # That a block has gone from a store that others share is no failure.
                self.metrics.add("kvbm_failures_total", tier=tier, kind="corrupt" if end.corrupt else "io")
        if self.source.tier is Tier.REMOTE:
            failed = sum(end.outcome is not Outcome.HIT for end in ends)
            self.metrics.add("kvbm_object_read_failures", failed)
        self._finish(run, ends, completion.still_in_use)
        return True

    def give_up(self) -> None:
        """The tier does not get on: leases wait no longer for what is queued or being read. Reads that were begun
        end when they end, and their blocks are of use to others then."""
        while self._queue:
            run = self._queue.popleft()
            run.queued = False
            if run.keys:
                self._finish(run, [BlockEnd(Outcome.RETRY)] * len(run.keys))
        for run in self._in_flight.values():
            waiting, run.waiting = run.waiting, []
            for wanted in waiting:
                self._answer(run, wanted, range(len(run.keys)))

    def healed(self) -> None:
        """The tier works again: nothing writes any more to the host slots of reads that failed without an end."""
        lost, self._unusable = self._unusable, []
        self.host_pool.abort_all(lost)

    def _finish(self, run: Rising, ends: Sequence[BlockEnd], in_use: bool = False) -> None:
        """The read of a run has ended, or there will be none. `in_use`: the medium may still write to its slots."""
        for slot in run.host_slots:
            del self.rising[slot]
        self._blocks -= len(run.keys)
        self.source.unpin(run.places)
        missed = [place for place, end in enumerate(ends) if end.outcome is not Outcome.HIT]
        hits: Sequence[int] = run.host_slots
        if missed:
            hits = [run.host_slots[place] for place, end in enumerate(ends) if end.outcome is Outcome.HIT]
        self.host_pool.commit_all(hits)
        lost = [run.host_slots[place] for place in reversed(missed)]  # a chain's last block first
        if in_use:
            self._unusable += lost  # they stay filling: no blocks may go there yet
        else:
            self.host_pool.abort_all(lost)
        for place in reversed(missed):
            if ends[place].outcome is Outcome.MISS:
                self.source.missed(run.place + place, run.keys[place], ends[place].corrupt)
        for wanted in run.waiting:
            self._answer(run, wanted, missed)

    def _answer(self, run: Rising, wanted: Wanted, missed: Sequence[int]) -> None:
        """Tell a lease how the blocks that it waits for have ended: the first that failed ends its run."""
        lease, start, first, _ = wanted
        still = wanted.still()
        if not still:
            return  # released meanwhile
        end = next((place for place in missed if first <= place < first + still), first + still)
        arrived = end - first
        if arrived:
            self.host_pool.lease_all(run.host_slots[first:end])
            lease.states[start : start + arrived] = _PINNED * arrived
        if arrived < still:
            cut(self.host_pool, lease, start + arrived)
        if lease.advance() or arrived < still:
            self.on_progress(lease)


def cut(host_pool: SlotPool[BlockKey], lease: Lease, index: int) -> None:
    """The run ends before `index`: give back the lease's slots from there on."""
    states, slots = lease.states, lease.slots
    pinned = [slots[i] for i in range(index, len(slots)) if states[i] == LeaseState.PINNED]
    host_pool.unlease_all(pinned)
    states[index:] = _DROPPED * (len(states) - index)
    del slots[index:], lease.keys[index:], lease.sources[index:]


_PINNED, _DROPPED = (bytes((state,)) for state in (LeaseState.PINNED, LeaseState.DROPPED))


def _neighbours(
    host_slots: Sequence[int], places: Sequence[int], length_max: int, scattered: bool
) -> Iterable[tuple[int, int]]:
    """Where to split a chain so that in each part, as (first, end), the places follow one another, and the host slots
    too unless those may be scattered."""
    first, total = 0, len(host_slots)
    while first < total:
        host, place = host_slots[first], places[first]
        end = min(first + length_max, total)
        # Comparing slices takes no step of Python for each block, and mostly finds what it hopes for.
        near = scattered or host_slots[first:end] == list(range(host, host + end - first))
        if not near or places[first:end] != list(range(place, place + end - first)):
            end = first + 1
            while places[end] == place + end - first and (scattered or host_slots[end] == host + end - first):
                end += 1
        yield first, end
        first = end

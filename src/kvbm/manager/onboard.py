"""G3 → G2: bring leased blocks up, in the order in which they will be needed.

The unit is a run: blocks of a chain whose slots follow one another on disk and in host memory. Each of its blocks fills
one host slot and pins its disk slot. Leases that want the same blocks wait for them together. A run that the disk
refuses for now stays queued; a block that fails is dropped from both tiers, as a miss, and costs no other block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from kvbm.block import BlockKey, Outcome, SlotIndex, alike
from kvbm.clock import Clock
from kvbm.manager.leases import Lease, LeaseState
from kvbm.manager.names import EngineNames
from kvbm.manager.pool import CORRUPT, MISSING, SlotPool
from kvbm.manager.read_rate import ReadRate
from kvbm.manager.slot_facts import SlotFacts
from kvbm.observe import moves_log
from kvbm.observe.metrics import Metrics
from kvbm.tiers.contract import BlockEnd, Completion, RunTier
from kvbm.tiers.host import HostArena

LOOKED_AT_MAX = 512
"""Queued runs among which a new lease's last one is looked for, from the end."""
UNREAD_MAX = 1024
"""Blocks that leave the queue unread in one go, or a run of them."""
DOUBTED_AT_ONCE = 64
"""Queued runs that are looked at in one go for whether a lease still waits for them."""
WAITING_CHECKED_EACH = 64
"""After so many leases that joined a read, those that have ended are dropped from it."""


class _Wanted(NamedTuple):
    """A lease that waits for `length` blocks of a run from `place` on; the first of them is its block `start`."""

    lease: Lease
    start: int
    place: int
    length: int

    def still(self) -> int:
        """How many of them it still waits for: the first ones, because a lease is cut from its end."""
        return self.lease.states.count(LeaseState.ONBOARDING, self.start, self.start + self.length)


@dataclass(slots=True, eq=False)
class _Rising:
    """A run that is queued or being read, in slots from these on, the leases that want blocks of it, and since when."""

    keys: list[BlockKey]
    host_slot: int
    disk_slot: int
    waiting: list[_Wanted]
    since_s: float
    queued: bool = True
    """Not being read yet."""

    @property
    def host_slots(self) -> range:
        return range(self.host_slot, self.host_slot + len(self.keys))

    @property
    def disk_slots(self) -> range:
        return range(self.disk_slot, self.disk_slot + len(self.keys))

    def wanted(self) -> tuple[int, int]:
        """The first place of a block that a lease still waits for, and the one after the last; equal for none."""
        spans = [(each.place, each.place + still) for each in self.waiting if (still := each.still())]
        if not spans:
            return 0, 0
        return min(first for first, _ in spans), max(end for _, end in spans)

    def part(self, first: int, end: int) -> _Rising:
        """The blocks from `first` to before `end`."""
        waiting = []
        for lease, start, place, length in self.waiting:
            low, high = max(place, first), min(place + length, end)
            if low < high:
                waiting.append(_Wanted(lease, start + low - place, low - first, high - low))
        slots = self.host_slot + first, self.disk_slot + first
        return _Rising(self.keys[first:end], *slots, waiting, self.since_s)


@dataclass(slots=True, eq=False)
class Onboarder:
    """The queue of runs on their way up. Owned by the manager's thread."""

    host_pool: SlotPool[BlockKey]
    disk_pool: SlotPool[BlockKey]
    medium: RunTier
    arena: HostArena
    names: EngineNames
    facts: SlotFacts
    metrics: Metrics
    clock: Clock
    on_progress: Callable[[Lease], None]
    job_ids: Iterator[int]
    brought_at_once: int
    on_corrupt: Callable[[Sequence[BlockKey]], None] | None = None
    _by_host_slot: dict[int, _Rising] = field(default_factory=dict, init=False)
    _queue: deque[_Rising] = field(default_factory=deque, init=False)
    _in_flight: dict[int, _Rising] = field(default_factory=dict, init=False)
    # Queued runs that may be wanted no more, the last one first to be looked at; and whether leases ended since.
    _doubted: list[_Rising] = field(default_factory=list, init=False)
    _doubt_again: bool = field(default=False, init=False)
    _rate: ReadRate = field(default_factory=ReadRate, init=False)
    # Host slots of failed reads that the medium may still write to.
    _unusable: list[int] = field(default_factory=list, init=False)

    @property
    def queued_count(self) -> int:
        """Blocks that are queued or being read."""
        return len(self._by_host_slot)

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
        return self._rate.seconds_for(self.queued_count - behind)

    def read_s(self, blocks: int) -> float:
        """Expected seconds until so many blocks are read; 0 if unknown."""
        return self._rate.seconds_for(blocks)

    def bring_up(self, lease: Lease, before: BlockKey | None) -> Iterator[None]:
        """Give a host slot to every block of the lease that is only on disk; the run ends at the first that gets none.

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
                self._cut(lease, i)
                return
            i, brought = i + count, brought + count
            if brought >= self.brought_at_once:
                brought = 0
                yield

    def _bring_up_some(self, lease: Lease, i: int, parent: BlockKey | None) -> int:
        """The next blocks from the i-th on; how many they are."""
        filling = self.host_pool.find_filling(lease.keys[i])
        if filling is not None:
            # Where it is not on its way up, an engine is storing the same block right now.
            return self._join(lease, i, int(filling)) if filling in self._by_host_slot else 0
        slot = self.host_pool.find(lease.keys[i])
        if slot is None:
            return self._enqueue(lease, i, parent)
        self.host_pool.lease(slot)  # it came since the lookup began
        lease.slots[i], lease.states[i] = slot, LeaseState.PINNED
        return 1

    def _join(self, lease: Lease, i: int, host_slot: int) -> int:
        """Wait for a block that is on its way to this slot, and for those behind it; how many they are."""
        run = self._by_host_slot[host_slot]
        place = host_slot - run.host_slot
        wanted = lease.keys[i : i + len(run.keys) - place]
        count = len(wanted)
        if run.keys[place : place + count] != wanted or lease.states[i : i + count].strip(_ONBOARDING):
            same = (
                run.keys[place + n] == wanted[n] and lease.states[i + n] == LeaseState.ONBOARDING
                for n in range(count)
            )
            count = next((n for n, is_same in enumerate(same) if not is_same), count)
        lease.slots[i : i + count] = range(host_slot, host_slot + count)
        if len(run.waiting) % WAITING_CHECKED_EACH == 0:
            # A disk that hangs must not keep all the leases that were taken and given up meanwhile.
            run.waiting = [each for each in run.waiting if each.still()]
        run.waiting.append(_Wanted(lease, i, place, count))
        return count

    def _enqueue(self, lease: Lease, i: int, parent: BlockKey | None) -> int:
        """Queue the blocks from the i-th on that are only on disk; how many got host slots."""
        keys, disk_slots = self._only_on_disk(lease, i)
        # Loads from disk go through host memory, whatever its policy says of the blocks.
        now_s = self.clock()
        tail = bool(disk_slots) and self.disk_pool.is_tail(disk_slots[0])
        whose = lease.tenant
        reserve = partial(self.host_pool.reserve_chain, keys, parent, now_s, True, tail, whose)
        host_slots = reserve()
        while not host_slots and self._give_back(lease, i + len(keys), len(keys)):
            host_slots = reserve()
        count = len(host_slots)
        disk_slots = disk_slots[:count]
        self.disk_pool.lease_all(disk_slots)
        lease.slots[i : i + count] = host_slots
        if count:
            moves_log.onboarding(count, "disk", "host")
        for first, end in _neighbours(host_slots, disk_slots, self.medium.run_blocks_max):
            waiting = [_Wanted(lease, i + first, 0, end - first)]
            run = _Rising(keys[first:end], host_slots[first], disk_slots[first], waiting, now_s)
            self._by_host_slot.update(dict.fromkeys(run.host_slots, run))
            self._queue.append(run)
        return count

    def _give_back(self, lease: Lease, start: int, count: int) -> bool:
        """End the lease before the last `count` blocks from `start` on that are in host memory; False when none are."""
        cut = len(lease.states)
        for _ in range(count):
            if (last := lease.states.rfind(LeaseState.PINNED, start, cut)) < 0:
                break
            cut = last
        if cut == len(lease.states):
            return False
        self._cut(lease, cut)
        return True

    def _only_on_disk(self, lease: Lease, i: int) -> tuple[list[BlockKey], list[int]]:
        """The blocks from the i-th on that are on disk, and neither in host memory nor on their way there; distinct,
        and all of a tail or all not."""
        states = lease.states
        end = len(states) - len(states[i:].lstrip(_ONBOARDING))
        keys = lease.keys[i : min(end, i + self.brought_at_once)]
        if self.host_pool.holds_any(keys):
            keys = keys[: next(n for n, key in enumerate(keys) if self.host_pool.holds(key))]
        disk_slots = self.disk_pool.find_leading(keys)
        disk_slots = disk_slots[: alike(self.disk_pool.tails, disk_slots)]
        keys = keys[: len(disk_slots)]
        if len(set(disk_slots)) < len(
            disk_slots
        ):  # no engine's chain has a block twice, a hostile client's may
            before: set[int] = set()
            for slot in disk_slots:
                if slot in before:
                    break
                before.add(slot)
            keys, disk_slots = keys[: len(before)], disk_slots[: len(before)]
        return keys, disk_slots

    def pump(self) -> bool:
        """Submit as many runs as the disk takes. True when it stopped before that, as it met too many blocks that are
        not read: call it again."""
        unread = self._drop_abandoned()
        while self._queue and self.medium.load_room:
            if unread >= UNREAD_MAX:
                return True
            queued = self._queue.popleft()
            queued.queued = False
            if not queued.keys:
                continue
            run = self._trimmed(queued)
            if run is None:
                unread += len(queued.keys)
                continue
            job_id = next(self.job_ids)
            targets = self.arena.slot_views(run.host_slot, len(run.keys))
            outcome = self.medium.submit_load_run(job_id, run.keys, SlotIndex(run.disk_slot), targets)
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

    def give_up(self) -> None:
        """No lease waits for anything any more: the runs that are not being read leave the queue."""
        queued, self._queue = self._queue, deque()
        for run in queued:
            if run.keys:
                self._finish(run, [BlockEnd(Outcome.THROTTLED)] * len(run.keys))

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

    def _trimmed(self, run: _Rising) -> _Rising | None:
        """The run without the blocks at its ends that nobody waits for any more: the disk is not spent on those."""
        first, end = run.wanted()
        if (first, end) == (0, len(run.keys)):
            return run
        for gone in (run.part(end, len(run.keys)), run.part(0, first)):
            if gone.keys:
                self._finish(gone, [BlockEnd(Outcome.THROTTLED)] * len(gone.keys))
        if first == end:
            return None
        run = run.part(first, end)
        self._by_host_slot.update(dict.fromkeys(run.host_slots, run))
        return run

    def completed(self, completion: Completion) -> bool:
        """Take a completion; False when it is not of a read."""
        run = self._in_flight.pop(completion.job_id, None)
        if run is None:
            return False
        self._rate.ended(len(run.keys), self.clock())
        if completion.bytes_moved:
            bytes_moved = completion.bytes_moved
            self.metrics.add("kvbm_transfer_bytes_total", bytes_moved, source="disk", target="host")
            self.metrics.observe("kvbm_transfer_seconds", completion.seconds, source="disk", target="host")
            self.metrics.observe("kvbm_transfer_size_bytes", bytes_moved, source="disk", target="host")
        ends = completion.ends
        # Strict: a block whose end a tier does not tell must never count as one that came.
        for slot, key, end in zip(run.host_slots, run.keys, ends, strict=True):
            if end.outcome is Outcome.HIT:
                self.names.brought(slot, key, end.engine_hash, end.group)
                if end.facts:
                    self.facts.brought(slot, end.engine_hash or key, end.facts)
            else:
                self.metrics.add("kvbm_failures_total", tier="disk", kind="corrupt" if end.corrupt else "io")
        self._finish(run, ends, completion.still_in_use)
        return True

    def healed(self) -> None:
        """The disk works again: nothing writes any more to the host slots of reads that failed without an end."""
        lost, self._unusable = self._unusable, []
        self.host_pool.abort_all(lost)

    def _finish(self, run: _Rising, ends: Sequence[BlockEnd], in_use: bool = False) -> None:
        """The read of a run has ended, or there will be none. `in_use`: the medium may still write to its slots."""
        for slot in run.host_slots:
            del self._by_host_slot[slot]
        self.disk_pool.unlease_all(run.disk_slots)
        missed = [place for place, end in enumerate(ends) if end.outcome is not Outcome.HIT]
        hits: Sequence[int] = run.host_slots
        if missed:
            hits = [run.host_slot + place for place, end in enumerate(ends) if end.outcome is Outcome.HIT]
        self.host_pool.commit_all(hits)
        lost = [run.host_slot + place for place in reversed(missed)]  # a chain's last block first
        if in_use:
            self._unusable += lost  # they stay filling: no blocks may go there yet
        else:
            self.host_pool.abort_all(lost)
        for place in reversed(missed):
            disk_slot = run.disk_slot + place
            if ends[place].outcome is Outcome.MISS and not self.disk_pool.is_leased(disk_slot):
                self.disk_pool.evict(disk_slot, CORRUPT if ends[place].corrupt else MISSING)
            if ends[place].corrupt and self.on_corrupt is not None:
                self.on_corrupt((run.keys[place],))
        for wanted in run.waiting:
            self._answer(run, wanted, missed)

    def _answer(self, run: _Rising, wanted: _Wanted, missed: Sequence[int]) -> None:
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
            self._cut(lease, start + arrived)
        if lease.advance() or arrived < still:
            self.on_progress(lease)

    def _cut(self, lease: Lease, index: int) -> None:
        """The run ends before `index`: give back the lease's slots from there on."""
        states, slots = lease.states, lease.slots
        pinned = [slots[i] for i in range(index, len(slots)) if states[i] == LeaseState.PINNED]
        self.host_pool.unlease_all(pinned)
        states[index:] = _DROPPED * (len(states) - index)
        del slots[index:], lease.keys[index:], lease.sources[index:]


_ONBOARDING, _PINNED, _DROPPED = (bytes((state,)) for state in LeaseState)


def _neighbours(
    host_slots: Sequence[int], disk_slots: Sequence[int], length_max: int
) -> Iterable[tuple[int, int]]:
    """Where to split a chain so that in each part, as (first, end), the slots follow one another in both tiers."""
    first, total = 0, len(host_slots)
    while first < total:
        host, disk = host_slots[first], disk_slots[first]
        end = min(first + length_max, total)
        # Comparing slices takes no step of Python for each block, and mostly finds what it hopes for.
        if host_slots[first:end] != list(range(host, host + end - first)) or disk_slots[first:end] != list(
            range(disk, disk + end - first)
        ):
            end = first + 1
            while host_slots[end] == host + end - first and disk_slots[end] == disk + end - first:
                end += 1
        yield first, end
        first = end

"""The manager as a state machine against a dict oracle.

Engines reserve, write, commit, fail, come too late and die; leases and reservations run out; the tier below completes
when it likes, throttles, corrupts, breaks and heals; the manager restarts, in order or killed. After every step: the
conservation law, every lease intact, and every block that can be found has exactly the bytes of one of its commits.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvbm.block import BlockKey
from kvbm.clock import ManualClock
from kvbm.hashing import chain_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.disk_health import HEAL_S_MAX
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.leases import Lease, Reservation
from kvbm.manager.lookups import LEASE_S, LookingUp
from kvbm.manager.space import Space
from kvbm.manager.storing import RESERVATION_S
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmitAll, DiskFilter
from kvbm.protocol import HELD, REFUSED
from kvbm.slices import advance
from kvbm.testing.oracle import BlockOracle, block_bytes
from kvbm.tiers.contract import RunTier
from kvbm.tiers.host import HostArena
from model.manager_laws import ManagerLaws
from rigs.fake_tier import FakeTier

LAYOUT = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
NAMESPACE = Namespace(model="model/machine", fields=(("weights", "1"),))
HOST_SLOTS = 6
DISK_SLOTS = 8
OWNERS = (1, 2, 3)
SETTLE_STEPS = 200


def _tokens(*runs: int) -> list[int]:
    return [token for run in runs for token in range(run * 100, run * 100 + LAYOUT.block_tokens)]


CHAINS: list[list[BlockKey]] = [
    chain_keys(NAMESPACE.fingerprint, _tokens(*runs), LAYOUT.block_tokens)
    for runs in ((1, 2, 3, 4, 5), (1, 2, 6, 7), (1, 8), (9, 10, 11), (12,))
]
"""Three prompts with a common beginning, and two of their own."""

chains = st.integers(0, len(CHAINS) - 1)
owners = st.sampled_from(OWNERS)
positions = st.integers(0, 4)
starts = st.sampled_from([0, 0, 0, 1, 2, 3])
pick = st.integers(0, 1000)


@dataclass
class Writer:
    """A reservation as the workers of its owner see it: they write when they like, until they answered the fence."""

    reservation: Reservation
    written: dict[int, bytes] = field(default_factory=dict)


class ManagerMachine(ManagerLaws):
    """One space over real host memory; subclasses say what is below."""

    options = SpaceOptions(in_flight_max=4, brought_at_once=1, slice_blocks=1, found_at_once=1)

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1000.0)
        self.oracle = BlockOracle()
        self.nonce = 0
        self.number = 0
        self.writers: dict[tuple[int, int], Writer] = {}
        self.fenced: list[Writer] = []
        self.promised: dict[tuple[int, int], tuple[int, ...]] = {}
        self.looking: dict[tuple[int, int], LookingUp] = {}
        self.committing: dict[tuple[int, int], tuple[Writer, Generator[None, None, int]]] = {}
        self.admit_all = True
        self.calm_steps = 0
        self.metrics = Metrics()

    @initialize(admit_all=st.sampled_from([True, True, False]))
    def start(self, admit_all: bool) -> None:
        self.admit_all = admit_all
        self._open()

    # ---- what a subclass says

    def make_tier(self) -> RunTier | None:
        raise NotImplementedError

    @property
    def fake(self) -> FakeTier:
        assert isinstance(self.tier, FakeTier)
        return self.tier

    def _open(self) -> None:
        self.tier = self.make_tier()
        self.arena = HostArena(LAYOUT, HOST_SLOTS, touch_threads=0)
        self.space = Space(
            LAYOUT,
            self.arena,
            self.tier,
            AdmitAll() if self.admit_all else DiskFilter(self.clock()),
            self.metrics,
            self.clock,
            self._progressed,
            self.options,
        )
        for pool in self.space.pools:
            pool.found_at_once = pool.offered_at_once = 1
        self.last_ready: dict[tuple[int, int], int] = {}
        self.holders: dict[int, tuple[BlockKey | None, int]] = {}

    def _progressed(self, lease: Lease) -> None:
        """The progress that a leader gets: never less than before, never more than there is."""
        key = (lease.owner, lease.number)
        assert self.last_ready.get(key, 0) <= lease.ready <= len(lease.slots)
        self.last_ready[key] = lease.ready

    def _next(self) -> int:
        self.number += 1
        return self.number

    @property
    def calm(self) -> bool:
        """Long enough since the last disaster for something to have been built up again."""
        return self.calm_steps >= 8

    # ---- engines look up

    @rule(owner=owners, chain=chains, length=positions, skip=starts)
    def lookup(self, owner: int, chain: int, length: int, skip: int) -> None:
        keys = CHAINS[chain][: length + 1]
        skip = min(skip, len(keys))
        number = self._next()
        before = [self.space.host_pool.find(key) for key in keys[skip:]]
        lease = self.space.lookup(owner, number, keys, skip)
        if lease is None:
            assert self.space.leases.get(owner, number) is None, "nothing was found, and yet a lease is left"
            assert not before or before[0] is None
            return
        assert lease.keys == keys[skip : skip + len(lease.keys)]
        assert len(lease.slots) == len(lease.keys) == len(lease.sources)
        found_ready = next((i for i, slot in enumerate(before) if slot is None), len(before))
        assert lease.ready >= found_ready, "what lies in host memory is ready at once"
        self.promised[owner, number] = tuple(self.arena.generation(slot) for slot in lease.slots)

    def _known(self) -> list[int]:
        """The prompts that begin with a block that is somewhere."""
        return [i for i, keys in enumerate(CHAINS) if any(pool.holds(keys[0]) for pool in self.space.pools)]

    @precondition(lambda self: self._known())
    @rule(owner=owners, which=pick, length=st.sampled_from([4, 4, 2, 1]))
    def lookup_known(self, owner: int, which: int, length: int) -> None:
        known = self._known()
        self.lookup(owner, known[which % len(known)], length, 0)

    @precondition(lambda self: self.space.host_pool.counts().resident > self.space.host_pool.counts().leased)
    @rule()
    def host_memory_is_short(self) -> None:
        """Everything that is not in use has to make room."""
        self.space.clear("host")

    @precondition(lambda self: self.promised)
    @rule(which=pick)
    def release(self, which: int) -> None:
        owner, number = list(self.promised)[which % len(self.promised)]
        del self.promised[owner, number]
        self.space.release(owner, number)
        assert self.space.release(owner, number) is None, "a lease ends once"

    @precondition(lambda self: self.promised)
    @rule(which=pick, blocks=positions)
    def shorten(self, which: int, blocks: int) -> None:
        name = list(self.promised)[which % len(self.promised)]
        self.space.shorten(*name, blocks)
        lease = self.space.leases.get(*name)
        assert lease is None or len(lease.slots) <= max(blocks, 0)

    # ---- engines store

    @rule(owner=owners, chain=chains)
    def store_prompt(self, owner: int, chain: int) -> None:
        """All of one store, as it goes when nothing is wrong."""
        self.reserve(owner, chain, 0, len(CHAINS[chain]))
        if self.writers and next(reversed(self.writers))[1] == self.number:
            self.commit(len(self.writers) - 1, set(), True)
        self.space.pump()

    @rule(owner=owners, chain=chains, start=starts, length=positions)
    def reserve(self, owner: int, chain: int, start: int, length: int) -> None:
        keys = CHAINS[chain]
        start = min(start, len(keys) - 1)
        wanted = keys[start : start + length + 1]
        below = self.space.disk.pool if self.space.options.staging and not self.tier.fault else None
        held = [self.space.host_pool.holds(key) or (below is not None and below.holds(key)) for key in wanted]
        number = self._next()
        answer = self.space.reserve(owner, number, keys[start - 1] if start else None, wanted)
        assert len(answer) == len(wanted)
        slots = [slot for slot in answer if slot >= 0]
        assert len(set(slots)) == len(slots)
        if REFUSED in answer:
            assert set(answer[answer.index(REFUSED) :]) == {REFUSED}, "nothing is stored after the first"
        assert all(was_held for was_held, slot in zip(held, answer, strict=True) if slot == HELD)
        reservation = self.space.reservations.get(owner, number)
        assert (reservation is not None) == bool(slots)
        if reservation is not None:
            assert reservation.slots == slots
            self.writers[owner, number] = Writer(reservation)

    def _write(self, writer: Writer, position: int) -> None:
        slot = writer.reservation.slots[position]
        key = writer.reservation.keys[position]
        self.nonce += 1
        content = block_bytes(key, self.nonce, LAYOUT.block_bytes)
        size = LAYOUT.slot_bytes
        for i, view in enumerate(self.arena.slot_views(slot)):
            view[:] = content[i * size : (i + 1) * size]
        writer.written[position] = content

    @precondition(lambda self: self.writers)
    @rule(which=pick, position=pick)
    def write_one(self, which: int, position: int) -> None:
        writer = list(self.writers.values())[which % len(self.writers)]
        self._write(writer, position % len(writer.reservation.slots))

    @precondition(lambda self: self.writers)
    @rule(which=pick, chain=chains)
    def reserve_more(self, which: int, chain: int) -> None:
        """The next part of a long chain."""
        key = list(self.writers)[which % len(self.writers)]
        reservation, keys = self.writers[key].reservation, CHAINS[chain]
        last = reservation.keys[-1]
        rest = keys[keys.index(last) + 1 :] if last in keys else []
        before = len(reservation.slots)
        answer = self.space.reserve(*key, last, rest, more=True)
        assert reservation.slots[before:] == [slot for slot in answer if slot >= 0]

    def _written(
        self, which: int, failures: set[int], all_written: bool
    ) -> tuple[Writer, set[int], list[int]]:
        """A store that its workers have ended, with the positions that they did not write, and the others."""
        key = list(self.writers)[which % len(self.writers)]
        writer = self.writers.pop(key)
        reservation = writer.reservation
        if all_written:
            for position in range(len(reservation.slots)):
                self._write(writer, position)
        failed = failures | (set(range(len(reservation.slots))) - set(writer.written))
        good = [] if reservation.stale else [i for i in range(len(reservation.slots)) if i not in failed]
        for i in good:
            self.oracle.commit(reservation.keys[i], writer.written[i])
        return writer, failed, good

    @precondition(lambda self: self.writers)
    @rule(which=pick, failures=st.sets(positions, max_size=2), all_written=st.booleans())
    def commit(self, which: int, failures: set[int], all_written: bool) -> None:
        writer, failed, good = self._written(which, failures, all_written)
        name = writer.reservation.owner, writer.reservation.number
        assert self.space.commit(*name, tuple(failed)) == len(good)
        assert self.space.commit(*name) == 0, "a reservation is committed once"

    @precondition(lambda self: self.writers)
    @rule(
        which=pick, failures=st.sets(positions, max_size=2), all_written=st.sampled_from([True, True, False])
    )
    def begin_commit(self, which: int, failures: set[int], all_written: bool) -> None:
        """One that gives others their turn after every block."""
        writer, failed, _ = self._written(which, failures, all_written)
        name = writer.reservation.owner, writer.reservation.number
        self.committing[name] = writer, self.space.committing(*name, tuple(failed))

    @precondition(lambda self: self.committing)
    @rule(which=pick)
    def go_on_with_commit(self, which: int) -> None:
        name = list(self.committing)[which % len(self.committing)]
        writer, work = self.committing[name]
        before = len(writer.reservation.slots)
        if advance(work) is None:
            assert len(writer.reservation.slots) == before - 1
            return
        del self.committing[name]
        assert self.space.reservations.get(*name) is None
        assert self.space.commit(*name) == 0, "a reservation is committed once"

    # ---- engines fail

    @precondition(lambda self: self.writers)
    @rule(which=pick)
    def condemn(self, which: int) -> None:
        self._condemn(list(self.writers)[which % len(self.writers)])

    def _condemn(self, key: tuple[int, int]) -> None:
        if key in self.committing:
            writer, work = self.committing.pop(key)
            left = list(writer.reservation.slots)
        else:
            writer, work, left = self.writers.pop(key), None, []
        writer.reservation.condemned = True
        self.fenced.append(writer)
        if work is not None:
            assert advance(work) is not None, "nothing more is committed"
            assert writer.reservation.slots == left

    @precondition(lambda self: self.fenced)
    @rule(which=pick, position=pick)
    def late_write(self, which: int, position: int) -> None:
        """A worker that has not heard of the fence goes on writing."""
        writer = self.fenced[which % len(self.fenced)]
        self._write(writer, position % len(writer.reservation.slots))

    @precondition(lambda self: self.fenced)
    @rule(which=pick)
    def late_commit(self, which: int) -> None:
        reservation = self.fenced[which % len(self.fenced)].reservation
        assert self.space.commit(reservation.owner, reservation.number) == 0
        assert all(self.space.host_pool.find(key) is None for key in reservation.keys)

    @precondition(lambda self: self.fenced)
    @rule(which=pick)
    def fence_answered(self, which: int) -> None:
        self.space.abort(self.fenced.pop(which % len(self.fenced)).reservation)

    @precondition(lambda self: self.calm)
    @rule(owner=owners)
    def owner_dies(self, owner: int) -> None:
        for lease in self.space.leases.of(owner):
            self.space.release(owner, lease.number)
        for key in [key for key in (*self.writers, *self.committing) if key[0] == owner]:
            self._condemn(key)
        for known in (self.promised, self.looking):
            for key in [key for key in known if key[0] == owner]:
                del known[key]

    @rule(seconds=st.sampled_from([1.0, HEAL_S_MAX, LEASE_S / 2, LEASE_S, RESERVATION_S + 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.space.expire_leases()
        for reservation in self.space.overdue():
            self._condemn((reservation.owner, reservation.number))
        assert all(lease.deadline_s > self.clock() for lease in self.space.leases)
        for key in list(self.promised):
            if self.space.leases.get(*key) is None:
                del self.promised[key]

    # ---- operators

    @precondition(lambda self: self.calm)
    @rule(tier=st.sampled_from(["", "host", "disk"]), sliced=st.booleans())
    def clear(self, tier: str, sliced: bool) -> None:
        self.calm_steps = 0
        dropped, in_use = self.space.begin_clear(tier) if sliced else self.space.clear(tier)
        assert dropped >= 0 and in_use >= 0
        for pool in self.space.pools:
            if tier in ("", pool.tier.name.lower()):
                counts = pool.counts()
                assert counts.resident == counts.leased, "what is not in use is gone"
        if not in_use and not tier and not self.space.clearing:
            self.oracle = BlockOracle()

    @precondition(lambda self: self.calm)
    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        self.calm_steps = 0
        self._shut(killed)
        self._open()

    def _shut(self, killed: bool) -> None:
        if killed and isinstance(self.tier, FakeTier):
            self.tier.kill()
            self.arena.close()
        else:
            self.space.close(keep=True)
        self.writers.clear()
        self.fenced.clear()
        self.promised.clear()
        self.looking.clear()
        self.committing.clear()

    @rule()
    def pump(self) -> None:
        self.space.pump()

    @rule()
    def catch_up(self) -> None:
        self.space.catch_up()

    def teardown(self) -> None:
        if not hasattr(self, "space"):
            return
        for owner in OWNERS:
            self.owner_dies(owner)
        for writer in self.fenced:
            self.space.abort(writer.reservation)
        self._heal_everything()
        for _ in range(SETTLE_STEPS):
            if self.tier is not None:
                self.tier.drain(10.0)
            self.space.pump()
        for pool in self.space.pools:
            counts = pool.counts()
            assert counts.filling == counts.leased == 0, f"{pool.tier.name} leaks: {counts}"
        assert not self.space.busy
        self.the_law_holds()
        self.what_can_be_found_is_right()
        self.space.close(keep=False)

    def _heal_everything(self) -> None:
        """Nothing is broken any more."""

"""The machine of `manager_machine` over nothing, over a tier that misbehaves on demand, and over the real disk tier."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvbm.block import BlockState
from kvbm.manager.disk_health import HEAL_S_MAX
from kvbm.manager.host_side import SpaceOptions
from kvbm.policy import LeafFirstLru
from kvbm.slices import advance
from kvbm.tiers.contract import Completion, RunTier
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from model.manager_machine import (
    CHAINS,
    DISK_SLOTS,
    HOST_SLOTS,
    LAYOUT,
    NAMESPACE,
    ManagerMachine,
    chains,
    owners,
    pick,
    positions,
)
from rigs.fake_tier import FakeMedium, FakeTier
from rigs.property_tests import scale_examples


class HostOnlyMachine(ManagerMachine):
    """Nothing below host memory."""

    def make_tier(self) -> RunTier | None:
        return None


class FakeTierMachine(ManagerMachine):
    """The tier below completes when the machine says so, and misbehaves."""

    def __init__(self) -> None:
        super().__init__()
        self.medium = FakeMedium(LAYOUT, DISK_SLOTS)

    def make_tier(self) -> RunTier | None:
        return FakeTier(self.medium, pending_limit=3)

    @rule(first=positions)
    def one_completes(self, first: int) -> None:
        self.fake.release(1, first)
        self.space.pump()

    @rule()
    def all_complete(self) -> None:
        for _ in range(4):
            self.fake.release()
            self.space.pump()

    @rule(owner=owners, chain=chains, length=positions)
    def begin_lookup(self, owner: int, chain: int, length: int) -> None:
        """One that gives others their turn after every block."""
        number = self._next()
        self.looking[owner, number] = self.space.looking_up(owner, number, CHAINS[chain][: length + 1], 0)

    @precondition(lambda self: self.looking)
    @rule(which=pick)
    def go_on_with_lookup(self, which: int) -> None:
        name = list(self.looking)[which % len(self.looking)]
        found = advance(self.looking[name])
        if found is None:
            return
        del self.looking[name]
        assert (self.space.leases.get(*name) is None) == (found.lease is None)
        if found.lease is not None:
            self.promised[name] = tuple(self.arena.generation(slot) for slot in found.lease.slots)

    @precondition(lambda self: self.looking)
    @rule(which=pick)
    def give_up_lookup(self, which: int) -> None:
        name = list(self.looking)[which % len(self.looking)]
        self.looking.pop(name).close()
        assert self.space.leases.get(*name) is None

    @rule(owner=owners, chain=chains)
    def store_prompt_to_the_end(self, owner: int, chain: int) -> None:
        self.store_prompt(owner, chain)
        self.all_complete()

    @precondition(lambda self: self.calm or self.fake.throttled)
    @rule(on=st.booleans())
    def throttle(self, on: bool) -> None:
        self.fake.throttled = on

    @precondition(lambda self: self.calm or self.fake.lose)
    @rule(on=st.booleans())
    def lose_stores(self, on: bool) -> None:
        self.fake.lose = on

    @precondition(lambda self: self.calm)
    @rule(slot=st.integers(0, DISK_SLOTS - 1), byte=pick)
    def flip_a_bit(self, slot: int, byte: int) -> None:
        self.medium.corrupt(slot, byte)

    @precondition(lambda self: self.calm)
    @rule()
    def break_down(self) -> None:
        self.calm_steps = 0
        self.fake.break_down()

    @rule()
    def mend(self) -> None:
        self.fake.mend()

    @invariant()
    def the_medium_has_the_blocks_of_the_index(self) -> None:
        """The medium has every block that the manager has in its index of the disk, unless it lost or dropped it."""
        if not hasattr(self, "space") or self.fake.fault or self.space.clearing or self.space.indexing:
            return
        assert self.space.disk is not None
        due = self.space.disk._to_void  # after the first slice of a clear, until the next turn
        for slot, entry in [(slot, entry) for slot, entry in self.medium.entries.items() if slot not in due]:
            assert self.space.disk.pool.state_of(slot) is not BlockState.FREE, "a restart would find it again"
            assert self.space.disk.pool.key_of(slot) == entry.key

    def _heal_everything(self) -> None:
        self.fake.throttled = False
        self.fake.mend()
        self.clock.advance(HEAL_S_MAX)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.medium.close()


class StagingMachine(FakeTierMachine):
    """Disk without host: host memory is only the way there."""

    options = SpaceOptions(staging=True, in_flight_max=4, brought_at_once=1, slice_blocks=1, found_at_once=1)


class StrictLru(LeafFirstLru):
    """Fails at a call about a block that it does not know, and at one that inserts a block that it knows."""

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        assert all(self._state[slot] for slot in slots if slot >= 0)
        super().requested(keys, slots, now_s)

    def inserted(self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float) -> None:
        assert parent < 0 or self._state[parent]
        super().inserted(keys, slots, parent, now_s)

    def evictable(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        assert all(self._state[slot] for slot in slots)
        super().evictable(slots)


class RunsMachine(FakeTierMachine):
    """The tier below moves runs."""

    def make_tier(self) -> RunTier | None:
        return FakeTier(self.medium, pending_limit=3, run_blocks_max=3)


class StrictMachine(FakeTierMachine):
    """The policy of host memory is told of each slot as its contract says."""

    def _open(self) -> None:
        super()._open()
        self.space.host_pool.policy = StrictLru(HOST_SLOTS)


class StagedRunsMachine(StagingMachine, RunsMachine):
    """Runs, and disk without host."""


class DrainedTier:
    """The real disk tier, but what was submitted has always ended when it is polled: threads must not decide a test."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def poll(self) -> list[Completion]:
        assert self._tier.drain(10.0)
        return self._tier.poll()


class DiskMachine(ManagerMachine):
    """The real disk tier, in a directory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="kvbm-machine-")

    def make_tier(self) -> RunTier | None:
        return DrainedTier(
            open_disk_tier(
                self.directory.name,
                LAYOUT,
                NAMESPACE,
                capacity_blocks=DISK_SLOTS,
                io_threads=1,
                pending_limit=4,
                clock=self.clock,
            )
        )

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.directory.cleanup()


def _case(machine: type[ManagerMachine], count: int, steps: int) -> type:
    case = machine.TestCase
    case.settings = settings(max_examples=scale_examples(count), stateful_step_count=steps, deadline=None)
    return case


TestHostOnly = _case(HostOnlyMachine, 40, 40)
TestFakeTier = _case(FakeTierMachine, 90, 60)
TestStaging = _case(StagingMachine, 50, 50)
TestRuns = _case(RunsMachine, 90, 60)
TestStagedRuns = _case(StagedRunsMachine, 40, 50)
TestStrict = _case(StrictMachine, 50, 60)
TestDisk = _case(DiskMachine, 15, 40)

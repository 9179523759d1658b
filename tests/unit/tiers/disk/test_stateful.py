"""The disk tier against a dictionary: stores, loads, restarts, crashes, lost writes, flipped bits, resizes, faults.

The dictionary says for each slot which block *must* be found and which blocks *may* be. A HIT of anything else, or
with other bytes, is a failure (`load` of the contract kit compares every byte).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbm.block import Outcome, SlotIndex
from kvbm.layout import BlockLayout
from kvbm.testing.stored_runs import (
    DEADLINE_S,
    NAMESPACE,
    RunMemory,
    by_slot,
    heal,
    load,
    load_run,
    make_key,
    outcomes,
    store,
    store_run,
)
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.disk.geometry import RECORD_BYTES
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls
from rigs.property_tests import scale_examples

LAYOUT = BlockLayout(block_tokens=16, shard_bytes=5000, shard_count=2)
SLOT_COUNT_MAX = 6
NUMBERS = {make_key(number): number for number in range(12)}
slots = st.integers(0, SLOT_COUNT_MAX - 1)
numbers = st.integers(0, len(NUMBERS) - 1)


class DiskTierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvbm-stateful-"))
        self.must: dict[int, int] = {}
        self.may: dict[int, set[int]] = {slot: set() for slot in range(SLOT_COUNT_MAX)}
        self.tier: DiskTier | None = None

    def teardown(self) -> None:
        if self.tier is not None:
            self.faults.disarm()
            self.tier.close(keep=False)
        shutil.rmtree(self.root)

    @initialize(seed=st.integers(0, 2**32), slot_count=st.integers(1, SLOT_COUNT_MAX))
    def open(self, seed: int, slot_count: int) -> None:
        self.faults = FaultySyscalls(seed)
        self.tier = open_disk_tier(
            self.root, LAYOUT, NAMESPACE, capacity_blocks=slot_count, io_threads=2, syscalls=self.faults
        )
        for slot in range(slot_count, SLOT_COUNT_MAX):
            self.expect(slot, None)
        self.check_recovered()

    def expect(self, slot: int, number: int | None) -> None:
        """The slot holds exactly this."""
        self.must.pop(slot, None)
        self.may[slot] = set()
        if number is not None:
            self.must[slot] = number
            self.may[slot] = {number}

    def doubt(self, slot: int, *more: int) -> None:
        """The slot may hold what it might hold before, or one of these, or nothing."""
        self.must.pop(slot, None)
        self.may[slot].update(more)

    def check_recovered(self) -> None:
        assert self.tier is not None
        found = {slot: NUMBERS[block.key] for slot, block in by_slot(self.tier.recovered()).items()}
        for slot in range(SLOT_COUNT_MAX):
            if slot in found:
                assert found[slot] in self.may[slot]
                self.may[slot] = {found[slot]}
            else:
                assert slot not in self.must or self.must[slot] in found.values(), "a block was lost"
                self.expect(slot, None)

    def in_range(self, slot: int) -> SlotIndex:
        assert self.tier is not None
        return SlotIndex(slot % self.tier.slot_count)

    @rule(slot=slots, number=numbers)
    def store(self, slot: int, number: int) -> None:
        assert self.tier is not None
        slot = self.in_range(slot)
        assert store(self.tier, LAYOUT, make_key(number), slot).outcome is Outcome.HIT
        self.expect(slot, number)

    @rule(slot=slots, number=numbers)
    def load(self, slot: int, number: int) -> None:
        assert self.tier is not None
        slot = self.in_range(slot)
        loaded = load(self.tier, LAYOUT, make_key(number), slot)
        if loaded.outcome is Outcome.HIT:
            assert number in self.may[slot], "found what was forgotten or overwritten"
            self.expect(slot, number)
        else:
            assert loaded.outcome is Outcome.MISS
            assert self.must.get(slot) != number, "a block was lost"
            assert not loaded.corrupt or slot not in self.must, "a sound block was called corrupt"
            if loaded.corrupt:
                self.expect(slot, None)

    @rule(slot=slots)
    def forget(self, slot: int) -> None:
        assert self.tier is not None
        slot = self.in_range(slot)
        self.tier.forget(slot)
        self.expect(slot, None)

    @rule(slot=slots, run=st.lists(numbers, min_size=1, max_size=4, unique=True))
    def store_run(self, slot: int, run: list[int]) -> None:
        assert self.tier is not None
        slot = self.in_range(slot)
        run = run[: self.tier.slot_count - slot]
        assert set(outcomes(store_run(self.tier, LAYOUT, run, slot))) == {Outcome.HIT}
        for place, number in enumerate(run):
            self.expect(slot + place, number)

    @rule(slot=slots, known=st.lists(st.booleans(), min_size=1, max_size=4), number=numbers)
    def load_run(self, slot: int, known: list[bool], number: int) -> None:
        """Of each slot the block that must be there, or another one."""
        assert self.tier is not None
        slot = self.in_range(slot)
        run = [
            self.must.get(slot + place, number) if is_known else number
            for place, is_known in enumerate(known)
        ]
        run = run[: self.tier.slot_count - slot]
        for place, end in enumerate(load_run(self.tier, LAYOUT, run, slot).blocks):
            if end.outcome is Outcome.HIT:
                assert run[place] in self.may[slot + place], "found what was forgotten or overwritten"
                self.expect(slot + place, run[place])
            else:
                assert end.outcome is Outcome.MISS
                assert self.must.get(slot + place) != run[place], "a block was lost"
                assert not end.corrupt or slot + place not in self.must, "a sound block was called corrupt"
                if end.corrupt:
                    self.expect(slot + place, None)

    @rule(slot=slots, count=st.integers(1, 4))
    def forget_run(self, slot: int, count: int) -> None:
        assert self.tier is not None
        slot = self.in_range(slot)
        count = min(count, self.tier.slot_count - slot)
        self.tier.forget(slot, count)
        for each in range(slot, slot + count):
            self.expect(each, None)

    @rule(seed=st.integers(0, 2**32), slot_count=st.integers(1, SLOT_COUNT_MAX))
    def restart_with_another_capacity(self, seed: int, slot_count: int) -> None:
        assert self.tier is not None
        self.tier.close(keep=True)
        self.open(seed, slot_count)

    @rule(
        work=st.lists(st.tuples(slots, numbers), min_size=1, max_size=4, unique_by=lambda pair: pair[0]),
        writes=st.integers(0, 9),
        seed=st.integers(0, 2**32),
    )
    def crash_while_storing(self, work: list[tuple[int, int]], writes: int, seed: int) -> None:
        assert self.tier is not None
        self.faults.cut_power(writes)
        done: dict[int, tuple[SlotIndex, int]] = {}
        busy: set[int] = set()
        buffers = []
        for job, (slot, number) in enumerate(work):
            slot = self.in_range(slot)
            if slot in busy:
                continue
            busy.add(slot)
            buffers.append(RunMemory.of([make_key(number)], LAYOUT))
            if (
                self.tier.submit_store(job, [BlockHead(make_key(number), None)], slot, buffers[-1].views)
                is Outcome.PENDING
            ):
                done[job] = (slot, number)
                self.doubt(slot, number)
        assert self.tier.drain(DEADLINE_S)
        for completion in self.tier.poll():
            if completion.outcome is Outcome.HIT:
                self.expect(*done[completion.job_id])
        slot_count = self.tier.slot_count
        self.faults.power_off = True
        self.tier.close(keep=True)
        self.open(seed, slot_count)

    @rule(slot=slots, number=numbers, file=st.sampled_from(["slab", "journal"]), skip=st.integers(0, 1))
    def store_with_a_write_lost(self, slot: int, number: int, file: str, skip: int) -> None:
        assert self.tier is not None
        slot = self.in_range(slot)
        self.faults.disarm()
        self.faults.arm(FaultRule(operation="pwritev", fault=Fault.LOST, file=file, skip=skip, times=1))
        store(self.tier, LAYOUT, make_key(number), slot)
        self.faults.disarm()
        self.doubt(slot, number)

    @rule(
        slot=slots,
        number=numbers,
        operation=st.sampled_from(["pwritev", "preadv"]),
        file=st.sampled_from(["slab", "journal"]),
        fault=st.sampled_from([Fault.EIO, Fault.ENOSPC, Fault.EROFS]),
        skip=st.integers(0, 1),
    )
    def fail_and_heal(
        self, slot: int, number: int, operation: str, file: str, fault: Fault, skip: int
    ) -> None:
        assert self.tier is not None
        slot = self.in_range(slot)
        self.faults.disarm()
        self.faults.arm(FaultRule(operation=operation, fault=fault, file=file, skip=skip))
        if operation == "preadv":
            expected = load(self.tier, LAYOUT, make_key(number), slot)
        else:
            expected = store(self.tier, LAYOUT, make_key(number), slot)
        self.faults.disarm()
        if expected.outcome is Outcome.HIT and operation == "pwritev":
            self.expect(slot, number)
        elif not (operation == "preadv" and expected.outcome is Outcome.HIT):
            self.doubt(slot, *([number] if operation == "pwritev" else []))
        was_off = bool(self.tier.fault)
        assert was_off == (expected.outcome is Outcome.RETRY)
        assert heal(self.tier)
        if was_off:
            self.check_recovered()

    @rule(place=st.integers(0, 2**20), bit=st.integers(0, 7))
    def flip_a_bit_in_a_slab(self, place: int, bit: int) -> None:
        assert self.tier is not None
        place %= self.tier.slot_count * LAYOUT.block_bytes
        self.flip("slab-000", place, bit)
        self.doubt(place // LAYOUT.block_bytes)

    @rule(slot=slots, place=st.integers(0, RECORD_BYTES - 1), bit=st.integers(0, 7))
    def flip_a_bit_in_the_journal(self, slot: int, place: int, bit: int) -> None:
        slot = self.in_range(slot)
        self.flip("journal", slot * RECORD_BYTES + place, bit)
        self.doubt(slot)

    def flip(self, name: str, place: int, bit: int) -> None:
        assert self.tier is not None
        assert self.tier.path is not None
        with (self.tier.path / name).open("r+b", buffering=0) as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << bit]))

    @precondition(lambda self: self.tier is not None)
    @invariant()
    def there_is_one_directory(self) -> None:
        assert len(list(self.root.iterdir())) == 1


DiskTierMachine.TestCase.settings = settings(
    max_examples=scale_examples(60), stateful_step_count=30, deadline=None
)
TestDiskTierMachine = DiskTierMachine.TestCase

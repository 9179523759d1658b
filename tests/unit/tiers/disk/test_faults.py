"""A failing medium turns the tier off with one line, loses nothing silently, and comes back when it heals."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvbm.block import Outcome, SlotIndex
from kvbm.clock import ManualClock
from kvbm.errors import TierError
from kvbm.testing.stored_runs import (
    DEADLINE_S,
    LAYOUT,
    NAMESPACE,
    RunMemory,
    by_slot,
    collect,
    heal,
    load,
    make_key,
    store,
)
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.disk.block_io import RunBuffers
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.tier import WATCH_PERIOD_S, DiskTier, open_disk_tier
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls

SLOT_COUNT = 8


class Bench:
    """A tier on a medium that can be made to fail, and a clock that is moved by hand."""

    def __init__(self, root: Path, syscalls: Syscalls | None = None) -> None:
        self.root = root
        self.faults = FaultySyscalls(1)
        self.syscalls = syscalls or self.faults
        self.clock = ManualClock()
        self.tier = self.open()

    def open(self) -> DiskTier:
        return open_disk_tier(
            self.root,
            LAYOUT,
            NAMESPACE,
            capacity_blocks=SLOT_COUNT,
            io_threads=2,
            clock=self.clock,
            syscalls=self.syscalls,
        )

    def strike(self, operation: str, fault: Fault, file: str = "", times: int | None = None) -> None:
        self.faults.arm(FaultRule(operation=operation, fault=fault, file=file, times=times))

    def path(self) -> Path:
        assert self.tier.path is not None
        return self.tier.path

    def look(self) -> None:
        """It is time to look whether the files are there."""
        self.clock.advance(WATCH_PERIOD_S)
        assert self.tier.poll() == []
        assert self.tier._upkeep.wait_idle(DEADLINE_S)

    def expect_off(self, *words: str) -> None:
        """Off, with one line that has these words, and taking nothing."""
        assert self.tier.fault.startswith("disk tier is off: ")
        assert "\n" not in self.tier.fault
        for word in words:
            assert word in self.tier.fault
        buffers = RunMemory(LAYOUT)
        assert self.tier.submit_load(1, [make_key(0)], SlotIndex(0), buffers.views) is Outcome.RETRY
        assert (
            self.tier.submit_store(2, [BlockHead(make_key(0), None)], SlotIndex(0), buffers.views)
            is Outcome.RETRY
        )
        assert self.tier.drain(DEADLINE_S)
        assert self.tier.poll() == []

    def expect_back(self, slots: list[int]) -> None:
        """Works after a heal, holding exactly these slots' blocks."""
        self.faults.disarm()
        assert heal(self.tier)
        assert self.tier.fault == ""
        assert sorted(by_slot(self.tier.recovered())) == slots
        for slot in slots:
            assert load(self.tier, LAYOUT, make_key(slot), slot).outcome is Outcome.HIT
        assert store(self.tier, LAYOUT, make_key(7), 7).outcome is Outcome.HIT
        assert load(self.tier, LAYOUT, make_key(7), 7).outcome is Outcome.HIT


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.faults.disarm()
    bench.tier.close(keep=False)


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.EROFS, Fault.ENODEV])
@pytest.mark.parametrize("file", ["slab", "journal"])
def test_a_failed_store_turns_the_tier_off_until_it_heals(bench: Bench, fault: Fault, file: str) -> None:
    store(bench.tier, LAYOUT, make_key(0), 0)
    store(bench.tier, LAYOUT, make_key(1), 1)
    bench.strike("pwritev", fault, file)
    failed = store(bench.tier, LAYOUT, make_key(2), 2)
    assert failed.outcome is Outcome.RETRY
    assert failed.error == bench.tier.fault
    bench.expect_off("writing slot 2", str(bench.path()), fault.value)
    bench.expect_back([0, 1])


def test_a_store_that_fails_after_the_bytes_leaves_nothing(bench: Bench) -> None:
    """The second journal write is the new record: bytes are there then, and must not be found."""
    store(bench.tier, LAYOUT, make_key(3), 3)
    bench.faults.arm(FaultRule(operation="pwritev", fault=Fault.EIO, file="journal", skip=1))
    assert store(bench.tier, LAYOUT, make_key(4), 3).outcome is Outcome.RETRY
    bench.expect_back([])


def test_a_sector_that_cannot_be_read_costs_one_block(bench: Bench) -> None:
    for slot in range(3):
        store(bench.tier, LAYOUT, make_key(slot), slot)
    bench.strike("preadv", Fault.EIO, "slab", times=1)
    assert load(bench.tier, LAYOUT, make_key(1), 1).outcome is Outcome.RETRY
    bench.expect_off("reading slot 1", "EIO")
    bench.expect_back([0, 2])


def test_what_was_pending_completes_with_retry(tmp_path: Path) -> None:
    """One thread is held inside the failing call while others queue up behind it."""
    held, entered = threading.Event(), threading.Event()

    class Holding(FaultySyscalls):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            entered.set()
            assert held.wait(DEADLINE_S)
            return super().pwritev(fd, buffers, offset)

    holding = Holding(0)
    held.set()
    bench = Bench(tmp_path, holding)
    held.clear()
    entered.clear()
    holding.arm(FaultRule(operation="pwritev", fault=Fault.EIO))
    sources = RunMemory.of([make_key(0)], LAYOUT)
    for slot in range(SLOT_COUNT):
        outcome = bench.tier.submit_store(
            slot, [BlockHead(make_key(0), None)], SlotIndex(slot), sources.views
        )
        assert outcome is Outcome.PENDING
    assert entered.wait(DEADLINE_S)
    assert not bench.tier.drain(0.0)
    held.set()
    completions = collect(bench.tier, SLOT_COUNT)
    assert {completion.outcome for completion in completions.values()} == {Outcome.RETRY}
    assert {completion.error for completion in completions.values()} == {bench.tier.fault}
    assert holding.struck[next(iter(holding.struck))] <= 2, (
        "the queue behind a fault must not touch the medium"
    )
    bench.tier.close(keep=False)


def test_a_heal_does_not_wait_for_a_hung_transfer(tmp_path: Path) -> None:
    held, entered = threading.Event(), threading.Event()

    class Hung(Syscalls):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if held.is_set():
                entered.set()
                assert released.wait(DEADLINE_S)
            return super().preadv(fd, buffers, offset)

    released = threading.Event()
    bench = Bench(tmp_path, Hung())
    held.set()
    buffers = RunMemory(LAYOUT)
    assert bench.tier.submit_load(5, [make_key(0)], SlotIndex(0), buffers.views) is Outcome.PENDING
    assert entered.wait(DEADLINE_S)
    shutil.rmtree(bench.path())
    bench.look()
    assert bench.tier.fault
    assert not heal(bench.tier)
    bench.tier.close(keep=True, deadline_s=0.01)
    assert [(done.job_id, done.outcome) for done in bench.tier.poll()] == [(5, Outcome.RETRY)]
    released.set()


@pytest.mark.parametrize("operation", ["preadv", "pwritev"])
def test_a_flipped_bit_is_a_miss_counted_as_corrupt_and_costs_one_block(bench: Bench, operation: str) -> None:
    store(bench.tier, LAYOUT, make_key(0), 0)
    if operation == "pwritev":
        bench.strike("pwritev", Fault.FLIP, "slab", times=1)
    store(bench.tier, LAYOUT, make_key(1), 1)
    if operation == "preadv":
        bench.strike("preadv", Fault.FLIP, "slab", times=1)
    corrupt = load(bench.tier, LAYOUT, make_key(1), 1)
    assert corrupt.outcome is Outcome.MISS
    assert corrupt.corrupt
    again = load(bench.tier, LAYOUT, make_key(1), 1)
    assert again.outcome is Outcome.MISS
    assert not again.corrupt, "its record was voided"
    assert bench.tier.fault == ""
    assert load(bench.tier, LAYOUT, make_key(0), 0).outcome is Outcome.HIT
    bench.tier.close(keep=True)
    bench.tier = bench.open()
    assert sorted(by_slot(bench.tier.recovered())) == [0]


@pytest.mark.parametrize("name", ["slab-000", "journal"])
def test_a_bit_flipped_on_the_medium_is_noticed(bench: Bench, name: str) -> None:
    store(bench.tier, LAYOUT, make_key(0), 0)
    with (bench.path() / name).open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 4]))
        file.flush()
        os.fsync(file.fileno())
    corrupt = load(bench.tier, LAYOUT, make_key(0), 0)
    assert (corrupt.outcome, corrupt.corrupt) == (Outcome.MISS, True)
    assert load(bench.tier, LAYOUT, make_key(0), 0).corrupt is False


def test_a_write_that_never_happened_is_a_miss(bench: Bench) -> None:
    """As after a power loss: the record of the new block came through, its bytes did not, or the other way round."""
    store(bench.tier, LAYOUT, make_key(0), 0)
    bench.strike("pwritev", Fault.LOST, "slab")
    assert store(bench.tier, LAYOUT, make_key(1), 0).outcome is Outcome.HIT
    assert load(bench.tier, LAYOUT, make_key(1), 0).corrupt
    bench.faults.disarm()
    store(bench.tier, LAYOUT, make_key(0), 0)
    bench.strike("pwritev", Fault.LOST, "journal")
    store(bench.tier, LAYOUT, make_key(1), 0)
    assert load(bench.tier, LAYOUT, make_key(1), 0).outcome is Outcome.MISS
    assert load(bench.tier, LAYOUT, make_key(0), 0).corrupt, "the old record over the new bytes"


def test_a_block_overwritten_while_it_is_read_is_a_miss_and_no_corruption(tmp_path: Path) -> None:
    class Overtaken(Syscalls):
        overtake: DiskTier | None = None

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            tier, moved = self.overtake, super().preadv(fd, buffers, offset)
            if tier is not None and "slab" in os.readlink(f"/proc/self/fd/{fd}"):
                self.overtake = None
                medium = tier._upkeep.medium
                assert medium is not None
                memory = RunBuffers.of_shards(RunMemory.of([make_key(2)], LAYOUT).views, 1)
                medium.store(SlotIndex(0), [BlockHead(make_key(2), None)], 99, memory)
                moved = super().preadv(fd, buffers, offset)
            return moved

    syscalls = Overtaken()
    tier = Bench(tmp_path, syscalls).tier
    store(tier, LAYOUT, make_key(1), 0)
    syscalls.overtake = tier
    missed = load(tier, LAYOUT, make_key(1), 0)
    assert (missed.outcome, missed.corrupt) == (Outcome.MISS, False)
    assert load(tier, LAYOUT, make_key(2), 0).outcome is Outcome.HIT
    tier.close(keep=False)


def test_blocks_that_traded_places_are_not_believed(bench: Bench) -> None:
    """Whole records and whole blocks, but of each other's slots."""
    for slot in (0, 1):
        store(bench.tier, LAYOUT, make_key(slot), slot)
    size = LAYOUT.block_bytes
    slab = bench.path() / "slab-000"
    data = slab.read_bytes()
    with slab.open("r+b") as file:
        file.write(data[size : 2 * size] + data[:size])
        file.flush()
        os.fsync(file.fileno())
    for slot in (0, 1):
        assert load(bench.tier, LAYOUT, make_key(slot), slot).corrupt


@pytest.mark.parametrize("what", ["directory", "slab", "journal", "lock", "truncated", "moved"])
def test_files_removed_under_a_running_tier_are_noticed(bench: Bench, what: str) -> None:
    store(bench.tier, LAYOUT, make_key(0), 0)
    path = bench.path()
    if what == "directory":
        shutil.rmtree(path)
    elif what == "moved":
        path.rename(bench.root / "elsewhere")
    elif what == "truncated":
        os.truncate(path / "slab-000", 4096)
    else:
        (path / {"slab": "slab-000"}.get(what, what)).unlink()
    bench.look()
    bench.expect_off(str(path))
    assert heal(bench.tier)
    assert bench.tier.fault == ""
    survivors = sorted(by_slot(bench.tier.recovered()))
    assert survivors == ([0] if what in ("slab", "truncated", "lock") else [])
    if survivors and what != "lock":
        assert load(bench.tier, LAYOUT, make_key(0), 0).corrupt, "its bytes are gone"
    assert store(bench.tier, LAYOUT, make_key(7), 7).outcome is Outcome.HIT
    assert load(bench.tier, LAYOUT, make_key(7), 7).outcome is Outcome.HIT
    assert bench.path().is_dir()


def test_a_medium_that_stays_gone_keeps_the_tier_off_with_the_reason(bench: Bench) -> None:
    shutil.rmtree(bench.path())
    bench.look()
    bench.strike("mkdir", Fault.EROFS)
    for _ in range(3):
        assert not heal(bench.tier)
        assert "root=" in bench.tier.fault
        assert bench.tier.path is None
        bench.tier.forget(SlotIndex(0))
        assert (
            bench.tier.submit_load(1, [make_key(0)], SlotIndex(0), RunMemory(LAYOUT).views) is Outcome.RETRY
        )
    bench.expect_back([])


def test_what_was_forgotten_while_off_stays_forgotten(bench: Bench) -> None:
    for slot in range(3):
        store(bench.tier, LAYOUT, make_key(slot), slot)
    bench.strike("pwritev", Fault.EIO)
    bench.tier.forget(SlotIndex(1))
    assert bench.tier.drain(DEADLINE_S)
    bench.expect_off("voiding slot 1")
    bench.tier.forget(SlotIndex(2))
    bench.expect_back([0])


@pytest.mark.parametrize(
    ("operation", "times"), [("open", 1), ("preadv", 1)], ids=["refuses the flag", "refuses the transfer"]
)
def test_a_filesystem_without_o_direct_is_used_buffered(
    tmp_path: Path, operation: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    rule = FaultRule(operation=operation, fault=Fault.EINVAL, file="slab", times=times)
    tier = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=4, syscalls=FaultySyscalls(0, rule))
    assert not tier.direct
    assert "buffered" in caplog.text
    assert len(caplog.records) == 1
    store(tier, LAYOUT, make_key(1), 0)
    assert load(tier, LAYOUT, make_key(1), 0).outcome is Outcome.HIT
    tier.close(keep=False)


def test_o_direct_refused_later_is_survived(bench: Bench) -> None:
    if not bench.tier.direct:
        pytest.skip("no O_DIRECT on this filesystem")
    bench.strike("pwritev", Fault.EINVAL, "slab", times=1)
    assert store(bench.tier, LAYOUT, make_key(1), 0).outcome is Outcome.HIT
    assert not bench.tier.direct
    assert bench.tier.fault == ""
    assert load(bench.tier, LAYOUT, make_key(1), 0).outcome is Outcome.HIT


@pytest.mark.parametrize("operation", ["open", "fallocate", "ftruncate", "fstat", "rename", "pwritev"])
def test_a_failure_while_opening_is_one_line_and_leaves_nothing(tmp_path: Path, operation: str) -> None:
    rule = FaultRule(operation=operation, fault=Fault.EIO)
    with pytest.raises(TierError, match="Input/output error") as caught:
        open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=4, syscalls=FaultySyscalls(0, rule))
    assert "\n" not in str(caught.value)
    if operation != "open":
        assert os.listdir(tmp_path) == []
    tier = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=4)
    assert tier.path is not None
    assert tier.path.name.endswith("-0")
    tier.close(keep=False)


def test_a_failure_while_opening_keeps_the_blocks_of_an_earlier_run(tmp_path: Path) -> None:
    tier = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=4)
    store(tier, LAYOUT, make_key(1), 1)
    tier.close(keep=True)
    for operation in ("fallocate", "preadv"):
        rule = FaultRule(operation=operation, fault=Fault.EIO)
        with pytest.raises(TierError):
            open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=4, syscalls=FaultySyscalls(0, rule))
    tier = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=4)
    assert sorted(by_slot(tier.recovered())) == [1]
    tier.close(keep=False)

"""What a disk tier does in its control thread, while calls of the kernel do not end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
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
from kvbm.tiers.disk.maintenance import SYNC_EXTRA_S
from kvbm.tiers.disk.medium import DiskMedium
from kvbm.tiers.disk.tier import WATCH_PERIOD_S, DiskTier, open_disk_tier
from kvbm.tiers.disk.voids import STRETCH_SLOTS_MAX, Voids
from kvbm.tiers.recovered import RecoveredBlocks
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls
from rigs.gated_syscalls import GatedSyscalls


class Bench:
    """A tier whose kernel has a gate."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = ManualClock()
        self.write_s, self.busy_s = 0.0, list[float]()
        self.kernel = GatedSyscalls(self.on_call)
        self.tier = self.open()

    def on_call(self, operation: str) -> None:
        if operation == "pwritev" and self.write_s:
            self.busy_s.append(self.tier.busy_s)
            self.clock.advance(self.write_s)

    def open(self) -> DiskTier:
        return open_disk_tier(
            self.root, LAYOUT, NAMESPACE, capacity_blocks=8, clock=self.clock, syscalls=self.kernel
        )

    def reopen(self) -> list[int]:
        """The slots that are found after an orderly restart."""
        self.tier.close(keep=True)
        self.tier = self.open()
        return sorted(by_slot(self.tier.recovered()))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.kernel.open_gate()
    bench.tier.close(keep=False)


def test_a_void_that_hangs_keeps_nobody(bench: Bench) -> None:
    for slot in range(3):
        store(bench.tier, LAYOUT, make_key(slot), slot)
    bench.kernel.shut("pwritev", "journal")
    bench.tier.forget(SlotIndex(1))
    bench.kernel.wait_entered()
    bench.tier.forget(SlotIndex(0))
    assert bench.tier.poll() == []
    assert not bench.tier.drain(0.0)
    bench.clock.advance(3.0)
    assert bench.tier.busy_s == 3.0
    assert load(bench.tier, LAYOUT, make_key(2), 2).outcome is Outcome.HIT, "reads of others go on"
    bench.kernel.open_gate()
    assert bench.tier.drain(DEADLINE_S)
    assert (bench.tier.busy_s, bench.tier.fault) == (0.0, "")
    assert bench.reopen() == [2]


def test_a_transfer_that_hangs_is_seen(bench: Bench) -> None:
    store(bench.tier, LAYOUT, make_key(0), 0)
    bench.kernel.shut("preadv", "slab")
    memory = RunMemory(LAYOUT)
    assert bench.tier.submit_load(1, [make_key(0)], SlotIndex(0), memory.views) is Outcome.PENDING
    bench.kernel.wait_entered()
    bench.clock.advance(2.0)
    assert bench.tier.busy_s == 2.0
    bench.kernel.open_gate()
    assert collect(bench.tier, 1)[1].outcome is Outcome.HIT
    assert bench.tier.busy_s == 0.0


@pytest.mark.parametrize("hanging", [0, 3], ids=["before its own", "its own"])
def test_a_late_void_does_not_destroy_the_next_block_of_its_slot(bench: Bench, hanging: int) -> None:
    """The void of slot 3 waits, or is being written, when slot 3 gets another block."""
    for slot in (0, 3):
        store(bench.tier, LAYOUT, make_key(slot), slot)
    bench.kernel.shut("pwritev", "journal", calls_max=1)
    bench.tier.forget(SlotIndex(hanging))
    bench.kernel.wait_entered()
    bench.tier.forget(SlotIndex(3))
    memory = RunMemory.of([make_key(7)], LAYOUT)
    head = BlockHead(make_key(7), None)
    assert bench.tier.submit_store(5, [head], SlotIndex(3), memory.views) is Outcome.PENDING
    if hanging == 3:
        bench.kernel.open_gate()  # the store waits for it
    assert collect(bench.tier, 1)[5].outcome is Outcome.HIT
    bench.kernel.open_gate()
    assert bench.tier.drain(DEADLINE_S)
    assert load(bench.tier, LAYOUT, make_key(7), 3).outcome is Outcome.HIT
    assert 3 in bench.reopen()


def test_a_store_that_fails_leaves_the_void_of_its_slot_due(tmp_path: Path) -> None:
    kernel = FaultySyscalls(1)
    tier = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=8, syscalls=kernel)
    for slot in (1, 2):
        store(tier, LAYOUT, make_key(slot), slot)
    kernel.arm(FaultRule(operation="pwritev", fault=Fault.EIO, file="journal"))
    tier.forget(SlotIndex(1))
    store(tier, LAYOUT, make_key(5), 1)
    kernel.disarm()
    assert heal(tier)
    assert sorted(by_slot(tier.recovered())) == [2]
    tier.close(keep=False)


def test_looking_at_files_that_hang_keeps_nobody(bench: Bench) -> None:
    bench.kernel.shut("fstat")
    bench.clock.advance(WATCH_PERIOD_S)
    assert bench.tier.poll() == []
    bench.kernel.wait_entered()
    bench.clock.advance(WATCH_PERIOD_S)
    assert bench.tier.poll() == []
    assert bench.tier.busy_s == WATCH_PERIOD_S


def test_each_of_many_voids_counts_for_itself(bench: Bench) -> None:
    """A disk that is healthy and slow is not taken for one that hangs."""
    bench.write_s = 0.5
    bench.kernel.shut("pwritev", "journal", calls_max=1)
    bench.tier.forget(SlotIndex(0))
    bench.kernel.wait_entered()
    for slot in (2, 4, 6):
        bench.tier.forget(SlotIndex(slot))
    bench.kernel.open_gate()
    assert bench.tier.drain(DEADLINE_S)
    assert bench.busy_s == [0.0] * 4


def test_a_sync_may_take_longer_than_other_calls(bench: Bench) -> None:
    bench.kernel.shut("fdatasync")
    bench.tier.sync()
    bench.kernel.wait_entered()
    bench.clock.advance(SYNC_EXTRA_S)
    assert bench.tier.busy_s == 0.0
    bench.clock.advance(1.0)
    assert bench.tier.busy_s == 1.0
    bench.kernel.open_gate()
    assert bench.tier.drain(DEADLINE_S)


def test_voids_are_written_in_stretches() -> None:
    voids = Voids(3 * STRETCH_SLOTS_MAX)
    assert voids.add(5, 2)
    assert not voids.add(0, 5), "somebody takes them already"
    assert not voids.add(9, 2 * STRETCH_SLOTS_MAX)
    taken = []
    while (stretch := voids.take()) is not None:
        taken.append(stretch)
        voids.written()
    last = 9 + STRETCH_SLOTS_MAX
    assert taken == [range(7), range(9, last), range(last, last + STRETCH_SLOTS_MAX)]
    assert voids.add(1), "nobody does"
    assert voids.overtake(0, 2) == [1]
    assert voids.take() is None


@pytest.mark.parametrize("started", range(4), ids="{} threads".format)
def test_a_tier_without_threads_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    """Three I/O threads and the control thread are wanted, and the process may have no more."""
    threads, genuine = list[threading.Thread](), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(threads) == started:
            raise RuntimeError("can't start new thread")
        threads.append(thread)
        genuine(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(TierError, match="a thread cannot be started: can't start new thread"):
        open_disk_tier(tmp_path / "root", LAYOUT, NAMESPACE, capacity_blocks=8, io_threads=3)
    assert len(threads) == started
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert os.listdir("/proc/self/fd") == descriptors
    assert not (tmp_path / "root").exists()


def crash(bench: Bench) -> list[int]:
    """The slots that are found after the process was killed: what was not written by then never is."""
    medium, bench.tier._upkeep.medium = bench.tier._upkeep.medium, None
    assert medium is not None
    medium.close(remove=False)
    bench.tier = bench.open()
    return sorted(by_slot(bench.tier.recovered()))


def test_what_was_forgotten_is_gone_for_ever_once_that_is_synced(bench: Bench) -> None:
    for slot in range(4):
        store(bench.tier, LAYOUT, make_key(slot), slot)
    bench.kernel.shut("fdatasync")
    bench.tier.forget(SlotIndex(1), 2)
    first = bench.tier.sync()
    bench.kernel.wait_entered()
    assert bench.tier.synced < first
    bench.tier.forget(SlotIndex(0))
    second = bench.tier.sync()
    bench.kernel.open_gate()
    assert bench.tier.drain(DEADLINE_S)
    assert first < second == bench.tier.synced
    assert crash(bench) == [3]


def test_what_is_forgotten_while_the_tier_is_opened_again_does_not_come_back(bench: Bench) -> None:
    """Its records have been read by then."""
    for slot in range(3):
        store(bench.tier, LAYOUT, make_key(slot), slot)
    bench.tier._fault.declare("broken by the test")
    bench.tier.forget(SlotIndex(0))
    bench.tier.sync()
    assert bench.tier.drain(DEADLINE_S)
    bench.kernel.shut("fdatasync")
    assert bench.tier.heal() is Outcome.PENDING
    bench.kernel.wait_entered()
    bench.tier.forget(SlotIndex(2))
    bench.kernel.open_gate()
    assert heal(bench.tier)
    assert sorted(by_slot(bench.tier.recovered())) == [1]


def test_what_was_forgotten_while_off_is_synced_when_the_tier_is_back(tmp_path: Path) -> None:
    kernel = FaultySyscalls(1)
    tier = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=8, syscalls=kernel)
    for slot in (1, 2):
        store(tier, LAYOUT, make_key(slot), slot)
    kernel.arm(FaultRule(operation="pwritev", fault=Fault.EIO, file="journal"))
    tier.forget(SlotIndex(1))
    number = tier.sync()
    assert tier.drain(DEADLINE_S)
    assert tier.fault and tier.synced < number
    kernel.disarm()
    assert heal(tier)
    assert tier.synced == number
    assert sorted(by_slot(tier.recovered())) == [2]
    tier.close(keep=False)


def test_voids_and_syncs_go_on_after_the_tier_was_opened_again(bench: Bench) -> None:
    """Also those that were wanted between the end of an attempt to open it and its use."""
    for slot in range(4):
        store(bench.tier, LAYOUT, make_key(slot), slot)
    bench.tier._fault.declare("broken by the test")
    assert bench.tier.heal() is Outcome.PENDING
    assert bench.tier.drain(DEADLINE_S)
    bench.tier.forget(SlotIndex(2))
    number = bench.tier.sync()
    assert bench.tier.drain(DEADLINE_S)
    assert heal(bench.tier)
    assert bench.tier.drain(DEADLINE_S)
    assert bench.tier.synced == number
    bench.tier.forget(SlotIndex(1))
    assert bench.tier.drain(DEADLINE_S)
    assert crash(bench) == [0, 3]


def test_what_was_forgotten_meanwhile_is_filtered_out_by_the_control_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million blocks are half a second's work."""
    threads, genuine = list[str](), RecoveredBlocks.without

    def without(blocks: RecoveredBlocks, gone: bytearray) -> RecoveredBlocks:
        threads.append(threading.current_thread().name)
        return genuine(blocks, gone)

    monkeypatch.setattr(RecoveredBlocks, "without", without)
    for slot in range(4):
        store(bench.tier, LAYOUT, make_key(slot), slot)
    bench.tier._fault.declare("broken by the test")
    assert bench.tier.heal() is Outcome.PENDING
    assert bench.tier.drain(DEADLINE_S)
    bench.tier.forget(SlotIndex(2))
    assert heal(bench.tier)
    assert threads == ["kvbm-disk-control"] * 2
    assert sorted(by_slot(bench.tier.recovered())) == [0, 1, 3]


def test_voids_go_on_where_none_was_synced(bench: Bench) -> None:
    for slot in range(4):
        store(bench.tier, LAYOUT, make_key(slot), slot)
    bench.tier._fault.declare("broken by the test")
    assert bench.tier.heal() is Outcome.PENDING
    assert bench.tier.drain(DEADLINE_S)
    bench.tier.forget(SlotIndex(2))
    assert bench.tier.drain(DEADLINE_S)
    assert heal(bench.tier)
    bench.tier.forget(SlotIndex(1))
    assert bench.tier.drain(DEADLINE_S)
    assert crash(bench) == [0, 3]


@pytest.mark.swallows("MemoryError: ")
def test_an_index_that_cannot_be_read_leaves_no_open_directory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt would take another one, of the full size."""
    store(bench.tier, LAYOUT, make_key(1), 1)

    def recover(medium: DiskMedium) -> RecoveredBlocks:
        raise MemoryError

    bench.tier._fault.declare("broken by the test")
    with monkeypatch.context() as patch:
        patch.setattr(DiskMedium, "recover", recover)
        for _ in range(3):
            assert bench.tier.heal() is Outcome.PENDING
            assert bench.tier.drain(DEADLINE_S)
            assert bench.tier.heal() is Outcome.RETRY
    assert heal(bench.tier)
    assert sorted(by_slot(bench.tier.recovered())) == [1]
    assert len([path for path in bench.root.iterdir() if path.is_dir()]) == 1

"""Resets that the disk cannot record: after a crash none of their blocks is found."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm.block import SlotIndex
from kvbm.clock import ManualClock
from kvbm.testing.stored_runs import DEADLINE_S, LAYOUT, NAMESPACE, by_slot, heal, make_key, store
from kvbm.tiers.disk import reset_marks
from kvbm.tiers.disk.maintenance import SYNC_EXTRA_S, SYNC_S_MAX
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls
from rigs.gated_syscalls import GatedSyscalls

MARK = f"dynamo-kvbm-disk-cache-{NAMESPACE.short}.reset"


class Bench:
    """A disk, a second place, and the tier on it."""

    def __init__(self, directory: Path) -> None:
        self.root, self.notes_dir = directory / "disk", directory / "notes"
        self.notes_dir.mkdir()
        self.clock = ManualClock()
        self.tiers: list[DiskTier] = []

    def open(self, kernel: Syscalls | None = None, root: Path | None = None) -> DiskTier:
        tier = open_disk_tier(
            root or self.root,
            LAYOUT,
            NAMESPACE,
            capacity_blocks=8,
            notes_dir=self.notes_dir,
            clock=self.clock,
            syscalls=kernel,
        )
        self.tiers.append(tier)
        return tier

    def open_after_crash(self) -> DiskTier:
        """On what the disk has now: a process that is killed writes no more."""
        copy = self.root.with_name(f"copy-{len(self.tiers)}")
        shutil.copytree(self.root, copy)
        return self.open(root=copy)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for tier in bench.tiers:
        tier.close(keep=False)


def slots_of(tier: DiskTier) -> list[int]:
    return sorted(by_slot(tier.recovered()))


def fill(tier: DiskTier) -> None:
    for slot in range(4):
        store(tier, LAYOUT, make_key(slot), slot)


def reset(tier: DiskTier) -> int:
    """Forget all blocks; what `synced` reaches when that is durable."""
    tier.forget(SlotIndex(0), 8)
    return tier.sync()


def wait_for_marks(tier: DiskTier) -> None:
    """Let the owner have a turn, and the thread that it starts come to its end."""
    assert tier.drain(DEADLINE_S)
    tier.poll()
    join_marking()


def join_marking() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvbm-disk-mark":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def lose_disk(kernel: FaultySyscalls) -> None:
    kernel.power_off = True


def lose_journal(kernel: FaultySyscalls) -> None:
    kernel.arm(FaultRule(operation="pwritev", fault=Fault.EIO, file="journal"))


@pytest.mark.parametrize(
    ("lose", "notes", "marked"),
    [
        (lose_disk, True, ["notes"]),
        (lose_journal, False, ["disk"]),
        (lose_journal, True, ["disk", "notes"]),
    ],
    ids=["the disk is dead", "no second place", "both"],
)
def test_no_block_of_a_reset_while_the_disk_was_off_is_found_after_a_crash(
    bench: Bench, lose: Callable[[FaultySyscalls], None], notes: bool, marked: list[str]
) -> None:
    kernel = FaultySyscalls(1)
    tier = bench.open(kernel)
    fill(tier)
    lose(kernel)
    if not notes:
        bench.notes_dir.rmdir()
    wanted = reset(tier)
    wait_for_marks(tier)
    assert tier.fault
    assert tier.synced == wanted, "it may be answered"
    assert sorted(path.parent.name for path in bench.root.parent.glob(f"*/{MARK}")) == marked
    after = bench.open_after_crash()
    assert slots_of(after) == []
    store(after, LAYOUT, make_key(5), 5)
    after.close(keep=True)
    assert slots_of(bench.open(root=bench.root.with_name("copy-1"))) == [5], "later blocks stay"


def test_a_reset_that_can_be_marked_nowhere_is_not_taken_for_durable(bench: Bench) -> None:
    kernel = FaultySyscalls(1)
    tier = bench.open(kernel)
    fill(tier)
    lose_disk(kernel)
    bench.notes_dir.rmdir()
    wanted = reset(tier)
    wait_for_marks(tier)
    assert tier.synced < wanted


def test_a_tier_that_heals_has_no_block_of_a_reset_that_was_marked(bench: Bench) -> None:
    kernel = FaultySyscalls(1)
    tier = bench.open(kernel)
    fill(tier)
    lose_disk(kernel)
    reset(tier)
    wait_for_marks(tier)
    kernel.power_off = False
    assert heal(tier)
    assert slots_of(tier) == []
    store(tier, LAYOUT, make_key(5), 5)
    assert slots_of(bench.open_after_crash()) == [5]


@pytest.mark.parametrize("operation", ["pwritev", "fdatasync"])
def test_a_reset_while_the_disk_hangs_is_marked_and_recorded_when_it_goes_on(
    bench: Bench, operation: str
) -> None:
    kernel = GatedSyscalls()
    tier = bench.open(kernel)
    fill(tier)
    kernel.shut(operation, "journal")
    wanted = reset(tier)
    kernel.wait_entered()
    tier.poll()
    assert tier.synced < wanted and not list(bench.notes_dir.iterdir()), "it may end in a moment"
    bench.clock.advance(SYNC_S_MAX if operation != "fdatasync" else SYNC_EXTRA_S + SYNC_S_MAX)
    tier.poll()
    join_marking()
    assert tier.synced == wanted
    assert slots_of(bench.open_after_crash()) == []
    kernel.open_gate()
    assert tier.drain(DEADLINE_S)
    store(tier, LAYOUT, make_key(5), 5)
    assert tier.drain(DEADLINE_S), "the mark is recorded"
    assert slots_of(bench.open_after_crash()) == [5]


def test_a_reset_is_marked_while_the_root_of_the_disk_keeps_an_earlier_mark(bench: Bench) -> None:
    kernel = GatedSyscalls()
    tier = bench.open(kernel)
    fill(tier)
    kernel.shut()
    first = reset(tier)
    kernel.wait_entered()
    bench.clock.advance(SYNC_S_MAX)
    tier.poll()
    kernel.wait_entered()  # the mark in the root
    assert tier.synced == first
    second = reset(tier)
    tier.poll()
    threads = [thread for thread in threading.enumerate() if thread.name == "kvbm-disk-mark"]
    threads[-1].join(0.0 if len(threads) == 1 else DEADLINE_S)
    assert tier.synced == second
    kernel.open_gate()
    join_marking()


def test_one_thread_waits_for_a_second_place_that_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, entered, opened = bench.open(), list[Path](), threading.Event()
    fill(tier)
    tier._fault.declare("broken by the test")
    genuine = reset_marks.read_private

    def read_private(path: str) -> bytes:
        if Path(path).parent == bench.notes_dir:
            entered.append(Path(path))
            assert opened.wait(DEADLINE_S)
        return genuine(path)

    monkeypatch.setattr(reset_marks, "read_private", read_private)
    for _ in range(5):
        wanted = reset(tier)
        tier.poll()
    marking = [thread for thread in threading.enumerate() if thread.name == "kvbm-disk-mark"]
    opened.set()
    assert len(marking) == 1
    join_marking()
    assert tier.synced < wanted
    wait_for_marks(tier)
    assert tier.synced == wanted
    assert len(entered) == 2


def test_numbers_grow_though_the_clock_goes_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.root.mkdir()
    marks = reset_marks.ResetMarks(NAMESPACE.short, bench.root, bench.notes_dir, Syscalls())
    numbers = list[int]()
    for now_ns in (2000, 1000, 3000, 10):
        monkeypatch.setattr("time.time_ns", lambda now_ns=now_ns: now_ns)
        marks.add(0, numbers.append, lambda: None)
        assert marks.newest() == numbers[-1]
    assert numbers == [2000, 2000, 2001, 2001, 3000, 3000, 3001, 3001]


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"9" * 30])
def test_a_damaged_mark_counts_from_the_time_of_its_file(bench: Bench, content: bytes) -> None:
    tier = bench.open()
    fill(tier)
    tier.close(keep=True)
    (bench.notes_dir / MARK).write_bytes(content)
    assert slots_of(bench.open()) == []


def test_a_mark_of_another_user_is_none(bench: Bench) -> None:
    tier = bench.open()
    fill(tier)
    tier.close(keep=True)
    (bench.notes_dir / MARK).write_bytes(b"%d" % (1 << 62))
    (bench.notes_dir / MARK).chmod(0o666)  # it could be
    assert slots_of(bench.open()) == [0, 1, 2, 3]

"""Pages of the journal that cannot be read any more cost their own records, and no others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvbm.block import Outcome, SlotIndex
from kvbm.errors import TierError
from kvbm.layout import PAGE_BYTES
from kvbm.testing.stored_runs import DEADLINE_S, LAYOUT, NAMESPACE, by_slot, heal, load, make_key, store
from kvbm.tiers.disk.geometry import RECORD_BYTES
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls

PER_PAGE = PAGE_BYTES // RECORD_BYTES
SLOTS = 2 * PER_PAGE + 3
LOST = range(PER_PAGE, 2 * PER_PAGE)
KEPT = [slot for slot in range(SLOTS) if slot not in LOST]


class WornDisk(Syscalls):
    """The kernel on a disk of which pages wear out: a file that lies elsewhere is whole."""

    def __init__(self) -> None:
        self._worn: tuple[int, int] | None = None

    def wear_out(self, path: Path, page: int) -> None:
        self._worn = path.stat().st_ino, page * PAGE_BYTES

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check(fd, buffers, offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check(fd, buffers, offset)
        return super().pwritev(fd, buffers, offset)

    def _check(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        end = offset + sum(buffer.nbytes for buffer in buffers)
        inode, worn = self._worn or (0, 0)
        if os.fstat(fd).st_ino == inode and offset < worn + PAGE_BYTES and worn < end:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def open_tier(root: Path, syscalls: Syscalls) -> DiskTier:
    return open_disk_tier(root, LAYOUT, NAMESPACE, capacity_blocks=SLOTS, syscalls=syscalls)


@pytest.fixture
def disk() -> WornDisk:
    return WornDisk()


@pytest.fixture
def tier(tmp_path: Path, disk: WornDisk) -> Iterator[DiskTier]:
    """A full one; its journal has three pages."""
    tier = open_tier(tmp_path, disk)
    for slot in range(SLOTS):
        assert store(tier, LAYOUT, make_key(slot), slot).outcome is Outcome.HIT
    yield tier
    tier.close(keep=False)


def journal_of(tier: DiskTier) -> Path:
    assert tier.path is not None
    return tier.path / "journal"


def expect_whole(tier: DiskTier) -> None:
    """It works, with all blocks but those of the page, and their slots can be used."""
    assert sorted(by_slot(tier.recovered())) == KEPT
    for slot in KEPT:
        assert load(tier, LAYOUT, make_key(slot), slot).outcome is Outcome.HIT
    for slot in LOST:
        assert load(tier, LAYOUT, make_key(slot), slot).outcome is Outcome.MISS
        assert store(tier, LAYOUT, make_key(100 + slot), slot).outcome is Outcome.HIT
        assert load(tier, LAYOUT, make_key(100 + slot), slot).outcome is Outcome.HIT
    assert tier.fault == ""


def test_a_page_that_cannot_be_read_at_start_costs_its_blocks(
    tmp_path: Path, tier: DiskTier, disk: WornDisk, caplog: pytest.LogCaptureFixture
) -> None:
    journal = journal_of(tier)
    disk.wear_out(journal, 1)
    tier.close(keep=True)
    again = open_tier(tmp_path, disk)
    expect_whole(again)
    assert f"1 page(s) of the journal in {journal.parent} could not be read" in caplog.text
    caplog.clear()
    again.close(keep=True)
    third = open_tier(tmp_path, disk)
    assert len(by_slot(third.recovered())) == SLOTS
    assert caplog.text == "", "the journal has moved"
    assert sorted(os.listdir(journal.parent)) == ["journal", "lock", "meta.json", "slab-000"]
    third.close(keep=False)


def _read(tier: DiskTier) -> None:
    assert load(tier, LAYOUT, make_key(LOST[0]), LOST[0]).outcome is Outcome.RETRY


def _write(tier: DiskTier) -> None:
    assert store(tier, LAYOUT, make_key(99), LOST[0]).outcome is Outcome.RETRY


def _forget(tier: DiskTier) -> None:
    tier.forget(SlotIndex(LOST[0]))
    assert tier.drain(DEADLINE_S)


@pytest.mark.parametrize("use", [_read, _write, _forget])
def test_a_page_that_wears_out_in_use_costs_its_blocks(
    tier: DiskTier, disk: WornDisk, use: Callable[[DiskTier], None]
) -> None:
    disk.wear_out(journal_of(tier), 1)
    use(tier)
    assert tier.fault
    assert heal(tier)
    expect_whole(tier)


def test_a_journal_that_cannot_be_read_at_all_is_left_alone(tmp_path: Path, tier: DiskTier) -> None:
    """A cable, not a page: the blocks are found when it is mended."""
    tier.close(keep=True)
    dead = FaultRule(operation="preadv", fault=Fault.EIO, file="journal")
    with pytest.raises(TierError, match="cannot read the journal"):
        open_tier(tmp_path, FaultySyscalls(1, dead))
    again = open_tier(tmp_path, Syscalls())
    assert len(by_slot(again.recovered())) == SLOTS
    again.close(keep=False)


def test_a_move_that_fails_leaves_the_journal_as_it_was(
    tmp_path: Path, tier: DiskTier, disk: WornDisk
) -> None:
    journal = journal_of(tier)
    tier.close(keep=True)
    before = journal.read_bytes()
    worn = FaultRule(operation="preadv", fault=Fault.EIO, file="journal", offset=PAGE_BYTES)
    stuck = FaultRule(operation="rename", fault=Fault.EIO)
    with pytest.raises(TierError, match="cannot read the journal"):
        open_tier(tmp_path, FaultySyscalls(1, worn, stuck))
    assert journal.read_bytes() == before
    again = open_tier(tmp_path, Syscalls())
    assert len(by_slot(again.recovered())) == SLOTS
    assert not journal.with_name("journal.new").exists()
    again.close(keep=False)

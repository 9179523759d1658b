"""A filesystem that has no room: what is refused, what goes on, and what is left of it to others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbm.block import Outcome, SlotIndex
from kvbm.errors import TierError
from kvbm.layout import Namespace
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE, heal, load, make_key, store
from kvbm.tiers.disk import geometry
from kvbm.tiers.disk.room import LEFT_BYTES_MAX, LEFT_SHARE, Room
from kvbm.tiers.disk.syscalls import Syscalls
from rigs.disk import SLOTS, leave, open_tier, path_of
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls

GB = 10**9


class Filesystem(Syscalls):
    """A filesystem of a size of the test's choosing; what is written to it is not counted."""

    def __init__(self, size_bytes: int, free_bytes: int) -> None:
        self.size_bytes, self.free = size_bytes, free_bytes
        self.allocated = 0

    def filesystem_bytes(self, path: str) -> int:
        return self.size_bytes

    def free_bytes(self, path: str) -> int:
        return self.free - self.allocated

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        super().fallocate(fd, offset, length)
        self.allocated += length


@pytest.mark.parametrize(
    ("size_bytes", "left_bytes"),
    [(1 << 20, (1 << 20) // LEFT_SHARE), (10 * GB, GB // 10), (20_000 * GB, LEFT_BYTES_MAX), (0, 0)],
)
def test_a_hundredth_is_left_and_no_more_than_a_gigabyte(
    tmp_path: Path, size_bytes: int, left_bytes: int
) -> None:
    room = Room(Filesystem(size_bytes, size_bytes), tmp_path)
    assert room.left_bytes == left_bytes
    assert room.free_bytes() == size_bytes - left_bytes
    room.require(size_bytes - left_bytes)
    with pytest.raises(OSError, match="left to others"):
        room.require(size_bytes - left_bytes + 1)


def test_a_tier_that_would_fill_the_filesystem_is_refused(tmp_path: Path) -> None:
    size, wanted = 100 * LAYOUT.block_bytes, SLOTS * LAYOUT.block_bytes
    with pytest.raises(TierError, match=r"needs .* GB more and .* has .* GB free, beside .* left to others"):
        open_tier(tmp_path, syscalls=Filesystem(size, wanted + size // LEFT_SHARE - 4096))
    assert os.listdir(tmp_path) == []
    enough = wanted + size // LEFT_SHARE + 8192  # with a journal
    tier = open_tier(tmp_path, syscalls=Filesystem(size, enough))
    tier.close(keep=True)
    full = Filesystem(size, 0)
    tier = open_tier(tmp_path, syscalls=full)
    assert tier.fault == "", "what it needs it has already"
    tier.close(keep=False)


def test_a_tier_that_cannot_fit_takes_nothing_from_anybody(tmp_path: Path) -> None:
    """A size with a zero too many, while another model's engine and this one's are down."""
    mine = open_tier(tmp_path, unowned_bytes=10**12)
    for slot in range(SLOTS):
        store(mine, LAYOUT, make_key(slot), slot)
    mine.close(keep=True)
    others = leave(tmp_path, 3)
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*") if path.name != "lock"}
    small = Filesystem(10**9, LAYOUT.block_bytes)
    for namespace in (NAMESPACE, Namespace(model="new", fields=())):
        with pytest.raises(TierError, match="lower capacity_blocks"):
            open_tier(tmp_path, namespace, slots=10 * SLOTS, unowned_bytes=10**12, syscalls=small)
    assert {path: path.read_bytes() for path in before} == before
    assert sum(path.exists() for path in others) == len(others)
    assert len(os.listdir(tmp_path)) == 1 + len(others)
    tier = open_tier(tmp_path, unowned_bytes=10**12)
    assert len(list(tier.recovered())) == SLOTS
    tier.close(keep=False)


def test_a_directory_that_was_found_is_not_removed_when_it_cannot_be_used(tmp_path: Path) -> None:
    (path,) = leave(tmp_path, 1, NAMESPACE)
    meta = path / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 2', '"format": 1'))
    sizes = {name: (path / name).stat().st_size for name in ("slab-000", "journal")}
    assert all(sizes.values())
    with pytest.raises(TierError, match="GB free"):
        open_tier(tmp_path, slots=10 * SLOTS, syscalls=Filesystem(10**9, 0))
    assert {name: (path / name).stat().st_size for name in sizes} == sizes
    assert '"format": 1' in meta.read_text()


def test_what_a_smaller_tier_gives_back_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs that go and slabs that stay: nothing more is asked for, and nobody loses a directory for it."""
    monkeypatch.setattr(geometry, "SLAB_BYTES", 2 * LAYOUT.block_bytes)
    open_tier(tmp_path, slots=10).close(keep=True)
    others = leave(tmp_path, 1)

    class Counting(Filesystem):
        def free_bytes(self, path: str) -> int:
            taken = sum(each.lstat().st_blocks * 512 for each in tmp_path.rglob("*"))
            return max(0, self.free - taken)

    full_bytes = sum(each.lstat().st_blocks * 512 for each in tmp_path.rglob("*"))
    (mine,) = (path for path in tmp_path.iterdir() if path not in others)
    (mine / "slab-000").unlink()
    with (tmp_path / "somebody").open("wb") as file:
        file.write(bytes(2 * LAYOUT.block_bytes))  # took what this set free
    tier = open_tier(tmp_path, slots=4, syscalls=Counting(0, full_bytes))
    assert path_of(tier) == mine
    assert len(list(mine.glob("slab-*"))) == 2
    assert others[0].exists()
    tier.close(keep=False)


def test_two_that_start_at_once_do_not_fill_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees room for itself; the second to get there gives up before the rest is gone."""
    monkeypatch.setattr(geometry, "SLAB_BYTES", 2 * LAYOUT.block_bytes)
    size = 100 * LAYOUT.block_bytes

    class Crowded(Filesystem):
        looks = 0

        def free_bytes(self, path: str) -> int:
            self.looks += 1
            if self.looks == 4:
                self.free -= 7 * LAYOUT.block_bytes
            return super().free_bytes(path)

    crowded = Crowded(size, 14 * LAYOUT.block_bytes)
    with pytest.raises(TierError, match="left to others"):
        open_tier(tmp_path, slots=10, syscalls=crowded)
    assert crowded.free - crowded.allocated >= size // LEFT_SHARE
    assert os.listdir(tmp_path) == []


def test_zero_filling_stops_before_the_filesystem_is_full(tmp_path: Path) -> None:
    class Filled(Filesystem):
        def fallocate(self, fd: int, offset: int, length: int) -> None:
            raise OSError(95, "Operation not supported")

        def free_bytes(self, path: str) -> int:
            self.free -= 2 * LAYOUT.block_bytes
            return self.free

    crowded = Filled(10**9, 10 * LAYOUT.block_bytes + 10**7)
    with pytest.raises(TierError, match="left to others"):
        open_tier(tmp_path, slots=5, syscalls=crowded, zerofill_fallback=True)
    assert os.listdir(tmp_path) == []


def test_sparse_files_stop_growing_before_the_filesystem_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = (
        FaultRule(operation="fallocate", fault=Fault.EOPNOTSUPP),
        FaultRule(operation="free_bytes", fault=Fault.SHORT),
    )
    syscalls = FaultySyscalls(0, rules[0])
    tier = open_tier(tmp_path, syscalls=syscalls)
    store(tier, LAYOUT, make_key(0), 0)
    syscalls.arm(rules[1])
    writes = syscalls.calls.get("pwritev", 0)
    for slot in (1, 2):
        refused = store(tier, LAYOUT, make_key(slot), slot)
        assert refused.outcome is Outcome.RETRY
        assert "of the filesystem are left to others" in refused.error
        assert "\n" not in refused.error
    assert [record.getMessage() for record in caplog.records] == [f"{refused.error}; logged once"]
    assert syscalls.calls.get("pwritev", 0) == writes, "not a byte"
    assert tier.fault == ""
    assert load(tier, LAYOUT, make_key(0), 0).outcome is Outcome.HIT
    assert store(tier, LAYOUT, make_key(3), 0).outcome is Outcome.HIT, "these bytes it has"
    syscalls.disarm()
    syscalls.arm(rules[0])
    assert store(tier, LAYOUT, make_key(1), 1).outcome is Outcome.HIT
    tier.close(keep=False)


@pytest.mark.parametrize("written", [SLOTS, 2], ids=["full", "partly filled"])
@pytest.mark.parametrize("how", ["opens", "heals"])
def test_a_sparse_tier_comes_back_in_a_full_filesystem(tmp_path: Path, written: int, how: str) -> None:
    others = leave(tmp_path, 1)
    syscalls = FaultySyscalls(0, FaultRule(operation="fallocate", fault=Fault.EOPNOTSUPP))
    tier = open_tier(tmp_path, slots=20, syscalls=syscalls)
    for slot in range(written):
        store(tier, LAYOUT, make_key(slot), slot)
    syscalls.arm(FaultRule(operation="free_bytes", fault=Fault.SHORT))
    if how == "heals":
        syscalls.arm(FaultRule(operation="pwritev", fault=Fault.EIO, times=1))
        assert store(tier, LAYOUT, make_key(0), 0).outcome is Outcome.RETRY
        assert heal(tier)
    else:
        tier.close(keep=True)
        tier = open_tier(tmp_path, slots=20, syscalls=syscalls)
    assert len(list(tier.recovered())) == written
    assert others[0].exists(), "it would not have been enough"
    for slot in range(written):
        assert load(tier, LAYOUT, make_key(slot), slot).outcome is Outcome.HIT
        assert store(tier, LAYOUT, make_key(50 + slot), slot).outcome is Outcome.HIT
    assert store(tier, LAYOUT, make_key(9), written).outcome is Outcome.RETRY
    assert tier.fault == ""
    tier.close(keep=False)


def test_a_sparse_slab_that_has_all_its_bytes_asks_for_none(tmp_path: Path) -> None:
    """Also for slots whose record is void: a free one that is always refused would end all stores."""
    syscalls = FaultySyscalls(0, FaultRule(operation="fallocate", fault=Fault.EOPNOTSUPP))
    tier = open_tier(tmp_path, syscalls=syscalls)
    for slot in range(SLOTS):
        store(tier, LAYOUT, make_key(slot), slot)
    tier.forget(SlotIndex(2))
    tier.close(keep=True)
    syscalls.arm(FaultRule(operation="free_bytes", fault=Fault.SHORT))
    tier = open_tier(tmp_path, syscalls=syscalls)
    assert store(tier, LAYOUT, make_key(9), 2).outcome is Outcome.HIT
    tier.close(keep=False)


def test_reserved_files_go_on_in_a_full_filesystem(tmp_path: Path) -> None:
    syscalls = FaultySyscalls(0)
    tier = open_tier(tmp_path, syscalls=syscalls)
    syscalls.arm(FaultRule(operation="free_bytes", fault=Fault.SHORT))
    assert store(tier, LAYOUT, make_key(1), 1).outcome is Outcome.HIT
    tier.close(keep=False)

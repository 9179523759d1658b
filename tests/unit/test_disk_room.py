"""What is kept without an owner, what goes first, and what is left of a filesystem to others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.block import Outcome
from kvbm.errors import TierError
from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.faults import Fault, FaultRule, FaultySyscalls
from kvbm.testing.tier_contract import LAYOUT, NAMESPACE, OTHER_NAMESPACE, load, make_key, store
from kvbm.tiers import disk_geometry, disk_room
from kvbm.tiers.disk import DiskTier, open_disk_tier
from kvbm.tiers.disk_directory import DIRECTORY_PREFIX
from kvbm.tiers.disk_room import LEFT_BYTES_MAX, LEFT_SHARE, UNOWNED_TIERS, Room, list_unowned
from kvbm.tiers.disk_syscalls import Syscalls
from unit.manager_bench import ManagerBench

GB = 10**9
SLOTS = 4


def open_tier(
    root: Path, namespace: Namespace = NAMESPACE, slots: int = SLOTS, **options: object
) -> DiskTier:
    return open_disk_tier(
        root,
        LAYOUT,
        namespace,
        capacity_blocks=slots,
        io_threads=1,
        **options,  # type: ignore[arg-type]
    )


def path_of(tier: DiskTier) -> Path:
    assert tier.path is not None
    return tier.path


def leave(root: Path, count: int, namespace: Namespace = OTHER_NAMESPACE, slots: int = SLOTS) -> list[Path]:
    """So many directories of tiers that have ended, the least recently used first."""
    tiers = [open_tier(root, namespace, slots, unowned_bytes=10**12) for _ in range(count)]
    paths = [path_of(tier) for tier in tiers]
    for age, tier in enumerate(tiers):
        tier.close(keep=True)
        os.utime(paths[age] / "journal", (1000.0 + age, 1000.0 + age))
    return paths


def size_of(path: Path) -> int:
    return sum(entry.lstat().st_blocks * 512 for entry in (path, *path.iterdir()))


# ---- the bound


def test_the_least_recently_used_go_until_the_rest_is_within_the_bound(tmp_path: Path) -> None:
    left = [*leave(tmp_path, 3), *leave(tmp_path, 2, Namespace(model="third", fields=()))]
    for age, path in enumerate((left[3], left[0], left[4], left[1], left[2])):
        os.utime(path / "journal", (5000.0 + age, 5000.0 + age))
    size = size_of(left[0])
    tier = open_tier(tmp_path, unowned_bytes=3 * size + size // 2)
    assert [path.exists() for path in left] == [False, True, True, False, True], "whatever their namespace"
    tier.close(keep=False)
    tier = open_tier(tmp_path, unowned_bytes=3 * size)
    assert sum(path.exists() for path in left) == 3, "the bound itself is allowed"
    tier.close(keep=False)


def test_a_bound_of_nothing_keeps_what_was_claimed_and_what_is_owned(tmp_path: Path) -> None:
    owner = open_tier(tmp_path, OTHER_NAMESPACE)
    left = leave(tmp_path, 2) + leave(tmp_path, 2, NAMESPACE)
    tier = open_tier(tmp_path, unowned_bytes=0)
    assert [path.exists() for path in left] == [False, False, False, True]
    assert path_of(tier) == left[3]
    assert path_of(owner).exists()
    assert store(owner, LAYOUT, make_key(1), 1).outcome is Outcome.HIT
    for each in (owner, tier):
        each.close(keep=False)


def test_unset_as_many_are_kept_as_a_node_has_ranks(tmp_path: Path) -> None:
    left = leave(tmp_path, UNOWNED_TIERS + 2, slots=200)
    tier = open_tier(tmp_path, slots=200)
    assert [path.exists() for path in left] == [False] * 2 + [True] * UNOWNED_TIERS
    tier.close(keep=False)


def test_unset_a_small_tier_does_not_end_the_cache_of_large_ones(tmp_path: Path) -> None:
    left = leave(tmp_path, 3, slots=200)
    tier = open_tier(tmp_path, slots=1)
    assert all(path.exists() for path in left)
    tier.close(keep=False)


def test_the_spaces_of_one_manager_count_as_one_tier(
    make_manager: Callable[..., ManagerBench], tmp_path: Path
) -> None:
    """A manager of twelve namespaces starts again: the first to come must not drop the cache of the others."""
    disk = tmp_path / "disk"
    names = [Namespace(model=f"model {i}", fields=(("weights", str(i)),)) for i in range(12)]
    for namespace in names:
        open_disk_tier(
            disk, BlockLayout(block_tokens=4, shard_bytes=4096), namespace, capacity_blocks=4
        ).close(keep=True)
    before = set(disk.iterdir())
    assert len(before) == 12
    manager = make_manager(12, host_blocks=48, disk_blocks=48, disk_dir=str(disk))
    manager.engine(namespace=names[0])
    assert set(disk.iterdir()) == before


def test_the_setting_reaches_the_tier(make_manager: Callable[..., ManagerBench], tmp_path: Path) -> None:
    left = leave(tmp_path / "disk", 2)
    manager = make_manager(disk_blocks=4, disk_dir=str(tmp_path / "disk"), disk_unowned_bytes=0)
    manager.engine()
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("kind", ["symlink", "writable by all", "another user's"])
def test_what_is_not_this_users_alone_is_neither_counted_nor_removed(tmp_path: Path, kind: str) -> None:
    (stranger,) = leave(tmp_path / "elsewhere" if kind == "symlink" else tmp_path, 1)
    if kind == "symlink":
        stranger = tmp_path / stranger.name
        stranger.symlink_to(tmp_path / "elsewhere" / stranger.name)
    elif kind == "writable by all":
        stranger.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(stranger, 12345, -1)
    else:
        pytest.skip("only root can give a directory to another user")
    assert list_unowned(tmp_path, tmp_path / "ours") == []
    open_tier(tmp_path, unowned_bytes=0).close(keep=False)
    assert (stranger / "journal").exists()


def test_one_that_cannot_be_removed_does_not_stand_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave(tmp_path, 3)
    remove = disk_room.remove_directory
    monkeypatch.setattr(disk_room, "remove_directory", lambda path: path != left[0] and remove(path))
    tier = open_tier(tmp_path, unowned_bytes=2 * size_of(left[0]))
    assert [path.exists() for path in left] == [True, False, True]
    tier.close(keep=False)


def test_one_that_finds_an_owner_meanwhile_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave(tmp_path, 3)
    remove, owners = disk_room.remove_directory, []

    def overtaken(path: Path) -> bool:
        if not owners:
            os.utime(left[0] / "journal", (9e9, 9e9))  # the one that it will take
            owners.append(open_tier(tmp_path, OTHER_NAMESPACE, unowned_bytes=10**12))
        return remove(path)

    monkeypatch.setattr(disk_room, "remove_directory", overtaken)
    tier = open_tier(tmp_path, unowned_bytes=size_of(left[0]))
    assert is_there(owners[0]), "its owner came first"
    assert [path.exists() for path in left] == [True, False, True]
    for each in (tier, *owners):
        each.close(keep=False)


def test_one_that_another_claim_removes_meanwhile_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave(tmp_path, 3)
    remove, done = disk_room.remove_directory, []

    def overtaken(path: Path) -> bool:
        if not done:
            done.append(remove(path))
        return remove(path)

    monkeypatch.setattr(disk_room, "remove_directory", overtaken)
    tier = open_tier(tmp_path, unowned_bytes=2 * size_of(left[0]))
    assert [path.exists() for path in left] == [False, True, True]
    tier.close(keep=False)


def is_there(tier: DiskTier) -> bool:
    return path_of(tier).exists() and store(tier, LAYOUT, make_key(3), 3).outcome is Outcome.HIT


# ---- what is left to others


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


def test_two_that_start_at_once_do_not_fill_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees room for itself; the second to get there gives up before the rest is gone."""
    monkeypatch.setattr(disk_geometry, "SLAB_BYTES", 2 * LAYOUT.block_bytes)
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


def test_sparse_files_stop_growing_before_the_filesystem_is_full(tmp_path: Path) -> None:
    rules = (
        FaultRule(operation="fallocate", fault=Fault.EOPNOTSUPP),
        FaultRule(operation="free_bytes", fault=Fault.SHORT),
    )
    syscalls = FaultySyscalls(0, rules[0])
    tier = open_tier(tmp_path, syscalls=syscalls)
    store(tier, LAYOUT, make_key(0), 0)
    syscalls.arm(rules[1])
    writes = syscalls.calls.get("pwritev", 0)
    assert store(tier, LAYOUT, make_key(1), 1).outcome is Outcome.RETRY
    assert syscalls.calls.get("pwritev", 0) == writes, "not a byte"
    assert "of the filesystem are left to others" in tier.fault
    assert "\n" not in tier.fault
    assert not tier.heal()
    syscalls.disarm()
    syscalls.arm(rules[0])
    assert tier.heal()
    assert load(tier, LAYOUT, make_key(0), 0).outcome is Outcome.HIT
    tier.close(keep=False)


def test_reserved_files_go_on_in_a_full_filesystem(tmp_path: Path) -> None:
    syscalls = FaultySyscalls(0)
    tier = open_tier(tmp_path, syscalls=syscalls)
    syscalls.arm(FaultRule(operation="free_bytes", fault=Fault.SHORT))
    assert store(tier, LAYOUT, make_key(1), 1).outcome is Outcome.HIT
    tier.close(keep=False)


# ---- a new format


def test_a_directory_of_the_old_format_starts_empty_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = leave(tmp_path, 1, NAMESPACE)
    meta = path / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 2', '"format": 1'))
    tier = open_tier(tmp_path)
    assert path_of(tier) == path
    assert list(tier.recovered()) == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"disk tier: {path} starts empty: its format is 1, and 2 is wanted"
    assert path.name.startswith(DIRECTORY_PREFIX)
    tier.close(keep=False)

"""Which directories are kept without an owner, and which go first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.block import Outcome
from kvbm.errors import TierError
from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE, OTHER_NAMESPACE, make_key, store
from kvbm.tiers.disk import directory, room
from kvbm.tiers.disk.directory import DIRECTORY_PREFIX, last_used_s
from kvbm.tiers.disk.room import (
    UNOWNED_S,
    UNOWNED_TIERS,
    list_unowned,
)
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from rigs.disk import leave, open_tier, path_of
from rigs.manager import ManagerBench


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


def test_unset_what_was_used_within_a_week_stays_however_much_it_is(tmp_path: Path) -> None:
    left = leave(tmp_path, UNOWNED_TIERS + 3, slots=200)
    now_s = (tmp_path / left[0].name / "lock").stat().st_mtime
    ages_s = [UNOWNED_S + 3600.0, UNOWNED_S - 3600.0, *[0.0] * (len(left) - 2)]
    for path, age_s in zip(left, ages_s, strict=True):
        os.utime(path / "journal", (now_s - age_s,) * 2)
    tier = open_tier(tmp_path, slots=200)
    assert [path.exists() for path in left] == [False] + [True] * (len(left) - 1)
    tier.close(keep=False)
    tier = open_tier(tmp_path, slots=200, unowned_bytes=size_of(left[1]))
    assert [path.exists() for path in left[:-1]] == [False] * (len(left) - 1), (
        "a bound that was set is kept to"
    )
    tier.close(keep=False)


def test_a_tier_that_was_only_read_counts_as_used_when_it_opens_and_when_it_closes(tmp_path: Path) -> None:
    class Untouched(Syscalls):
        """A filesystem that takes no notice of bytes that were reserved before."""

        def fallocate(self, fd: int, offset: int, length: int) -> None:
            assert os.fstat(fd).st_size >= offset + length

    (path,) = leave(tmp_path, 1, NAMESPACE, slots=16)  # whose records fill a page
    assert last_used_s(path) < 2000.0
    tier = open_tier(tmp_path, slots=16, syscalls=Untouched())
    assert last_used_s(path) > 10**9, "it may be killed"
    os.utime(path / "journal", (1000.0, 1000.0))
    tier.close(keep=True)
    assert last_used_s(path) > 10**9


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


def test_where_every_stranger_has_our_id_no_directory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the cache that somebody else may have put there, nor a new one beside it."""
    (left,) = leave(tmp_path, 1)
    monkeypatch.setattr(directory, "nameless_as", lambda: "65534: run as another user")
    with pytest.raises(TierError, match="we are user 65534: run as another user"):
        open_tier(tmp_path)
    assert list(tmp_path.iterdir()) == [left]


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
    remove = room.remove_directory
    monkeypatch.setattr(room, "remove_directory", lambda path: path != left[0] and remove(path))
    tier = open_tier(tmp_path, unowned_bytes=2 * size_of(left[0]))
    assert [path.exists() for path in left] == [True, False, True]
    tier.close(keep=False)


def test_one_that_finds_an_owner_meanwhile_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave(tmp_path, 3)
    remove, owners = room.remove_directory, []

    def overtaken(path: Path) -> bool:
        if not owners:
            os.utime(left[0] / "journal", (9e9, 9e9))  # the one that it will take
            owners.append(open_tier(tmp_path, OTHER_NAMESPACE, unowned_bytes=10**12))
        return remove(path)

    monkeypatch.setattr(room, "remove_directory", overtaken)
    tier = open_tier(tmp_path, unowned_bytes=size_of(left[0]))
    assert is_there(owners[0]), "its owner came first"
    assert [path.exists() for path in left] == [True, False, True]
    for each in (tier, *owners):
        each.close(keep=False)


def test_one_that_another_claim_removes_meanwhile_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave(tmp_path, 3)
    remove, done = room.remove_directory, []

    def overtaken(path: Path) -> bool:
        if not done:
            done.append(remove(path))
        return remove(path)

    monkeypatch.setattr(room, "remove_directory", overtaken)
    tier = open_tier(tmp_path, unowned_bytes=2 * size_of(left[0]))
    assert [path.exists() for path in left] == [False, True, True]
    tier.close(keep=False)


def is_there(tier: DiskTier) -> bool:
    return path_of(tier).exists() and store(tier, LAYOUT, make_key(3), 3).outcome is Outcome.HIT


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

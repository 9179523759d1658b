"""Who gets which directory, and what happens to those that nobody owns."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from kvbm.errors import SettingsError, TierError
from kvbm.layout import BlockLayout
from kvbm.testing.faults import Fault, FaultRule, FaultySyscalls
from kvbm.testing.tier_contract import NAMESPACE, OTHER_NAMESPACE
from kvbm.tiers.disk_directory import (
    DIRECTORY_PREFIX,
    ClaimedDirectory,
    claim_directory,
    describe,
    is_locked,
    list_directories,
    owner_pid,
    read_meta,
    remove_directory,
)
from kvbm.tiers.disk_geometry import DiskGeometry
from kvbm.tiers.disk_syscalls import Syscalls

STEM = f"{DIRECTORY_PREFIX}{NAMESPACE.short}"
META = describe(
    NAMESPACE,
    BlockLayout(block_tokens=16, shard_bytes=4096),
    DiskGeometry(block_bytes=4096, slot_count=4, slab_slots=4),
)


def claim(root: Path) -> ClaimedDirectory:
    return claim_directory(root, NAMESPACE, Syscalls())


def test_two_owners_get_two_directories(tmp_path: Path) -> None:
    first, second = claim(tmp_path), claim(tmp_path)
    assert [first.path.name, second.path.name] == [f"{STEM}-0", f"{STEM}-1"]
    assert all(is_locked(path) for path in (first.path, second.path))
    assert owner_pid(first.path) == os.getpid()
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.release(remove=False)
    second.release(remove=False)
    assert not is_locked(first.path)


def test_what_was_left_behind_is_taken_over_with_its_meta(tmp_path: Path) -> None:
    first = claim(tmp_path)
    assert first.created
    assert first.found is None
    first.write_meta(META)
    first.release(remove=False)
    again = claim(tmp_path)
    assert again.path == first.path
    assert not again.created
    assert again.found == META
    assert sorted(os.listdir(again.path)) == ["lock", "meta.json"]
    again.release(remove=True)
    assert os.listdir(tmp_path) == []


def test_leftovers_behind_ours_are_removed_and_owned_ones_are_not(tmp_path: Path) -> None:
    owners = [claim(tmp_path) for _ in range(4)]
    for index in (0, 2):
        owners[index].release(remove=False)
    stranger = claim_directory(tmp_path, OTHER_NAMESPACE, Syscalls())
    stranger.release(remove=False)
    claimed = claim(tmp_path)
    assert claimed.path.name == f"{STEM}-0"
    assert [path.name for path in list_directories(tmp_path, NAMESPACE.short)] == [
        f"{STEM}-0",
        f"{STEM}-1",
        f"{STEM}-3",
    ]
    assert stranger.path in list_directories(tmp_path)
    for owner in (claimed, owners[1], owners[3]):
        owner.release(remove=False)


def test_indexes_sort_as_numbers(tmp_path: Path) -> None:
    for index in (10, 9, 0):
        (tmp_path / f"{STEM}-{index}").mkdir()
    (tmp_path / f"{STEM}-x").mkdir()
    (tmp_path / f"{STEM}-1").write_text("no directory")
    assert [path.name for path in list_directories(tmp_path)] == [f"{STEM}-{n}" for n in (0, 9, 10)]


def test_somebody_who_looks_does_not_drive_a_claim_away(tmp_path: Path) -> None:
    claim(tmp_path).release(remove=False)
    looker = os.open(tmp_path / f"{STEM}-0" / "lock", os.O_RDONLY)
    fcntl.flock(looker, fcntl.LOCK_SH)

    class LooksAway(Syscalls):
        opens = 0

        def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
            LooksAway.opens += 1
            if LooksAway.opens == 3:
                fcntl.flock(looker, fcntl.LOCK_UN)
            return super().open(path, flags, mode, dir_fd=dir_fd)

    claimed = claim_directory(tmp_path, NAMESPACE, LooksAway())
    assert claimed.path.name == f"{STEM}-0"
    assert LooksAway.opens == 3
    claimed.release(remove=True)
    os.close(looker)


def test_a_directory_removed_between_opening_and_locking_is_not_used(tmp_path: Path) -> None:
    claim(tmp_path).release(remove=False)

    class RemovesOnce(Syscalls):
        removed = False

        def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
            fd = super().open(path, flags, mode, dir_fd=dir_fd)
            if not RemovesOnce.removed:
                RemovesOnce.removed = remove_directory(tmp_path / f"{STEM}-0")
            return fd

    claimed = claim_directory(tmp_path, NAMESPACE, RemovesOnce())
    assert RemovesOnce.removed
    assert claimed.path.name == f"{STEM}-0"
    assert claimed.vanished() == ""
    assert is_locked(claimed.path)
    claimed.release(remove=True)


@pytest.mark.parametrize("kind", ["file", "symlink", "writable by all"])
def test_what_is_not_ours_alone_is_passed_over(tmp_path: Path, kind: str) -> None:
    first = tmp_path / f"{STEM}-0"
    if kind == "file":
        first.write_text("not a directory")
    elif kind == "symlink":
        (tmp_path / "elsewhere").mkdir()
        first.symlink_to(tmp_path / "elsewhere")
    else:
        first.mkdir()
        first.chmod(0o777)
    claimed = claim(tmp_path)
    assert claimed.path.name == f"{STEM}-1"
    assert not remove_directory(first)
    claimed.release(remove=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_another_users_directory_is_passed_over(tmp_path: Path) -> None:
    first = tmp_path / f"{STEM}-0"
    first.mkdir(0o700)
    os.chown(first, 12345, -1)
    claimed = claim(tmp_path)
    assert claimed.path.name == f"{STEM}-1"
    claimed.release(remove=True)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 1}', b"x" * (2 << 20)],
    ids=["empty", "cut", "list", "binary", "poor", "long"],
)
def test_a_meta_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "meta.json").write_bytes(content)
    assert read_meta(tmp_path / "meta.json") is None


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("")
    for path in (root, root / "below"):
        with pytest.raises(SettingsError, match="DYN_KVBM_DISK_CACHE_DIR") as caught:
            claim(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_read_only_root_is_refused_and_a_failing_one_is_a_fault(tmp_path: Path) -> None:
    read_only = FaultySyscalls(0, FaultRule(operation="mkdir", fault=Fault.EROFS))
    with pytest.raises(SettingsError, match=r"DYN_KVBM_DISK_CACHE_DIR.*Read-only"):
        claim_directory(tmp_path, NAMESPACE, read_only)
    failing = FaultySyscalls(0, FaultRule(operation="mkdir", fault=Fault.EIO))
    with pytest.raises(TierError, match="Input/output error"):
        claim_directory(tmp_path, NAMESPACE, failing)


def test_a_missing_root_is_made(tmp_path: Path) -> None:
    claimed = claim(tmp_path / "a" / "b")
    assert claimed.path.parent == tmp_path / "a" / "b"
    claimed.release(remove=True)


def test_removing_respects_owners(tmp_path: Path) -> None:
    owner = claim(tmp_path)
    assert not remove_directory(owner.path)
    owner.release(remove=False)
    assert remove_directory(owner.path)
    assert not remove_directory(owner.path)


def test_the_name_of_a_model_is_a_label_and_its_fingerprint_is_not() -> None:
    layout, geometry = BlockLayout(block_tokens=16, shard_bytes=4096), META.geometry
    renamed = describe(msgspec.structs.replace(NAMESPACE, model="another name"), layout, geometry)
    assert META.same_blocks(renamed)
    assert META.same_blocks(describe(NAMESPACE, layout, msgspec.structs.replace(geometry, slot_count=8)))
    assert not META.same_blocks(describe(OTHER_NAMESPACE, layout, geometry))
    assert not META.same_blocks(describe(NAMESPACE, BlockLayout(block_tokens=32, shard_bytes=4096), geometry))


def test_a_pipe_in_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    """Whoever may write to the root could put one there; opening it to read would wait for a writer."""
    stranger = tmp_path / f"{DIRECTORY_PREFIX}0123456789ab-0"
    stranger.mkdir()
    for name in ("meta.json", "lock"):
        os.mkfifo(stranger / name)
    assert read_meta(stranger / "meta.json") is None
    assert not is_locked(stranger)
    assert owner_pid(stranger) is None
    claim_directory(tmp_path, NAMESPACE, Syscalls()).release(remove=True)

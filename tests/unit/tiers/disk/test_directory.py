"""Which tier gets which directory, and the end of those that nobody owns."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from kvbm.errors import SettingsError, TierError
from kvbm.layout import BlockLayout
from kvbm.testing.stored_runs import NAMESPACE, OTHER_NAMESPACE
from kvbm.tiers.disk import directory as disk_directory
from kvbm.tiers.disk.directory import (
    DIRECTORY_PREFIX,
    ClaimedDirectory,
    claim_directory,
    is_locked,
    list_directories,
    owner_pid,
    remove_directory,
)
from kvbm.tiers.disk.directory_meta import FORMAT_VERSION, DirectoryMeta, describe, encode_meta, read_meta
from kvbm.tiers.disk.geometry import DiskGeometry
from kvbm.tiers.disk.syscalls import Syscalls
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls

STEM = f"{DIRECTORY_PREFIX}{NAMESPACE.short}"
META = describe(
    NAMESPACE,
    BlockLayout(block_tokens=16, shard_bytes=4096),
    DiskGeometry(block_bytes=4096, slot_count=4, slab_slots=4),
)
OTHER_META = describe(OTHER_NAMESPACE, BlockLayout(block_tokens=16, shard_bytes=4096), META.geometry)


def claim(root: Path) -> ClaimedDirectory:
    return claim_directory(root, META, Syscalls())


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


def leave(root: Path, meta: DirectoryMeta, used_s: float = 100.0) -> Path:
    """A directory with this content that nobody owns, used last at this time. Index as it comes."""
    index = len(list_directories(root, meta.namespace.short))
    path = root / f"{DIRECTORY_PREFIX}{meta.namespace.short}-{index}"
    path.mkdir(0o700, parents=True)
    (path / "meta.json").write_bytes(encode_meta(meta))
    (path / "journal").write_bytes(b"")
    os.utime(path / "journal", (used_s, used_s))
    return path


def resized(slot_count: int, slab_slots: int = 4, format_version: int = FORMAT_VERSION) -> DirectoryMeta:
    return msgspec.structs.replace(META, slot_count=slot_count, slab_slots=slab_slots, format=format_version)


def test_what_others_left_stays_whoever_comes_back_first(tmp_path: Path) -> None:
    paths = {leave(tmp_path, META) for _ in range(4)} | {leave(tmp_path, OTHER_META)}
    owners = [claim(tmp_path) for _ in range(2)]
    assert set(list_directories(tmp_path)) == paths
    owners += [claim(tmp_path) for _ in range(3)]
    assert [owner.created for owner in owners] == [False] * 4 + [True]
    assert {owner.path for owner in owners} >= paths - {tmp_path / f"{STEM}-4"} - set(
        list_directories(tmp_path, OTHER_NAMESPACE.short)
    )
    for owner in owners:
        owner.release(remove=False)


def test_the_one_used_last_is_taken_first(tmp_path: Path) -> None:
    order = [leave(tmp_path, META, used_s) for used_s in (200.0, 400.0, 300.0)]
    owners = [claim(tmp_path) for _ in range(3)]
    assert [owner.path for owner in owners] == [order[1], order[2], order[0]]
    for owner in owners:
        owner.release(remove=False)


def test_one_of_the_wanted_size_is_taken_before_others(tmp_path: Path) -> None:
    """A replica with less room would cut off what one with more has left."""
    large = leave(tmp_path, resized(8), 400.0)
    small, equal = leave(tmp_path, resized(2), 200.0), leave(tmp_path, META, 300.0)
    owners = [claim(tmp_path) for _ in range(3)]
    assert [owner.path for owner in owners] == [equal, small, large]
    for owner in owners:
        owner.release(remove=False)


def test_one_that_was_held_before_is_taken_again(tmp_path: Path) -> None:
    paths = [leave(tmp_path, META, used_s) for used_s in (100.0, 300.0, 200.0)]
    again = claim_directory(tmp_path, META, Syscalls(), before=paths[2])
    assert again.path == paths[2]
    first = claim_directory(tmp_path, META, Syscalls(), before=paths[2])
    assert first.path == paths[1], "its new owner keeps it"
    for owner in (again, first):
        owner.release(remove=False)


@pytest.mark.parametrize(
    "useless",
    [resized(4, slab_slots=2), resized(4, format_version=1), OTHER_META],
    ids=["slab", "format", "namespace"],
)
def test_blocks_that_cannot_be_used_are_passed_over_while_others_can(
    tmp_path: Path, useless: DirectoryMeta
) -> None:
    first = leave(tmp_path, META)
    (first / "meta.json").write_bytes(encode_meta(useless))
    os.utime(first / "journal", (900.0, 900.0))
    second = leave(tmp_path, META)
    owners = [claim(tmp_path), claim(tmp_path)]
    assert owners[0].path == second
    if useless.format == FORMAT_VERSION:
        assert owners[1].created, "somebody else's blocks stay"
    else:
        assert owners[1].path == first
        assert owners[1].found == useless, "nobody reads these any more"
    assert "\n" not in useless.difference(META)
    for owner in owners:
        owner.release(remove=False)


def test_one_that_was_taken_and_changed_meanwhile_is_given_back(tmp_path: Path) -> None:
    path = leave(tmp_path, META)

    class Overtaken(Syscalls):
        """Somebody of another size had the directory between our look and our lock."""

        def open(self, path_: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
            (path / "meta.json").write_bytes(encode_meta(resized(4, slab_slots=2)))
            return super().open(path_, flags, mode, dir_fd=dir_fd)

    claimed = claim_directory(tmp_path, META, Overtaken())
    assert claimed.created
    assert not is_locked(path)
    assert read_meta(path / "meta.json") == resized(4, slab_slots=2)
    claimed.release(remove=False)


def test_other_blocks_are_taken_when_no_index_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_directory, "INDEX_COUNT_MAX", 2)
    paths = [leave(tmp_path, resized(4, slab_slots=2)) for _ in range(2)]
    with pytest.raises(TierError, match="taken"):
        claim_directory(tmp_path, msgspec.structs.replace(META, persist=False), Syscalls())
    owners = [claim(tmp_path), claim(tmp_path)]
    assert [owner.path for owner in owners] == paths
    for owner in owners:
        owner.release(remove=False)


def test_many_at_once_get_one_each(tmp_path: Path) -> None:
    """Threads hold locks of their own as processes do: each opens the lock file anew."""
    paths = {leave(tmp_path, META) for _ in range(6)}
    start = threading.Barrier(6)

    def come() -> ClaimedDirectory:
        start.wait(20)
        return claim(tmp_path)

    with ThreadPoolExecutor(6) as pool:
        owners = [come.result() for come in [pool.submit(come) for _ in range(6)]]
    assert {owner.path for owner in owners} == paths
    for owner in owners:
        owner.release(remove=False)


@pytest.mark.parametrize("kind", ["symlink", "writable by all", "another user's"])
def test_a_directory_that_is_not_ours_alone_is_not_taken_for_its_blocks(tmp_path: Path, kind: str) -> None:
    first = leave(tmp_path / "elsewhere" if kind == "symlink" else tmp_path, META)
    if kind == "symlink":
        (tmp_path / first.name).symlink_to(first)
    elif kind == "writable by all":
        first.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(first, 12345, -1)
    else:
        pytest.skip("only root can give a directory to another user")
    claimed = claim(tmp_path)
    assert claimed.path.name == f"{STEM}-1"
    claimed.release(remove=True)
    assert first.exists()


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

    claimed = claim_directory(tmp_path, META, LooksAway())
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

    claimed = claim_directory(tmp_path, META, RemovesOnce())
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
        with pytest.raises(SettingsError, match="root=") as caught:
            claim(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_read_only_root_is_refused_and_a_failing_one_is_a_fault(tmp_path: Path) -> None:
    read_only = FaultySyscalls(0, FaultRule(operation="mkdir", fault=Fault.EROFS))
    with pytest.raises(SettingsError, match=r"root=.*Read-only"):
        claim_directory(tmp_path, META, read_only)
    failing = FaultySyscalls(0, FaultRule(operation="mkdir", fault=Fault.EIO))
    with pytest.raises(TierError, match="Input/output error"):
        claim_directory(tmp_path, META, failing)


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
    claim_directory(tmp_path, META, Syscalls()).release(remove=True)

"""A directory as a store: what the contract does not see. Rights, links, leftovers, errors, a server that is silent."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvbm.clock import ManualClock
from kvbm.tiers.remote.blobs import Put, StoreError
from kvbm.tiers.remote.drivers.directory import LEFTOVER_S, DirectoryBlobs
from rigs.manager_probe import wait_for

NAME = "packs/ab/0123"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryBlobs]:
    store = DirectoryBlobs(tmp_path, ManualClock())
    yield store
    store.close()


def failing(number: int) -> object:
    def call(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_only_we_may_look(store: DirectoryBlobs, tmp_path: Path) -> None:
    store.put(NAME, [b"x"])
    assert stat.S_IMODE((tmp_path / "packs").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "packs/ab").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "packs/ab").iterdir()] == ["0123"]


@pytest.mark.parametrize("link", ["packs", "packs/ab", NAME])
def test_links_are_refused(
    store: DirectoryBlobs, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, link: str
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "ab").mkdir()
    (elsewhere / "ab" / "0123").write_bytes(b"another's")
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    target = elsewhere / Path(NAME).relative_to("packs") if link == NAME else elsewhere
    (tmp_path / link).symlink_to(target)
    with pytest.raises(StoreError) as caught:
        store.read(NAME, 0, 10)
    assert caught.value.trouble == "refused"
    assert [info.name for info in store.listing("")] == []
    if link != NAME:
        with pytest.raises(StoreError):
            store.put("packs/ab/4567", [b"x"])
    assert sorted(path.name for path in (elsewhere / "ab").iterdir()) == ["0123"]


def test_a_root_that_is_a_link_absent_or_everybody_s(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, trouble in (("link", "refused"), ("absent", "unreachable"), ("open", "refused")):
        store = DirectoryBlobs(tmp_path / name, ManualClock())
        with pytest.raises(StoreError) as caught:
            store.put(NAME, [b"x"])
        assert caught.value.trouble == trouble
        store.close()
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "full"),
        (errno.EACCES, "refused"),
        (errno.EROFS, "refused"),
        (errno.EIO, "failed"),
        (errno.ESTALE, "failed"),
        (errno.ETIMEDOUT, "slow"),
    ],
)
def test_errors_are_of_their_kind_and_leave_nothing(
    store: DirectoryBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, trouble: str
) -> None:
    monkeypatch.setattr(os, "writev", failing(number))
    with pytest.raises(StoreError) as caught:
        store.put(NAME, [b"x"])
    assert caught.value.trouble == trouble
    assert list((tmp_path / "packs/ab").iterdir()) == []
    monkeypatch.undo()
    assert store.put(NAME, [b"x"]) is Put.CREATED


def test_a_stale_directory_is_opened_again(store: DirectoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(NAME, [b"x"])
    real, failures = os.preadv, [errno.ESTALE]

    def once(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        if failures:
            raise OSError(failures.pop(), "stale")
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", once)
    assert store.read(NAME, 0, 1) == b"x"


def test_short_writes_and_reads_go_on(store: DirectoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [parts[0][:7]]))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:5]], at))
    blob = os.urandom(100)
    store.put(NAME, [blob[:50], blob[50:]])
    assert store.read(NAME, 0, 100) == blob


def test_without_hard_links_it_renames(store: DirectoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    assert store.put(NAME, [b"x"]) is Put.CREATED
    assert store.put(NAME, [b"y"]) is Put.EXISTS
    assert store.read(NAME, 0, 9) == b"x"
    assert len(store.notes) == 1


def test_what_dead_writers_left_is_removed_when_old(store: DirectoryBlobs, tmp_path: Path) -> None:
    store.put(NAME, [b"x"])
    for name, age_s in (("old", LEFTOVER_S + 60.0), ("young", LEFTOVER_S - 60.0)):
        left = tmp_path / "packs/ab" / f".unfinished-{name}"
        left.write_bytes(b"half")
        os.utime(left, (left.stat().st_mtime - age_s,) * 2)
    assert [info.name for info in store.listing("")] == [NAME]
    assert sorted(path.name for path in (tmp_path / "packs/ab").iterdir()) == [".unfinished-young", "0123"]


def test_a_silent_server_is_given_up_and_nothing_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryBlobs(tmp_path, ManualClock(), deadline_s=0.2, thread_count=1)
    gate, real = threading.Event(), os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: (gate.wait(30.0), real(fd, parts))[1])
    for _ in range(3):  # one is under way, one waits, a third is not even taken
        with pytest.raises(StoreError) as caught:
            store.put(NAME, [b"x"])
        assert caught.value.trouble == "slow"
    gate.set()
    monkeypatch.undo()
    # The thread works again, once it has thrown away what was given up.
    wait_for(lambda: _took(store, "packs/ab/4567"), 30.0, "the thread is still stuck")
    assert store.read(NAME, 0, 1) is None
    store.close()
    with pytest.raises(StoreError):
        store.read(NAME, 0, 1)


def _took(store: DirectoryBlobs, name: str) -> bool:
    try:
        store.put(name, [b"x"])
    except StoreError:
        return False
    return True

"""The runtime directory: what somebody else could have put at a path that anybody can guess, and what we make of it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm import peers, runtime_dir
from kvbm.client.finder import ERROR_SUFFIX, ManagerAddress, ManagerFinder
from kvbm.client.whereabouts import known_sockets
from kvbm.clock import ManualClock
from kvbm.errors import ManagerUntrusted, SettingsError
from kvbm.manager import process
from kvbm.manager.process import _report_failure, take_lock
from kvbm.protocol import PROTOCOL_VERSION, Hello
from kvbm.runtime_dir import check_runtime_dir, is_ours, make_own_dir, make_runtime_dir, read_private
from kvbm.settings import Settings
from rigs.other_user import NOBODY, needs_root

HELLO = Hello(version=PROTOCOL_VERSION, role="leader", engine="e")


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def finder_in(directory: Path, clock: ManualClock) -> ManagerFinder:
    settings = Settings(runtime_dir=str(directory), host_blocks=8)
    return ManagerFinder(ManagerAddress.of(settings, "e"), settings, dict(os.environ), clock)


def link(path: Path, target: Path) -> None:
    """A link of another user's to a directory of ours."""
    target.mkdir(mode=0o755)
    path.symlink_to(target)


def writable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def anybodys(path: Path) -> None:
    path.mkdir()
    path.chmod(0o1777)


def another_users(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


PLANTED: list[object] = [
    pytest.param(lambda path: link(path, path.with_name("target")), "this is a link", id="a link"),
    pytest.param(lambda path: path.symlink_to(path.with_name("absent")), "this is a link", id="to nowhere"),
    pytest.param(writable, "this has mode 770", id="a group's"),
    pytest.param(anybodys, "this has mode 1777", id="anybody's"),
    pytest.param(lambda path: path.write_text(""), "this is no directory", id="a file"),
    pytest.param(another_users, f"this is user {NOBODY}'s", id="another user's", marks=needs_root),
]


def test_it_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_runtime_dir(str(tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "a" / "b") == 0o700
    make_runtime_dir(str(tmp_path / "a" / "b"))


def test_nothing_there_is_nothing_wrong(tmp_path: Path) -> None:
    assert not check_runtime_dir(str(tmp_path / "run"))
    assert not is_ours(str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o711, 0o750])
def test_one_that_others_can_only_read_is_used_as_it_is(tmp_path: Path, mode: int) -> None:
    """Somebody may have named his home directory: its mode is his. What we put there has a mode of its own."""
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    before = os.umask(0)
    try:
        assert is_ours(str(path))
        assert check_runtime_dir(str(path))
        make_runtime_dir(str(path))
        make_own_dir(str(path), "x", 0o711)
        os.close(take_lock(str(path / "m.sock")))
        _report_failure(str(path / "m.sock"), "no memory")
    finally:
        os.umask(before)
    assert mode_of(path) == mode
    assert {mode_of(file) for file in path.iterdir()} == {0o600}


@pytest.mark.parametrize(("plant", "found"), PLANTED)
def test_what_was_planted_is_refused_in_one_line(
    tmp_path: Path, plant: Callable[[Path], None], found: str
) -> None:
    path = tmp_path / "run"
    plant(path)
    before = os.lstat(path)
    for use in (make_runtime_dir, check_runtime_dir, is_ours, lambda p: make_own_dir(p, "x")):
        with pytest.raises(SettingsError) as caught:
            use(str(path))
        assert found in str(caught.value)
        assert "only you own" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert os.lstat(path).st_mode == before.st_mode
    assert not (tmp_path / "absent").exists(), "a link to nowhere is not followed either"


@pytest.mark.parametrize("end", ["/", "//", "/.", "/./", "/.//./"])
def test_a_link_is_one_however_its_path_ends(tmp_path: Path, end: str) -> None:
    link(tmp_path / "run", tmp_path / "target")
    with pytest.raises(SettingsError, match="this is a link"):
        check_runtime_dir(f"{tmp_path}/run{end}")
    assert check_runtime_dir(f"{tmp_path}/target{end}")


def test_somebody_who_is_faster_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    mkdir = os.mkdir

    def too_late(name: str, mode: int) -> None:
        monkeypatch.setattr(os, "mkdir", mkdir)
        link(Path(name), tmp_path / "target")
        os.mkdir(name, mode)

    monkeypatch.setattr(os, "mkdir", too_late)
    with pytest.raises(SettingsError, match="this is a link"):
        make_own_dir(str(path), "x", 0o700)
    assert mode_of(tmp_path / "target") == 0o755, "what we did not make keeps its mode"


@pytest.mark.parametrize("umask", [0, 0o022, 0o027, 0o077])
@pytest.mark.parametrize("end", ["", "/", "/."])
def test_the_directory_of_a_named_socket_may_be_entered_by_those_it_is_for(
    tmp_path: Path, umask: int, end: str
) -> None:
    """Those above it too, where they are missing; not those that are there."""
    (tmp_path / "mine").mkdir(0o700)
    path = tmp_path / "mine" / "volume" / "shared"
    before = os.umask(umask)
    try:
        make_own_dir(f"{path}{end}", "DYN_KVBM_MANAGER", 0o711)
    finally:
        os.umask(before)
    assert [mode_of(made) for made in (path, path.parent, path.parent.parent)] == [0o711, 0o711, 0o700]


def test_a_relative_directory_is_made_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, mode in enumerate((0o700, 0o711)):
        make_own_dir(f"{number}/a", "x", mode)
        assert mode_of(tmp_path / str(number) / "a") == mode


# ---- who looks there


@pytest.mark.parametrize(("plant", "found"), PLANTED)
def test_an_engine_touches_nothing_in_it_and_goes_on(
    tmp_path: Path, plant: Callable[[Path], None], found: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No connection, no manager, no file: one line, and no cache."""
    path = tmp_path / "run"
    plant(path)
    clock = ManualClock()
    finder = finder_in(path, clock)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if path.is_dir():
        listener.bind(finder.address.socket_path)
        listener.listen(8)
        Path(finder.address.socket_path + ERROR_SUFFIX).write_text("believe me")
    before = sorted(path.resolve().rglob("*"))
    for _ in range(3):
        assert finder.attempt() is None
        clock.advance(60.0)
    with pytest.raises(ManagerUntrusted, match=found):
        finder.establish(HELLO, 60.0, clock.advance)
    listener.setblocking(False)
    with pytest.raises(OSError, match=r"temporarily unavailable|Invalid argument"):
        listener.accept()
    assert sorted(path.resolve().rglob("*")) == before
    assert finder._child is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert found in caplog.text
    listener.close()


def test_a_directory_that_cannot_be_made_costs_the_cache_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    finder = finder_in(tmp_path / "file" / "run", ManualClock())
    assert finder.attempt() is None
    with pytest.raises(ManagerUntrusted, match="DYN_KVBM_RUNTIME_DIR"):
        finder.establish(HELLO, 60.0, lambda seconds: None)
    assert len(caplog.records) == 1


def test_no_manager_is_looked_for_behind_a_link(tmp_path: Path) -> None:
    link(tmp_path / "run", tmp_path / "target")
    path = str(tmp_path / "target" / "manager.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(SettingsError, match="this is a link"):
            known_sockets(str(tmp_path / "run"))
        assert known_sockets(str(tmp_path / "target")) == ([path], [])
    assert known_sockets(str(tmp_path / "target")) == ([], [path])


def test_a_private_manager_leaves_no_trace_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was fine when its engine looked. What looks like a dead manager's is not removed."""
    path = tmp_path / "run"
    writable(path)
    others = ["private-0123456789abcdef.sock", "private-0123456789abcdef.sock.lock", "private-1.sock.lock"]
    for name in others:
        (path / name).touch()
    monkeypatch.setattr(os, "fork", lambda: 0)
    assert process.main(str(path / "private-1.sock"), -1, "{}") == 2
    assert sorted(os.listdir(path)) == others


@pytest.mark.parametrize("private", [True, False])
def test_a_manager_does_not_lock_or_listen_behind_a_link(tmp_path: Path, private: bool) -> None:
    link(tmp_path / "run", tmp_path / "target")
    path = str(tmp_path / "run" / "m.sock")
    with pytest.raises(SettingsError, match=r"DYN_KVBM_MANAGER=.*this is a link"):
        take_lock(path)
    with pytest.raises(SettingsError, match="this is a link"):
        process.serve(Settings(manager=None if private else path), path)
    assert list((tmp_path / "target").iterdir()) == []


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.sock.lock").symlink_to(tmp_path / "target")
    with pytest.raises(SettingsError, match="can be opened"):
        take_lock(str(tmp_path / "m.sock"))
    assert not (tmp_path / "target").exists()


def test_last_words_do_not_go_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    words = tmp_path / f"m.sock{ERROR_SUFFIX}"
    words.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        read_private(str(words))
    _report_failure(str(tmp_path / "m.sock"), "no\nmemory")
    assert target.read_text() == "mine"
    assert not words.is_symlink()
    assert mode_of(words) == 0o600
    assert read_private(str(words)) == b"no memory"


def test_where_our_id_is_every_strangers_nothing_there_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a user namespace, as the one that the kernel calls everybody by."""
    (tmp_path / "memo").write_text("")
    monkeypatch.setattr(peers, "nameless_as", lambda: "")
    assert is_ours(str(tmp_path))
    for module in (peers, runtime_dir):
        monkeypatch.setattr(module, "nameless_as", lambda: "65534, as everybody is: run as another user")
    with pytest.raises(OSError, match="owns it"):
        read_private(str(tmp_path / "memo"))
    with pytest.raises(SettingsError, match="you are user 65534, as everybody is: run as another user"):
        is_ours(str(tmp_path))
    assert finder_in(tmp_path, ManualClock()).attempt() is None
    assert len(caplog.records) == 1
    assert sorted(os.listdir(tmp_path)) == ["memo"]


def test_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "memo")
    with pytest.raises(OSError, match="no plain file"):
        read_private(str(tmp_path / "memo"))

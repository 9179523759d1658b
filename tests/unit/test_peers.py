"""Another user at the other end of the socket: refused by both sides, with one line, unless the settings list him."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm import peers
from kvbm.cli.record import record
from kvbm.client import channel as channel_module
from kvbm.client.channel import Channel
from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.clock import ManualClock
from kvbm.errors import KvbmError, ManagerUnavailable, ManagerUntrusted, SettingsError
from kvbm.peers import accepted_users, is_trusted, peer_uid
from kvbm.protocol import PROTOCOL_VERSION, Hello
from kvbm.settings import Settings, load_settings
from kvbm.settings.advice import notices
from kvbm.settings.parse import parse_user_ids
from rigs.manager import ManagerBench
from rigs.other_user import NOBODY, needs_root, planted_socket, result, run_as

OURS = os.geteuid()


@pytest.fixture
def directory() -> Iterator[Path]:
    """One that every user can get to."""
    with tempfile.TemporaryDirectory(prefix="kvbm-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


def finder_of(settings: Settings, clock: ManualClock) -> ManagerFinder:
    return ManagerFinder(ManagerAddress.of(settings, "e"), settings, {}, clock)


def test_ourselves_and_root_and_those_listed_are_trusted() -> None:
    assert is_trusted(OURS, ())
    assert is_trusted(0, ())
    assert not is_trusted(OURS + 1, ())
    assert not is_trusted(OURS + 1, (OURS + 2,))
    assert is_trusted(OURS + 1, (OURS + 2, OURS + 1))


OVERFLOW = "/proc/sys/kernel/overflowuid"
UID_MAP = "/proc/self/uid_map"


@pytest.mark.parametrize(
    ("overflow", "uid_map", "nameless"),
    [
        pytest.param(str(OURS), "0 100000 65536", True, id="a container's"),
        pytest.param(str(OURS), "0 1000 1\n1 100000 65536", True, id="rootless"),
        pytest.param(str(OURS), "", True, id="nobody is mapped"),
        pytest.param(str(OURS), "         0          0 4294967295", False, id="the machine's"),
        pytest.param(str(OURS + 1), "0 100000 65536", False, id="we have a number"),
    ],
)
def test_the_id_of_all_strangers_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, overflow: str, uid_map: str, nameless: bool
) -> None:
    monkeypatch.setattr(peers, "_read", {OVERFLOW: overflow, UID_MAP: uid_map}.__getitem__)
    monkeypatch.setattr(peers, "ROOT", OURS + 3)
    assert is_trusted(OURS, ()) is not nameless
    assert is_trusted(OURS + 3, ())
    assert is_trusted(OURS, (OURS,)), "who lists it says so"
    said = accepted_users((OURS + 7,))
    assert said.startswith(f"{OURS + 3}, {OURS + 7} (" if nameless else f"{OURS}, {OURS + 3}, {OURS + 7}")
    assert ("run as another user" in said) is nameless


@needs_root
def test_in_a_user_namespace_nobody_is_everybody() -> None:
    """As the kernel does it: a process that nobody mapped into its new namespace."""

    def ask() -> str:
        clone_new_user = 0x10000000
        if ctypes.CDLL(None, use_errno=True).unshare(clone_new_user):
            return "not allowed"
        overflow = int(Path(OVERFLOW).read_text())
        return f"{os.geteuid() == overflow} {is_trusted(overflow, ())} {is_trusted(0, ())}"

    said = result(run_as(OURS + 1, ask))
    if said == "not allowed":
        pytest.skip("this machine lets nobody make a user namespace")
    assert said == "True False True"


@needs_root
def test_nobody_on_the_machine_itself_is_a_user_like_others() -> None:
    if Path(UID_MAP).read_text().split() != peers.ALL_USERS:
        pytest.skip("we are in a user namespace ourselves")
    assert result(run_as(NOBODY, lambda: is_trusted(NOBODY, ()))) == "True"


def test_the_kernel_says_who_listens() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    assert peer_uid(ours) == OURS
    ours.close()
    theirs.close()


@needs_root
def test_a_planted_socket_is_refused_and_hears_nothing(directory: Path) -> None:
    path = directory / "manager.sock"
    with planted_socket(path) as heard, pytest.raises(ManagerUntrusted) as caught:
        Channel.connect(str(path))
    assert heard == [b""]
    assert f"user {NOBODY} listens at {path}" in str(caught.value)
    assert "(peer_uids, or DYN_KVBM_PEER_UIDS, lists others" in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_root
def test_a_listed_user_is_connected_to(directory: Path) -> None:
    path = directory / "manager.sock"
    with planted_socket(path) as heard:
        channel = Channel.connect(str(path), (NOBODY,))
        channel.send(Hello(version=PROTOCOL_VERSION, role="admin"))
    channel.close()
    assert b"admin" in heard[0]


@needs_root
def test_an_engine_says_so_once_and_has_no_cache(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = directory / "manager.sock"
    clock = ManualClock()
    finder = finder_of(Settings(manager=str(path)), clock)
    hello = Hello(version=PROTOCOL_VERSION, role="leader", engine="e")
    with planted_socket(path):
        for _ in range(4):
            assert finder.attempt() is None
            clock.advance(60.0)
        with pytest.raises(ManagerUntrusted):
            finder.establish(hello, 60.0, clock.advance)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no KV cache for now" in caplog.text
    listed = finder_of(Settings(manager=str(path), peer_uids=(NOBODY,)), ManualClock())
    os.unlink(path)
    with planted_socket(path):
        channel = listed.attempt()
        assert channel is not None
        channel.close()


def test_the_list_is_not_for_a_socket_that_nobody_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(channel_module, "peer_uid", lambda connection: OURS + 7)
    settings = Settings(runtime_dir=str(tmp_path), peer_uids=(OURS + 7,))
    assert settings.trusted_peer_uids == ()
    finder = finder_of(settings, ManualClock())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(finder.address.socket_path)
        listener.listen(2)
        assert finder.attempt() is None
        assert "accepted there are" in finder._untrusted


def test_record_asks_who_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(channel_module, "peer_uid", lambda connection: OURS + 7)
    path = str(tmp_path / "m.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(2)
        with pytest.raises(ManagerUntrusted):
            record(tmp_path / "trace", manager=path)
        listener.accept()[0].close()
        monkeypatch.setenv("DYN_KVBM_PEER_UIDS", str(OURS + 7))

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(4096)  # with its hello unread the session would end as a broken one
            connection.close()

        accepting = threading.Thread(target=hang_up)
        accepting.start()
        with pytest.raises(ManagerUnavailable, match="closed the session"):
            record(tmp_path / "trace", manager=path)
        accepting.join()


def test_a_manager_serves_whom_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm.manager.session.peer_uid", lambda connection: OURS + 7)
    bench = ManagerBench(tmp_path)
    try:
        stranger = bench.client()
        with pytest.raises(ManagerUnavailable):
            stranger.send(Hello(version=PROTOCOL_VERSION, role="admin"))
        bench.server._door._peer_uids = frozenset((OURS + 7,))
        assert bench.leader() is not None
    finally:
        bench.close()


SERVE_AND_TALK = [
    sys.executable,
    "-m",
    "kvbm.cli.main",
    "manager",
    "--host-blocks",
    "8",
    "--log-level",
    "warn",
]


@needs_root
@pytest.mark.parametrize("listed", [True, False])
def test_between_users_over_a_named_socket(directory: Path, listed: bool) -> None:
    """The whole way: the directory can be entered, the socket connected to, and the manager answers, or says no."""
    path = str(directory / "shared" / "manager.sock")
    words = ["--socket", path, *(["--peer-uids", f"1,{NOBODY}"] if listed else [])]
    manager = subprocess.Popen([*SERVE_AND_TALK, *words], stdout=subprocess.PIPE, umask=0o077)

    def talk() -> str:
        try:
            channel = Channel.connect(path)
            welcome = channel.introduce(Hello(version=PROTOCOL_VERSION, role="admin"), 30.0)
            return f"epoch {welcome.epoch}"
        except KvbmError as error:
            return str(error)

    try:
        assert manager.stdout is not None
        assert b"DYN_KVBM_MANAGER" in manager.stdout.readline()
        said = result(run_as(NOBODY, talk))
        if listed:
            assert said.startswith("epoch ")
            assert os.stat(directory / "shared").st_mode & 0o777 == 0o711
            assert os.stat(path + ".lock").st_mode & 0o777 == 0o600
        else:
            assert said == f"no manager at {path}: Permission denied"
            os.chmod(directory / "shared", 0o711)
            os.chmod(path, 0o666)
            assert f"user {NOBODY} cannot be served" in result(run_as(NOBODY, talk))
    finally:
        manager.terminate()
        manager.communicate(timeout=60)


@pytest.mark.parametrize("text", ["", "root", "-1", "1,", "1;2", "4294967295", "1,,2", ",".join(["7"] * 65)])
def test_what_is_no_list_of_users_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SettingsError, match="user ids from 0 to 4294967294") as caught:
        parse_user_ids("DYN_KVBM_PEER_UIDS", text)
    assert "\n" not in str(caught.value)


def test_users_are_numbers_in_every_source(tmp_path: Path) -> None:
    assert parse_user_ids("x", " 0, 1000 ,4294967294,1000") == (0, 1000, 4294967294)
    file = tmp_path / "kvbm.toml"
    file.write_text('peer_uids = 1000\nmanager = "/x/m.sock"\n')
    base = {"DYN_KVBM_CPU_CACHE_GB": "1"}
    assert load_settings(base, file=file).settings.trusted_peer_uids == (1000,)
    assert load_settings({**base, "DYN_KVBM_PEER_UIDS": "7,8"}).settings.peer_uids == (7, 8)


def test_a_list_without_a_named_socket_is_remarked_on() -> None:
    assert any("DYN_KVBM_PEER_UIDS has no effect" in line for line in notices(Settings(peer_uids=(7,)), {}))
    assert notices(Settings(peer_uids=(7,), manager="/x/m.sock"), {}) == notices(
        Settings(manager="/x/m.sock"), {}
    )

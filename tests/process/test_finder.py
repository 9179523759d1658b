"""Finding the manager of an engine, or noticing that there is none."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from kvbm.client.channel import Channel
from kvbm.client.finder import (
    RETRY_S_MAX,
    RETRY_S_MIN,
    ManagerAddress,
    ManagerFinder,
)
from kvbm.clock import ManualClock
from kvbm.errors import ManagerUnavailable
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Welcome,
)
from kvbm.settings import Settings
from rigs.manager import worker_hello

DEADLINE_S = 60.0


def test_a_shared_manager_is_never_started(tmp_path: Path) -> None:
    settings = Settings(manager=str(tmp_path / "absent.sock"), runtime_dir=str(tmp_path / "run"))
    address = ManagerAddress.of(settings, "e")
    assert address == ManagerAddress(socket_path=str(tmp_path / "absent.sock"), private=False)
    finder = ManagerFinder(address, settings, {}, ManualClock())
    assert finder.attempt() is None
    assert not os.path.exists(settings.runtime_dir)


def test_engines_have_private_sockets_of_their_own() -> None:
    settings = Settings(runtime_dir="/run/x")
    paths = {ManagerAddress.of(settings, engine).socket_path for engine in ("a", "b", "x" * 5000)}
    assert len(paths) == 3
    assert all(len(path) < 100 for path in paths)


def test_attempts_back_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(5.0)
    address = ManagerAddress(socket_path=str(tmp_path / "m.sock"), private=False)
    finder = ManagerFinder(address, Settings(), {}, clock)
    tries: list[float] = []

    def refuse(path: str, peer_uids: tuple[int, ...]) -> Channel:
        tries.append(clock())
        raise ManagerUnavailable("nobody")

    monkeypatch.setattr(Channel, "connect", refuse)
    for _ in range(4000):
        assert finder.attempt() is None
        clock.advance(0.01)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps[0] == pytest.approx(RETRY_S_MIN, abs=0.02)
    assert [round(gap, 3) for gap in gaps] == sorted(round(gap, 3) for gap in gaps)
    assert gaps[-1] == pytest.approx(RETRY_S_MAX, abs=0.02)


def test_a_stopped_manager_with_a_full_backlog_is_not_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "m.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(0)
    channels: list[Channel] = []

    def connect_many() -> None:
        for _ in range(8):
            channels.append(Channel.connect(path))

    with pytest.raises(ManagerUnavailable):
        connect_many()
    for channel in channels:
        channel.close()
    listener.close()


def test_a_manager_that_ends_while_it_is_joined_is_asked_for_again(tmp_path: Path) -> None:
    """It accepted, and went before its welcome: the deadline has not passed, so the next one is tried."""
    path = str(tmp_path / "m.sock")
    address = ManagerAddress(socket_path=path, private=False)
    finder = ManagerFinder(address, Settings(), {}, time.monotonic)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(8)
    gone = 0

    def serve() -> None:
        nonlocal gone
        while gone < 2:
            connection, _ = listener.accept()
            connection.close()
            gone += 1
        connection, _ = listener.accept()
        welcome = Welcome(version=PROTOCOL_VERSION, epoch=3)
        body = msgspec.msgpack.encode(welcome)
        connection.sendall(len(body).to_bytes(4, "little") + body)
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    channel, welcome = finder.establish(worker_hello(), DEADLINE_S, time.sleep)
    thread.join()
    assert (gone, welcome.epoch) == (2, 3)
    channel.close()
    listener.close()


def test_a_manager_that_refuses_is_not_asked_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there and accepts connections, of another version perhaps: attempts back off until one is welcomed."""
    clock = ManualClock(5.0)
    finder = ManagerFinder(
        ManagerAddress(socket_path=str(tmp_path / "m.sock"), private=False), Settings(), {}, clock
    )
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(Channel, "connect", lambda path, peer_uids: Channel(ours))
    attempts = 0
    for _ in range(1000):
        attempts += finder.attempt() is not None
        clock.advance(0.01)
    assert 3 < attempts < 12
    finder.welcomed()
    assert finder.attempt() is not None
    ours.close()
    theirs.close()


def test_without_descriptors_there_is_no_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", none_left)
    with pytest.raises(ManagerUnavailable, match="Too many open files"):
        Channel.connect(str(tmp_path / "m.sock"))

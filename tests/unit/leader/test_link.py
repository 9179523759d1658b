"""How the leader's messages leave: those of one call together, and none of them late."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvbm.client.channel import Channel
from kvbm.clock import ManualClock
from kvbm.framing import FramedSocket
from kvbm.leader import link
from kvbm.leader.link import ManagerLink
from kvbm.protocol import PROTOCOL_VERSION, Finished, Hello, Lookup, Release, Reserve
from rigs.leader import HASHES, Bench, ScriptedManager


class CountedSends:
    """A socket that counts the system calls that send bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.count = 0

    def send(self, data: Any) -> int:
        self.count += 1
        return self._connection.send(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[CountedSends]:
    """The leaders' sockets, each counting."""
    counted: list[CountedSends] = []
    original = FramedSocket.__init__

    def counting(self: FramedSocket, connection: Any, fds_max: int = 0) -> None:
        counted.append(CountedSends(connection))
        original(self, counted[-1], fds_max)  # type: ignore[arg-type]

    monkeypatch.setattr(FramedSocket, "__init__", counting)
    return counted


def test_a_step_sends_its_questions_in_one_write(sends: list[CountedSends]) -> None:
    bench = Bench()
    names = [f"r{number}" for number in range(16)]
    for name in names:
        bench.leader.request_added(name, HASHES[:8], b"", 0)
    bench.manager.said()
    before = sends[-1].count
    bench.step(dict.fromkeys(names, 8))
    assert [type(message) for message in bench.manager.said()] == [Reserve] * 16, "they have left"
    assert sends[-1].count == before + 1
    bench.leader.close()
    bench.manager.close()


def test_the_end_of_a_request_is_told_in_one_write(sends: list[CountedSends]) -> None:
    bench = Bench()
    bench.promise()
    before = sends[-1].count
    bench.leader.finished("r")
    assert len(bench.manager.said()) == len(bench.manager.ended) == 1
    assert sends[-1].count == before + 1
    bench.leader.close()
    bench.manager.close()


def test_requests_that_end_in_one_step_are_told_in_one_write(sends: list[CountedSends]) -> None:
    bench = Bench()
    names = [f"r{number}" for number in range(16)]
    for name in names:
        bench.promise(request=name)
    before = sends[-1].count
    for name in names:
        bench.leader.finished(name, in_step=True)
    assert bench.manager.said() == []
    bench.leader.flush()
    assert [type(message) for message in bench.manager.said()] == [Release] * 16
    assert len(bench.manager.ended) == 16
    assert sends[-1].count == before + 1
    bench.leader.close()
    bench.manager.close()


def connected() -> tuple[ManagerLink, ScriptedManager]:
    manager = ScriptedManager()
    hello = Hello(version=PROTOCOL_VERSION, role="leader", engine="e")
    found = ManagerLink(manager, hello, ManualClock())  # type: ignore[arg-type]
    found.poll()
    assert manager.said() == [hello]
    return found, manager


def test_what_is_collected_has_left_before_anybody_waits_for_the_answer() -> None:
    found, manager = connected()
    with found.in_one_write():
        found.send(Lookup(lookup=1, keys=bytes(32)))
        assert manager.said() == []
        manager.ready()
        found.wait(0.0)
        found.poll()
        assert found.ready is not None
        assert [message.lookup for message in manager.said()] == [1]
    found.close()


def test_little_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    found, manager = connected()
    monkeypatch.setattr(link, "_COLLECTED_BYTES_MAX", 1000)
    with found.in_one_write():
        for number in range(20):
            found.send(Lookup(lookup=number, keys=bytes(32 * 5)))
        assert len(manager.said()) >= 15
    found.close()


def test_a_manager_that_goes_meanwhile_ends_the_session_once(caplog: pytest.LogCaptureFixture) -> None:
    found, manager = connected()
    manager.ready()
    found.poll()
    life = found.life
    with found.in_one_write():
        assert found.send(Lookup(lookup=1, keys=bytes(32)))
        manager.die()
    assert (found.ready, found.life) == (None, life + 1)
    assert not found.send(Lookup(lookup=2, keys=bytes(32)))
    assert sum("manager lost" in record.getMessage() for record in caplog.records) == 1


def test_a_defect_meanwhile_keeps_nothing_back() -> None:
    found, manager = connected()

    def failing() -> None:
        with found.in_one_write():
            found.send(Lookup(lookup=1, keys=bytes(32)))
            raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        failing()
    assert [message.lookup for message in manager.said()] == [1]
    found.send(Finished(key=bytes(32)))
    manager.said()
    assert len(manager.ended) == 1, "what follows is sent at once"
    found.close()


def test_a_channel_keeps_what_is_queued_until_it_is_flushed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.setblocking(False)
    channel = Channel(ours)
    channel.queue(Finished(key=bytes(32)))
    queued = channel.queued_bytes
    assert queued > 32
    with pytest.raises(BlockingIOError):
        theirs.recv(100)
    channel.flush()
    assert (len(theirs.recv(1000)), channel.queued_bytes) == (queued, 0)
    channel.close()
    theirs.close()

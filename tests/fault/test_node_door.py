"""Leaders that come from other nodes over TCP: who is let in, who is not, and what is carried."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.client.channel import Channel
from kvbm.client.far_finder import FarFinder
from kvbm.clock import monotonic
from kvbm.errors import ManagerUnavailable, SettingsError
from kvbm.fleet.tls import lending_context, node_files, reading_context
from kvbm.framing import encode
from kvbm.hashing import join_keys
from kvbm.manager import node_door
from kvbm.manager.node_door import NodeDoor
from kvbm.protocol import (
    KEYS_PER_MESSAGE_MAX,
    PROTOCOL_VERSION,
    FromManager,
    Hello,
    Lookup,
    LookupReply,
    Ready,
    Welcome,
)
from rigs.certificates import make_node
from rigs.manager import DEADLINE_S, KEYS, ManagerBench, store

FLEET = "f"
LEADER = Hello(version=PROTOCOL_VERSION, role="leader", engine="e")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ManagerBench]:
    bench = ManagerBench(tmp_path, host_blocks=16)
    yield bench
    bench.close()


@pytest.fixture(params=["plain", "certificates"])
def way(request: pytest.FixtureRequest, manager: ManagerBench, tmp_path: Path) -> Iterator[Way]:
    way = Way(manager, tmp_path if request.param == "certificates" else None)
    yield way
    way.close()


class Way:
    """A manager's door, and a leader's way to it; with certificates where there is a directory for them."""

    def __init__(self, manager: ManagerBench, certificates: Path | None) -> None:
        self.manager = manager
        lends = reads = None
        if certificates is not None:
            for node in ("here", "there"):
                make_node(certificates / "certs", node, 30, FLEET)
            lends = lending_context(node_files(certificates / "certs", "here"))
            reads = reading_context(node_files(certificates / "certs", "there"))
        self.door = NodeDoor("listen", "127.0.0.1:0", manager.path, lends, FLEET)
        self.address = f"tcp://127.0.0.1:{self.door.port}"
        self.finder = FarFinder("nodes", self.address, monotonic, reads, FLEET)
        self.channels: list[Channel] = []
        self.inbox: list[FromManager] = []

    def connect(self) -> Channel:
        """The leader's channel; its thread is never kept waiting."""
        found: list[Channel] = []
        self.inbox.clear()

        def attempt() -> bool:
            channel = self.finder.attempt()
            if channel is not None:
                found.append(channel)
            return bool(found)

        self.manager.until(attempt, "no connection")
        self.channels += found
        return found[0]

    def expect(self, channel: Channel) -> FromManager:
        """The next message."""

        def receive() -> bool:
            if not self.inbox:
                self.inbox += channel.receive()
            return bool(self.inbox)

        self.manager.until(receive, "no message")
        return self.inbox.pop(0)

    def ended(self, channel: Channel) -> bool:
        try:
            channel.receive()
        except ManagerUnavailable:
            return True
        return False

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.door.close()


def test_a_leader_on_another_node_is_served(way: Way) -> None:
    worker = way.manager.worker("e")
    channel = way.connect()
    channel.send(LEADER)
    assert isinstance(way.expect(channel), Welcome)
    assert isinstance(ready := way.expect(channel), Ready) and ready.ready
    near = way.manager.worker("near")
    leader = way.manager.leader("near")
    assert leader.expect(Ready).ready
    store(leader, near, 1, KEYS[:3])
    channel.send(Lookup(lookup=1, keys=join_keys(KEYS[:5])))
    assert isinstance(found := way.expect(channel), LookupReply) and found.ready == 3
    assert not worker.gone


def test_messages_of_megabytes_pass_whole(way: Way) -> None:
    """More than every buffer on the way holds, while the other end does not read."""
    way.manager.worker("e")
    channel = way.connect()
    channel.send(LEADER)
    way.expect(channel), way.expect(channel)
    source = random.Random(1)
    for number in range(5):
        channel.queue(Lookup(lookup=number, keys=KEYS[0] + source.randbytes(32 * (KEYS_PER_MESSAGE_MAX - 1))))
    channel.flush()
    numbers = [found.lookup for _ in range(5) if isinstance(found := way.expect(channel), LookupReply)]
    assert numbers == list(range(5))


def test_a_session_ends_at_both_ends(way: Way) -> None:
    way.manager.worker("e")
    channel = way.connect()
    channel.send(LEADER)
    way.expect(channel)
    assert way.manager.server.membership._engines["e"].leader is not None
    channel.close()
    way.manager.until(
        lambda: way.manager.server.membership._engines["e"].leader is None, "the manager still has a leader"
    )
    way.finder.welcomed()
    again = way.connect()
    again.send(LEADER)
    assert isinstance(way.expect(again), Welcome)
    way.manager.until(lambda: not way.ended(again), "it works")
    way.door.close()
    way.manager.until(lambda: way.ended(again), "the leader hears nothing of its end")


def test_a_manager_that_goes_ends_the_session(way: Way) -> None:
    channel = way.connect()
    channel.send(LEADER)
    way.expect(channel)
    way.manager.close()
    deadline_s = time.monotonic() + DEADLINE_S
    while not way.ended(channel):
        assert time.monotonic() < deadline_s
        channel.wait(0.1)


@pytest.mark.parametrize("role", ["worker", "admin"])
def test_only_leaders_come_from_elsewhere(way: Way, role: str) -> None:
    channel = way.connect()
    hello = way.manager.worker_hello("e") if role == "worker" else Hello(version=PROTOCOL_VERSION, role=role)
    channel.send(hello)
    way.manager.until(lambda: way.ended(channel), f"a {role} is let in")
    assert way.manager.server.sessions == {}


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", (1 << 20).to_bytes(4, "little"), encode(Lookup(lookup=1, keys=b""))],
    ids=str,
)
def test_nonsense_is_not_let_in(manager: ManagerBench, said: bytes) -> None:
    way = Way(manager, None)
    with socket.create_connection(("127.0.0.1", way.door.port)) as connection:
        connection.sendall(said)
        connection.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):  # it has not read all of it
            assert connection.recv(100) == b""
    assert manager.server.sessions == {}
    way.close()


def test_who_says_nothing_is_not_kept(manager: ManagerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_door, "HELLO_S", 0.05)
    way = Way(manager, None)
    with socket.create_connection(("127.0.0.1", way.door.port)) as connection:
        connection.settimeout(DEADLINE_S)
        assert connection.recv(100) == b""
    way.close()


@pytest.mark.parametrize("who", ["nobody", "another authority", "another fleet"])
def test_who_is_not_of_the_fleet_is_not_let_in(manager: ManagerBench, tmp_path: Path, who: str) -> None:
    way = Way(manager, tmp_path)
    reads, fleet = None, FLEET
    if who == "another authority":
        make_node(tmp_path / "other", "there", 30, FLEET)
        reads = reading_context(node_files(tmp_path / "other", "there"))
    elif who == "another fleet":
        reads, fleet = reading_context(node_files(tmp_path / "certs", "there")), "g"
    finder = FarFinder("nodes", way.address, monotonic, reads, fleet)
    deadline_s = time.monotonic() + DEADLINE_S
    while not (finder._failed or way.channels):
        assert time.monotonic() < deadline_s
        if (channel := finder.attempt()) is not None:
            channel.send(LEADER)
            way.channels.append(channel)
        elif finder._dialling is not None:
            finder._dialling.join(0.05)
    for channel in way.channels:
        manager.until(lambda channel=channel: way.ended(channel), "it is let in")  # type: ignore[misc]
    assert manager.server.sessions == {}
    way.close()


def test_an_address_where_nobody_listens_is_tried_later_and_later(
    manager: ManagerBench, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]
    finder = FarFinder("nodes", "tcp://127.0.0.1:1", lambda: now_s[0])
    tried = []

    def attempted() -> bool:
        before = finder._dialling
        assert finder.attempt() is None
        return finder._dialling is not None and finder._dialling is not before

    for at_s in [each / 10 for each in range(100)]:
        now_s[0] = at_s
        if attempted():
            tried.append(at_s)
            assert finder._dialling is not None
            finder._dialling.join(DEADLINE_S)
    gaps = [round(b - a, 1) for a, b in itertools.pairwise(tried)]
    assert len(gaps) > 4 and gaps == sorted(gaps) and gaps[-1] > 4 * gaps[0]
    assert len([line for line in caplog.messages if "no manager at tcp://127.0.0.1:1" in line]) == 1


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "127.0.0.1", "127.0.0.1:99999", "no.such.host.invalid:1"])
def test_an_address_that_cannot_be_had_or_is_open_to_all_is_refused(listen: str) -> None:
    with pytest.raises(SettingsError, match=r"^listen="):
        NodeDoor("listen", listen, "/nowhere")

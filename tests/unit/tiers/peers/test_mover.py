"""A mover and the way to it, with agents of the test's own: what is answered, what is let go, when it is given up."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from kvbm.tiers.peers import mover as movers
from kvbm.tiers.peers import mover_process
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.mover_wire import (
    Channel,
    Expect,
    FromMover,
    Mapped,
    Open,
    Ping,
    Pong,
    Reach,
    Reached,
    Ready,
    Unmapped,
    Write,
    Written,
    from_mover,
    packet,
)
from kvbm.tiers.peers.staging import Staging
from rigs.movers import ModelNetwork, ThreadChild, model_mover
from rigs.peers import wait_until

SIZE = 4096


@pytest.fixture
def network() -> ModelNetwork:
    return ModelNetwork()


@pytest.fixture
def mover(network: ModelNetwork) -> Iterator[Mover]:
    made = model_mover(network)
    yield made
    made.close()


def said(channel: Channel) -> FromMover:
    ready, _, _ = select.select([channel], [], [], 20.0)
    assert ready, "no answer"
    message = channel.receive()
    assert message is not None
    return message


def opened(mover: Mover, lands: bool) -> tuple[Channel, Staging, Mapped]:
    staging = Staging(SIZE, 2)
    channel = mover.open(staging, lands)
    mapped = said(channel)
    assert isinstance(mapped, Mapped), mapped
    return channel, staging, mapped


def test_memory_is_written_into_memory_of_another(mover: Mover) -> None:
    lands, there, mapped = opened(mover, True)
    sends, here, own = opened(mover, False)
    assert mapped.metadata and not own.metadata, "what is sent from can be reached by nobody"
    here.view(1, SIZE)[:] = b"s" * SIZE
    sends.send(Reach(metadata=mapped.metadata))
    assert said(sends) == Reached()
    sends.send(Write(number=7, spans=[(SIZE, mapped.address, 100)], limit_s=20.0))
    assert said(sends) == Written(number=7)
    assert bytes(there.view(0, 101)) == b"s" * 100 + b"\0"
    lands.close()
    sends.close()


def test_what_others_may_write_to_gets_progress_while_it_is_expected(
    mover: Mover, network: ModelNetwork
) -> None:
    channel, _, _ = opened(mover, True)
    agent = network.agents[-1]
    assert not agent.expected
    channel.send(Expect(on=True))
    wait_until(lambda: agent.expected > 3)
    channel.send(Expect(on=False))
    opened(mover, True)[0].close()  # that message has been heard
    before = agent.expected
    opened(mover, True)[0].close()
    assert agent.expected == before
    channel.close()


def test_a_channel_that_closes_lets_its_memory_go(mover: Mover, network: ModelNetwork) -> None:
    lands, _, mapped = opened(mover, True)
    sends, _, _ = opened(mover, False)
    sends.send(Reach(metadata=mapped.metadata))
    said(sends)
    sender, receiver = network.agents[0], network.agents[1]
    assert sender.known and sender.regions and receiver.regions
    sends.close()
    lands.close()
    wait_until(lambda: not sender.known and not sender.regions and not receiver.regions and receiver.closed)
    assert not sender.closed


def test_two_channels_to_one_agent_let_their_memory_go(mover: Mover, network: ModelNetwork) -> None:
    """The second one finds it forgotten."""
    lands, _, mapped = opened(mover, True)
    both = [opened(mover, False)[0] for _ in range(2)]
    for sends in both:
        sends.send(Reach(metadata=mapped.metadata))
        assert said(sends) == Reached()
    both[0].close()
    wait_until(lambda: len(network.agents[0].regions) == 1)
    both[1].send(Write(number=1, spans=[(0, mapped.address, 8)], limit_s=20.0))
    assert said(both[1]) == Written(number=1, line="not known")
    both[1].close()
    wait_until(lambda: not network.agents[0].regions)
    lands.close()


def test_memory_stays_until_what_is_under_way_from_it_has_ended(mover: Mover, network: ModelNetwork) -> None:
    lands, _, mapped = opened(mover, True)
    sends, _, _ = opened(mover, False)
    sends.send(Reach(metadata=mapped.metadata))
    said(sends)
    network.hang = True
    sends.send(Write(number=1, spans=[(0, mapped.address, 8)], limit_s=60.0))
    wait_until(lambda: network.writes == 1)
    sends.close()
    opened(mover, True)[0].close()  # the mover has seen that
    assert network.agents[0].regions
    network.hang = False
    wait_until(lambda: not network.agents[0].regions)
    lands.close()


def test_a_write_that_does_not_end_is_reported(mover: Mover, network: ModelNetwork) -> None:
    lands, _, mapped = opened(mover, True)
    sends, _, _ = opened(mover, False)
    sends.send(Reach(metadata=mapped.metadata))
    said(sends)
    network.hang = True
    sends.send(Write(number=1, spans=[(0, mapped.address, 8)], limit_s=0.05))
    assert said(sends) == Written(number=1, line="it took too long")
    lands.close()


@pytest.mark.parametrize("span", [(SIZE, 0, SIZE + 1), (-1, 0, 8), (2 * SIZE, 0, 1)])
def test_nothing_beyond_the_memory_is_written(
    mover: Mover, network: ModelNetwork, span: tuple[int, int, int]
) -> None:
    sends, _, _ = opened(mover, False)
    sends.send(Write(number=3, spans=[span], limit_s=1.0))
    assert said(sends) == Written(number=3, line="a piece beyond the memory")
    assert network.writes == 0


def test_metadata_of_nobody_ends_the_channel(mover: Mover) -> None:
    sends, _, _ = opened(mover, False)
    sends.send(Reach(metadata=b"what"))
    answer = said(sends)
    assert isinstance(answer, Unmapped) and "no metadata" in answer.line
    with pytest.raises(OSError, match="gone"):
        said(sends)


def test_no_more_channels_than_it_can_have(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_process, "CHANNELS_MAX", 2)
    kept = [opened(mover, False) for _ in range(2)]
    answer = said(mover.open(Staging(SIZE, 1), lands=False))
    assert isinstance(answer, Unmapped) and "2 pieces of memory are open" in answer.line
    assert kept


def test_no_more_landings_than_there_are_descriptors_for(
    network: ModelNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_process, "landings_within", lambda fds: 1)
    mover = model_mover(network)
    kept, _, _ = opened(mover, True)
    answer = said(mover.open(Staging(SIZE, 1), lands=True))
    assert isinstance(answer, Unmapped) and "no descriptors for more" in answer.line
    opened(mover, False)[0].close()
    kept.close()
    wait_until(lambda: all(agent.closed for agent in network.agents[1:]))
    opened(mover, True)[0].close()
    mover.close()


@pytest.mark.parametrize(("fds", "landings"), [(64, 1), (1024, 40), (4096, 232), (1 << 16, 256), (-1, 256)])
def test_landings_within_a_limit_of_descriptors(fds: int, landings: int) -> None:
    assert mover_process.landings_within(fds) == landings


def test_descriptors_that_did_not_arrive_refuse_the_memory_alone(network: ModelNetwork) -> None:
    """A process that may have no more of them gets a message without, or with the first one. It says something after
    each `Open`, so that many of them are no silence."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = ThreadChild(network, theirs)
    theirs.close()
    control.settimeout(20.0)

    def heard() -> FromMover:
        return from_mover.decode(control.recv(1 << 16))

    assert heard() == Ready()
    staging = Staging(SIZE, 1)
    message = packet(Open(size=staging.size, lands=True))
    for count in range(2):
        ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(20.0)
        with end:
            socket.send_fds(control, [message], [end.fileno()][:count])
        assert heard() == Pong()
        if count:
            refused = from_mover.decode(ours.recv(1 << 16))
            assert isinstance(refused, Unmapped) and "no descriptor left" in refused.line
        assert ours.recv(1) == b""
        ours.close()
    control.send(packet(Ping()))
    assert heard() == Pong()
    staging.close()
    control.close()
    child.wait()


def test_memory_is_not_kept_where_no_channel_can_be_made(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*words: object) -> None:
        raise OSError(24, "Too many open files")

    staging = Staging(SIZE, 1)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", none_left)
        with pytest.raises(OSError, match="Too many"):
            mover.open(staging, lands=True)
    assert staging.fd == -1


def test_one_reader_that_hangs_does_not_end_the_mover(mover: Mover, network: ModelNetwork) -> None:
    """However many transfers were under way to it."""
    lands, _, mapped = opened(mover, True)
    sends, _, _ = opened(mover, False)
    sends.send(Reach(metadata=mapped.metadata))
    said(sends)
    network.hang = True
    count = 2 * mover_process.STUCK_CHANNELS_MAX
    for number in range(count):
        sends.send(Write(number=number, spans=[(0, mapped.address, 8)], limit_s=0.01))
    for number in range(count):
        assert said(sends) == Written(number=number, line="it took too long")
    sends.close()
    opened(mover, True)[0].close()
    assert mover.running and mover.starts == 1
    network.hang = False
    lands.close()


def test_a_mover_that_cannot_work_says_why_and_is_not_tried_again(
    network: ModelNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvbm.tiers")
    network.broken = True
    starts: list[int] = []

    def start(control: socket.socket) -> ThreadChild:
        starts.append(1)
        return ThreadChild(network, control)

    mover = Mover(start)
    wait_until(lambda: not mover._thread.is_alive())
    assert not mover.running and mover.trouble == "no network here"
    with pytest.raises(OSError, match="no mover runs"):
        mover.open(Staging(SIZE, 1), lands=True)
    assert len(starts) == 1
    assert [record.message for record in caplog.records] == [
        "NIXL moves no blocks between nodes, they travel over TCP: no network here"
    ]
    mover.close()


def test_no_process_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers, "FIRST_PAUSE_S", 0.01)
    tries: list[int] = []

    def start(control: socket.socket) -> ThreadChild:
        tries.append(1)
        raise OSError(11, "Resource temporarily unavailable")

    mover = Mover(start)
    wait_until(lambda: len(tries) > 2, "it is tried again")
    assert mover.trouble == "no process is to be had (Resource temporarily unavailable)"
    mover.close()


class Mute:
    """A mover that runs, and says nothing after `first`."""

    def __init__(self, control: socket.socket, first: bytes) -> None:
        self._control = control.dup()
        if first:
            self._control.send(first)
        self.killed = threading.Event()

    def kill(self) -> None:
        self.killed.set()

    def wait(self) -> int:
        self.killed.wait(20.0)
        self._control.close()
        return -9


@pytest.mark.parametrize(
    ("first", "line"),
    [
        (b"", "its process said nothing for"),
        (movers.packet(movers.Ready()), "its process said nothing for"),
        (b"\xc1", "its process says what is no message"),
    ],
    ids=["never", "no more", "nonsense"],
)
def test_a_mover_that_says_nothing_is_killed(
    monkeypatch: pytest.MonkeyPatch, first: bytes, line: str
) -> None:
    monkeypatch.setattr(movers, "PING_S", 0.01)
    monkeypatch.setattr(movers, "START_S", 0.05)
    monkeypatch.setattr(movers, "GONE_S", 0.05)
    children: list[Mute] = []

    def start(control: socket.socket) -> Mute:
        children.append(Mute(control, first))
        return children[-1]

    mover = Mover(start)
    wait_until(lambda: line in mover.trouble)
    assert children[0].killed.is_set() and not mover.running
    mover.close()


def test_it_ends_when_it_is_closed(network: ModelNetwork) -> None:
    mover = model_mover(network)
    channel, _, _ = opened(mover, True)
    mover.close()
    assert not mover._thread.is_alive() and not mover.running
    with pytest.raises(OSError, match="gone"):
        said(channel)

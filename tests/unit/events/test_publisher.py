"""A manager's publisher between the manager's thread and real subscribers."""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kvbm.block import KEY_BYTES, Tier
from kvbm.clock import monotonic
from kvbm.errors import SettingsError
from kvbm.events import publisher as module
from kvbm.events.publisher import QUEUE_MAX, EventPublisher
from kvbm.protocol import RemovedBlocks, StoredRun, TierEvents
from rigs.indexer import PATIENCE_MS, Indexer, decoded, replayed

TOPIC = b"0123456789ab"
ANY = "tcp://127.0.0.1:0"
DEADLINE_S = 30.0


def name(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def stored(*numbers: int) -> TierEvents:
    hashes = b"".join(map(name, numbers))
    tokens = b"".join(number.to_bytes(4, "little") * 2 for number in numbers)
    return TierEvents(stored=(StoredRun(int(Tier.HOST), hashes, b"", tokens),))


def removed(*numbers: int) -> TierEvents:
    return TierEvents(removed=(RemovedBlocks(int(Tier.HOST), b"".join(map(name, numbers))),))


BIG = removed(*range(1, 20_000))
"""More than a socket's buffers take."""


def woken(publisher: EventPublisher) -> None:
    assert select.select([publisher.fileno()], [], [], DEADLINE_S)[0], "the manager is not told"


def subscriber(publisher: EventPublisher, topic: bytes = b"", endpoint: str = "") -> Indexer:
    """Somebody who has subscribed, as the manager has heard."""
    indexer = Indexer(endpoint or publisher.endpoint, topic)
    woken(publisher)
    assert publisher.take_subscribed() == [topic]
    return indexer


@contextlib.contextmanager
def stopped_reader(publisher: EventPublisher) -> Iterator[zmq.Socket[Any]]:
    """Somebody who has subscribed to everything, has little room, and reads nothing."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 2)
    socket.setsockopt(zmq.RCVBUF, 4096)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(publisher.endpoint)
    woken(publisher)
    assert publisher.take_subscribed() == [b""]
    yield socket
    socket.close(0)
    context.term()


def room(publisher: EventPublisher) -> None:
    """Wait until a message can be handed over."""
    while not publisher.room:
        woken(publisher)
        publisher.take_subscribed()


def fill(publisher: EventPublisher) -> int:
    """Hand over messages until there is no room and none comes; how many."""
    handed, room_comes = 0, True
    while room_comes:
        while publisher.room:
            publisher.publish(TOPIC, BIG)
            handed += 1
        publisher.take_subscribed()
        room_comes = bool(select.select([publisher.fileno()], [], [], 0.5)[0]) or publisher.room
    return handed


Make = Callable[..., EventPublisher]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[EventPublisher] = []

    def build(endpoint: str = ANY, replay: str | None = ANY, clock: Any = monotonic) -> EventPublisher:
        made.append(EventPublisher(endpoint, replay, clock, time.time))
        made[-1].start()
        return made[-1]

    yield build
    for each in made:
        each.close()


def test_subscribers_hear_what_the_manager_hands_over(make: Make) -> None:
    publisher = make()
    one, two = subscriber(publisher), subscriber(publisher)
    publisher.publish(TOPIC, stored(1, 2, 3))
    publisher.publish(TOPIC, removed(2))
    for indexer in (one, two):
        assert indexer.hear() is not None
        assert indexer.hear() is not None
        assert indexer.numbers == [0, 1]
        assert indexer.held == {TOPIC: {("CPU", 1), ("CPU", 3)}}
        assert indexer.blocks[3] == (2, (3, 3))
        indexer.close()


def test_a_topic_can_be_chosen(make: Make) -> None:
    publisher = make()
    indexer = subscriber(publisher, b"other")
    publisher.publish(TOPIC, stored(1))
    publisher.publish(b"other", stored(2), cleared=True)
    message = indexer.hear()
    assert message is not None
    assert message[:2] == (b"other", 1), "numbers count the messages of all topics"
    assert [event["type"] for event in message[2]] == ["AllBlocksCleared", "BlockStored"]
    indexer.close()


def test_it_listens_at_a_path_too(make: Make) -> None:
    with tempfile.TemporaryDirectory() as directory:
        publisher = make(f"ipc://{directory}/e", None)
        assert publisher.endpoint == f"ipc://{directory}/e"
        assert publisher.replay_endpoint == ""
        indexer = subscriber(publisher)
        publisher.publish(TOPIC, stored(1))
        assert indexer.hear() is not None
        indexer.close()


def test_what_was_missed_can_be_asked_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_MAX", 4)
    publisher = make()
    indexer = subscriber(publisher)
    for number in range(6):
        publisher.publish(TOPIC, stored(number + 1))
        assert indexer.hear() is not None
    indexer.close()
    assert [number for _, number, _ in replayed(publisher.replay_endpoint, 3)] == [3, 4, 5]
    assert [number for _, number, _ in replayed(publisher.replay_endpoint, 0)] == [2, 3, 4, 5]
    assert replayed(publisher.replay_endpoint, 6) == replayed(publisher.replay_endpoint, 1 << 40) == []
    late = Indexer("inproc://nowhere")
    for message in replayed(publisher.replay_endpoint, 0):
        late.take_in(message)
    assert late.held == {TOPIC: {("CPU", number) for number in (3, 4, 5, 6)}}
    late.close()


def test_what_is_kept_is_bounded_in_bytes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES_MAX", 500)
    publisher = make()
    indexer = subscriber(publisher)
    for _ in range(10):
        publisher.publish(TOPIC, removed(*range(1, 30)))
        assert indexer.hear() is not None
    indexer.close()
    assert 0 < len(replayed(publisher.replay_endpoint, 0)) < 10


def test_nonsense_is_not_answered_and_harms_nobody(make: Make) -> None:
    publisher = make()
    indexer = subscriber(publisher)
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint)
    socket.send_multipart([b"", b"short"])
    socket.send_multipart([b"one"])
    socket.send_multipart([b"", bytes(8), b"more"])
    publisher.publish(TOPIC, TierEvents(stored=(StoredRun(int(Tier.HOST), name(9), b"", b"odd"),)))
    publisher.publish(TOPIC, stored(1))
    assert [indexer.hear() is not None for _ in range(2)] == [True, True]
    assert indexer.held == {TOPIC: {("CPU", 1)}}
    assert len(replayed(publisher.replay_endpoint, 0)) == 2
    assert not socket.poll(0)
    socket.close(0)
    context.term()
    indexer.close()


def test_while_a_subscriber_does_not_read_the_manager_finds_no_room(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little room in the sockets, and all the time of the world."""
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    publisher = make(clock=lambda: 0.0)
    with stopped_reader(publisher) as slow:
        handed = fill(publisher)
        assert len(publisher._queue) == QUEUE_MAX
        for number in range(handed):
            assert slow.poll(PATIENCE_MS)
            assert decoded(slow.recv_multipart())[1] == number, "nothing is lost"
        woken(publisher)
        assert publisher.room


def test_a_subscriber_that_has_stopped_loses_messages_and_the_others_do_not(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    publisher = make()
    with stopped_reader(publisher):
        reader = subscriber(publisher)
        for _ in range(100):
            room(publisher)
            publisher.publish(TOPIC, BIG)
            assert reader.hear() is not None
        assert reader.numbers == list(range(100))
        reader.close()
    assert "a subscriber of KV events has read nothing for 0.05 s" in caplog.text


def test_subscriptions_beyond_what_is_kept_of_them_are_to_everything(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make()
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.SUB)
    for number in range(100):
        socket.setsockopt(zmq.SUBSCRIBE, str(number).encode())
    socket.connect(publisher.endpoint)
    heard: list[bytes] = []

    while b"99" not in heard:
        woken(publisher)
        heard += publisher.take_subscribed()
    assert b"" in heard or len(set(heard)) == 100
    socket.close(0)
    context.term()


def test_the_end_comes_after_what_was_handed_over() -> None:
    publisher = EventPublisher(ANY, None, monotonic, time.time)
    publisher.start()
    indexer = subscriber(publisher)
    for number in range(QUEUE_MAX):
        publisher.publish(TOPIC, stored(number + 1))
        if not publisher.room:
            break
    handed = number + 1
    publisher.close()
    for _ in range(handed):
        assert indexer.hear() is not None
    assert len(indexer.held[TOPIC]) == handed
    indexer.close()


def test_it_ends_though_a_subscriber_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    monkeypatch.setattr(module, "LINGER_MS", 10)
    publisher = EventPublisher(ANY, ANY, lambda: 0.0, time.time)
    publisher.start()
    with stopped_reader(publisher):
        fill(publisher)
        publisher.close()


@pytest.mark.swallows("^ZeroDivisionError: integer division or modulo by zero$")
def test_a_defect_ends_events_and_nothing_else(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = make()
    monkeypatch.setattr(module, "tier_fields", lambda told: 1 // 0)
    publisher.publish(TOPIC, stored(1))
    publisher._thread.join(DEADLINE_S)
    assert not publisher.room
    assert "no KV events are published any more" in caplog.text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"replay": None}, "DYN_KVBM_EVENTS_ENDPOINT"),
        ({"endpoint": ANY}, "DYN_KVBM_EVENTS_REPLAY_ENDPOINT"),
    ],
)
def test_an_address_that_is_taken_is_refused_in_one_line(
    make: Make, fields: dict[str, str | None], field: str
) -> None:
    taken = make().endpoint
    threads = len(os.listdir("/proc/self/task"))
    with pytest.raises(
        SettingsError, match=f"{field}='{taken}' cannot be used: an address of this"
    ) as caught:
        make(**{"endpoint": taken, "replay": taken, **fields})
    assert "\n" not in str(caught.value)
    assert len(os.listdir("/proc/self/task")) <= threads

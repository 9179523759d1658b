"""Frames in pieces and frames that are none; waits and the pace of peers."""

from __future__ import annotations

import socket

import msgspec
import pytest

from kvbm.errors import ProtocolError
from kvbm.tiers.peers.pace import Pace
from kvbm.tiers.peers.waits import Waits
from kvbm.tiers.peers.wire import (
    FRAME_BYTES_MAX,
    METADATA_BYTES_MAX,
    NO_PLACE,
    PLACES_MAX,
    PRINTS_AT_ONCE,
    Ask,
    Beat,
    Held,
    Incoming,
    LinkEnded,
    Offer,
    Stream,
    Welcome,
    framed,
    from_lender,
    from_reader,
    joined_places,
    split_places,
)


def pair() -> tuple[socket.socket, Stream]:
    ours, theirs = socket.socketpair()
    return ours, Stream(theirs)


def test_messages_come_whole_however_they_are_cut() -> None:
    ours, stream = pair()
    incoming = Incoming(stream, from_reader)
    data = framed(Ask(number=3, keys=bytes(64))) + framed(Beat())
    with ours:
        for byte in data[:-1]:
            ours.sendall(bytes((byte,)))
            message = incoming.next()
            if message is not None:
                assert message == Ask(number=3, keys=bytes(64))
        ours.sendall(data[-1:])
        assert incoming.next() == Beat()
        assert incoming.next() is None
    with pytest.raises(LinkEnded):
        incoming.next()
    stream.close()


def test_not_a_byte_is_read_beyond_a_message() -> None:
    ours, stream = pair()
    with ours:
        ours.sendall(framed(Held()) + b"bytes")
        assert Incoming(stream, from_lender).next() == Held()
        target = memoryview(bytearray(9))
        assert stream.receive(target) == 5 and bytes(target[:5]) == b"bytes"
    stream.close()


@pytest.mark.parametrize(
    "data",
    [
        bytes(4),
        (FRAME_BYTES_MAX + 1).to_bytes(4, "little"),
        (3).to_bytes(4, "little") + b"\xc1\xc1\xc1",
        framed(Beat()),  # not the lender's to say
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    ours, stream = pair()
    with ours:
        ours.sendall(data)
        with pytest.raises(ProtocolError):
            Incoming(stream, from_lender).next()
    stream.close()


@pytest.mark.parametrize(
    "message",
    [Ask(number=1, keys=bytes(65 * 32)), Ask(number=1, keys=b""), Ask(number=-1, keys=bytes(32))],
)
def test_sizes_are_bounded(message: Ask) -> None:
    ours, stream = pair()
    with ours:
        ours.sendall(framed(message))
        with pytest.raises(ProtocolError):
            Incoming(stream, from_reader).next()
    stream.close()


def test_the_largest_news_fit_into_a_frame() -> None:
    most = bytes(8 * PRINTS_AT_ONCE)
    assert len(framed(Held(gone=most, came=most, tails=most))) <= FRAME_BYTES_MAX


def test_waits_grow_are_spread_and_end() -> None:
    waits = Waits(lambda: 1.0, first_s=1.0, longest_s=5.0)
    assert [waits.failed() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    waits.succeeded()
    assert waits.failed() == 1.0
    assert Waits(lambda: 0.0, first_s=1.0).failed() == 0.5
    many = Waits(lambda: 1.0)
    assert max(many.failed() for _ in range(2000)) == 30.0


def test_pace() -> None:
    pace = Pace()
    assert pace.expected_s(1000) == 0.0
    pace.took(0.001, 1.0, 1000)
    assert pace.expected_s(500) == pytest.approx(0.501)
    pace.took(0.001, 2.0, 1000)
    assert pace.expected_s(1000) == pytest.approx(0.001 + 1.2)


@pytest.mark.parametrize("places", [[], [0], [0, 7, NO_PLACE, 4095]])
def test_places_travel(places: list[int]) -> None:
    assert split_places(joined_places(places)) == places


def test_an_end_that_knows_of_no_movers_is_understood() -> None:
    """What it says lacks the fields that came later, and it skips those that it does not know."""

    class Older(msgspec.Struct, tag_field="type", tag="welcome"):
        version: int
        fleet: str
        node: str

    welcome = from_lender.decode(msgspec.msgpack.encode(Older(version=1, fleet="f", node="n")))
    assert isinstance(welcome, Welcome) and not welcome.moves
    newer = msgspec.msgpack.encode(Welcome(version=1, fleet="f", node="n", moves=True))
    assert msgspec.msgpack.decode(newer, type=Older).node == "n"


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": 0},
        {"metadata": b""},
        {"metadata": bytes(METADATA_BYTES_MAX + 1)},
        {"address": -1},
        {"places": 0},
        {"places": PLACES_MAX + 1},
    ],
)
def test_an_offer_is_bounded(wrong: dict[str, object]) -> None:
    good: dict[str, object] = {
        "type": "offer",
        "number": 1,
        "metadata": b"m",
        "address": 1 << 47,
        "place_bytes": 4096,
        "places": 4,
    }
    assert isinstance(from_reader.decode(msgspec.msgpack.encode(good)), Offer)
    with pytest.raises(msgspec.ValidationError):
        from_reader.decode(msgspec.msgpack.encode({**good, **wrong}))

"""A socket that never blocks: whole messages in order, bounded, and no descriptors that nobody asked for."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm import framing
from kvbm.errors import MessageTooLong, ProtocolError
from kvbm.framing import FrameBuffer, FramedSocket, encode
from kvbm.protocol import MESSAGE_BYTES_MAX, Lookup


@given(
    sizes=st.lists(st.integers(0, 300), max_size=8),
    cuts=st.lists(st.integers(1, 97), min_size=1, max_size=20),
)
def test_frames_come_out_whole_and_in_order_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    frames = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    stream = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    buffer, found, start, turn = FrameBuffer(), [], 0, 0
    while start < len(stream):
        cut = cuts[turn % len(cuts)]
        found += buffer.feed(stream[start : start + cut])
        start, turn = start + cut, turn + 1
    assert found == frames


def test_a_frame_over_the_bound_is_refused_before_it_is_buffered() -> None:
    buffer = FrameBuffer()
    with pytest.raises(ProtocolError, match="accepted"):
        buffer.feed(struct.pack("<I", MESSAGE_BYTES_MAX + 1))
    assert FrameBuffer().feed(struct.pack("<I", MESSAGE_BYTES_MAX)) == []


def test_a_message_over_the_bound_is_not_sent() -> None:
    with pytest.raises(MessageTooLong, match="a Lookup of 8388703 bytes"):
        encode(Lookup(lookup=1, keys=bytes(MESSAGE_BYTES_MAX + 1)))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_what_the_socket_does_not_take_is_sent_later(ends: tuple[socket.socket, socket.socket]) -> None:
    wire, reader = FramedSocket(ends[0]), FramedSocket(ends[1])
    frames = [struct.pack("<I", 50_000) + bytes([i]) * 50_000 for i in range(40)]
    for frame in frames:
        wire.send(frame)
    assert wire.outgoing
    found: list[bytes] = []
    while wire.outgoing:
        found += reader.receive()
        wire.flush()
    while len(found) < len(frames):
        found += reader.receive()
    assert found == [frame[4:] for frame in frames]
    assert not reader.ended
    wire.connection.close()
    assert reader.receive() == []
    assert reader.ended


def test_what_waits_is_bounded(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "OUTGOING_BYTES_MAX", 1 << 20)
    wire = FramedSocket(ends[0])
    while len(wire.outgoing) <= (1 << 20) - 50_000:
        wire.send(bytes(50_000))
    with pytest.raises(OSError, match="bytes wait"):
        wire.send(bytes(50_000))
    assert len(wire.outgoing) < (1 << 20) + 50_001
    wire.outgoing.clear()
    wire.flush()


@pytest.mark.parametrize(("fds_max", "kept"), [(0, 0), (4, 2)])
def test_descriptors_that_nobody_asked_for_are_closed(
    ends: tuple[socket.socket, socket.socket], fds_max: int, kept: int
) -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    wire = FramedSocket(ends[1], fds_max)
    FramedSocket(ends[0]).send(encode(Lookup(lookup=1, keys=b"")), [writing, writing])
    os.close(writing)
    assert len(wire.receive()) == 1
    assert len(wire.fds) == kept
    if kept:
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        for fd in wire.fds:
            os.close(fd)
    assert os.read(reading, 1) == b"", "nobody has the other end of the pipe any more"
    os.close(reading)

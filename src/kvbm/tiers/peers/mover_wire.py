"""What a manager and its mover say to each other: one typed msgpack message in each packet of a Unix socket.

There is one *control* socket, and a *channel* for each piece of memory that the mover maps. A channel's end is the end
of that memory there. Both ends are ours and of one release, so what does not decode ends the conversation.
"""

from __future__ import annotations

import socket
from typing import Annotated

import msgspec

from kvbm.tiers.peers.wire import METADATA_BYTES_MAX

PACKET_BYTES_MAX = METADATA_BYTES_MAX + 4096
SPANS_MAX = 64
"""Pieces of memory that one `Write` moves."""

Metadata = Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


# ---- control, from the manager


class Open(_Message, frozen=True, kw_only=True, tag="open"):
    """Two descriptors come with it: the other end of a channel, and memory of `size` bytes.

    `lands`: others write to that memory; else it is what is written to others.
    """

    size: int
    lands: bool


class Ping(_Message, frozen=True, kw_only=True, tag="ping"):
    """Say something."""


# ---- control, from the mover


class Ready(_Message, frozen=True, kw_only=True, tag="ready"):
    """It works."""


class Failed(_Message, frozen=True, kw_only=True, tag="failed"):
    """It will never work here, and ends."""

    line: str


class Pong(_Message, frozen=True, kw_only=True, tag="pong"):
    """The answer to `Ping`; also said after each `Open`, so that many of them are no silence."""


# ---- a channel, from the manager


class Reach(_Message, frozen=True, kw_only=True, tag="reach"):
    """Get to know the mover at the other node that this metadata is of."""

    metadata: Metadata


class Write(_Message, frozen=True, kw_only=True, tag="write"):
    """Put bytes into that mover's memory: (offset in this channel's memory, address there, bytes) each.

    What has not ended after `limit_s` has failed.
    """

    number: int
    spans: list[tuple[int, int, int]]
    limit_s: float


class Expect(_Message, frozen=True, kw_only=True, tag="expect"):
    """Others may write to this memory now, or no longer."""

    on: bool


# ---- a channel, from the mover


class Mapped(_Message, frozen=True, kw_only=True, tag="mapped"):
    """The first answer on a channel: the memory is known, and lies there; for others to reach it, its metadata."""

    address: int
    metadata: Metadata = b""


class Unmapped(_Message, frozen=True, kw_only=True, tag="unmapped"):
    """The memory, or the other node's mover, cannot be used: the channel ends."""

    line: str


class Reached(_Message, frozen=True, kw_only=True, tag="reached"):
    """That mover is known."""


class Written(_Message, frozen=True, kw_only=True, tag="written"):
    """A `Write` has ended; `line` is empty when all bytes have arrived."""

    number: int
    line: str = ""


ToMover = Open | Ping | Reach | Write | Expect
FromMover = Ready | Failed | Pong | Mapped | Unmapped | Reached | Written

_encoder = msgspec.msgpack.Encoder()
to_mover: msgspec.msgpack.Decoder[ToMover] = msgspec.msgpack.Decoder(ToMover)
from_mover: msgspec.msgpack.Decoder[FromMover] = msgspec.msgpack.Decoder(FromMover)


def packet(message: _Message) -> bytes:
    """One message as it travels."""
    return _encoder.encode(message)


class Channel:
    """The manager's end of a channel. Owned by one thread; it never waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: _Message) -> None:
        """Raises OSError: the mover has gone, or takes no more."""
        self._connection.send(packet(message))

    def receive(self) -> FromMover | None:
        """What it said; None when it has said nothing more. Raises OSError when it has gone."""
        try:
            data = self._connection.recv(PACKET_BYTES_MAX)
        except BlockingIOError:
            return None
        if not data:
            raise OSError("the mover has gone")
        return from_mover.decode(data)

    def close(self) -> None:
        """The mover lets the memory go."""
        self._connection.close()

"""What two managers say to each other: typed msgpack messages in frames, and the bytes of blocks after them.

A frame is a 4-byte little-endian length and a message. A `Lent` that says that the block is there is followed by its
bytes, one shard after the other, and then by a *seal*: a byte that says whether the sender still held the block when
the last byte had left, and the checksum of what it sent. The seal comes last because the sender computes it over the
very bytes that went out.

Where both ends have a mover (see `mover`), a reader may `Offer` memory of its own in which the lender puts blocks. A
`Lent` that is `moved` is followed by the seal alone: its bytes lie in that memory already. An end without a mover knows
none of this: what is new here has a default, and is sent only to an end that asked for it.

Every size is bounded, and a frame beyond the bound is refused before it is read. Nothing that comes from the other end
is believed before its seal was verified.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import xxhash

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.errors import ProtocolError

WIRE_VERSION = 1
LENGTH_BYTES = 4
FRAME_BYTES_MAX = 1 << 18
PRINT_BYTES = 8
"""A *print* of a block: so many bytes of its key. Two blocks with one print cost a miss: the seal covers the key."""
PRINTS_AT_ONCE = 4096
ASK_BLOCKS_MAX = 64
ASKS_MAX = 8
"""Asks that a reader may have open on one connection."""
CHECKSUM_BYTES = 16
SEAL_BYTES = 1 + CHECKSUM_BYTES
WHOLE, BROKEN = 1, 0
METADATA_BYTES_MAX = 1 << 16
PLACES_MAX = 4096
NO_PLACE = 0xFFFFFFFF
PLACE_BYTES = 4
QUIET_S_MAX = 15.0
"""An end that has said nothing for so long has gone: each says something every `HEARTBEAT_S`."""
HEARTBEAT_S = 4.0

NOT_SERVED = "is not served here"
"""In the refusal of a node of the same fleet that has no blocks of the namespace."""

Name = Annotated[str, msgspec.Meta(max_length=64)]
Line = Annotated[str, msgspec.Meta(max_length=1000)]
Prints = Annotated[bytes, msgspec.Meta(max_length=PRINTS_AT_ONCE * PRINT_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class LinkEnded(OSError):
    """The connection is over, or has to be: one line says why."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


# ---- from the reader


class Greeting(_Message, frozen=True, kw_only=True, tag="greeting"):
    """First message of the reader: who asks, for which namespace's blocks, and how many prints it can keep."""

    version: int
    fleet: Name
    node: Name
    fingerprint: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    slot_bytes: Count
    shard_count: Count
    known_max: Count


class Ask(_Message, frozen=True, kw_only=True, tag="ask"):
    """The keys of blocks to send, joined. `number` is the reader's name for it, new each time.

    `places` says for each block where in the memory of that `offer` it may be put, 4 bytes each (`joined_places`);
    empty where none may.
    """

    number: Count
    keys: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=ASK_BLOCKS_MAX * KEY_BYTES)]
    offer: Count = 0
    places: Annotated[bytes, msgspec.Meta(max_length=ASK_BLOCKS_MAX * PLACE_BYTES)] = b""


class Offer(_Message, frozen=True, kw_only=True, tag="offer"):
    """Memory for blocks: `places` of `place_bytes` each, from `address` on, which `metadata` lets a mover reach.

    It takes the place of the offer before it. Sent only to a lender whose `Welcome` said that it moves.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=METADATA_BYTES_MAX)]
    address: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    place_bytes: Count
    places: Annotated[int, msgspec.Meta(ge=1, le=PLACES_MAX)]


class Beat(_Message, frozen=True, kw_only=True, tag="beat"):
    """The reader is still there."""


# ---- from the lender


class Welcome(_Message, frozen=True, kw_only=True, tag="welcome"):
    """The reader is let in, by this node. `moves`: it takes offers of memory to put blocks in."""

    version: int
    fleet: Name
    node: Name
    moves: bool = False


class Refusal(_Message, frozen=True, kw_only=True, tag="refusal"):
    """The reader is not let in, or no longer."""

    line: Line


class Held(_Message, frozen=True, kw_only=True, tag="held"):
    """What is held in host memory: blocks that have gone, then some that have come, `tails` in place of a tail.

    `again`: forget all that was said before. `complete`: all that was held when this began has been said by now. An
    empty one says that the lender is still there.
    """

    gone: Prints = b""
    came: Prints = b""
    tails: Prints = b""
    again: bool = False
    complete: bool = False


class Lent(_Message, frozen=True, kw_only=True, tag="lent"):
    """The answer for block `index` of an ask: it is not there, or `size` bytes and the seal follow.

    `moved`: they lie in the place that the ask named, and the seal alone follows.
    """

    ask: Count
    index: Annotated[int, msgspec.Meta(ge=0, lt=ASK_BLOCKS_MAX)]
    there: bool = False
    size: Count = 0
    moved: bool = False
    engine_hash: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)] = b""
    group: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)] = 0
    facts: Annotated[bytes, msgspec.Meta(max_length=FRAME_BYTES_MAX // 2)] = b""


FromReader = Greeting | Ask | Offer | Beat
FromLender = Welcome | Refusal | Held | Lent

_encoder = msgspec.msgpack.Encoder()
from_reader: msgspec.msgpack.Decoder[FromReader] = msgspec.msgpack.Decoder(FromReader)
from_lender: msgspec.msgpack.Decoder[FromLender] = msgspec.msgpack.Decoder(FromLender)
_MALFORMED = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)

MessageT = TypeVar("MessageT")


def framed(message: _Message) -> bytes:
    """One frame: length and message."""
    body = _encoder.encode(message)
    assert len(body) <= FRAME_BYTES_MAX, "message over its bound"
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def begun_checksum(fingerprint: bytes, key: BlockKey) -> xxhash.xxh3_128:
    """The checksum of a block before its first byte: it covers namespace and key too, so that the right bytes of
    another block fail as surely as wrong ones."""
    return xxhash.xxh3_128(fingerprint + key)


def joined_prints(prints: list[int]) -> bytes:
    """Prints as they travel."""
    return b"".join(each.to_bytes(PRINT_BYTES, "little") for each in prints)


def joined_places(places: Sequence[int]) -> bytes:
    """Places as they travel."""
    return b"".join(each.to_bytes(PLACE_BYTES, "little") for each in places)


def split_places(places: bytes) -> list[int]:
    """The counterpart of `joined_places`; what is cut off at the end is left out."""
    return [
        int.from_bytes(places[at : at + PLACE_BYTES], "little")
        for at in range(0, len(places) - PLACE_BYTES + 1, PLACE_BYTES)
    ]


class Stream:
    """A connected socket, plain or TLS, that never waits. Owned by one thread: a TLS socket bears no second one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.wants_write = False
        """The last `receive` could not go on before the socket takes bytes (TLS)."""

    def receive(self, target: memoryview) -> int:
        """Bytes that arrived, put into the target; 0 when there are none now. Raises OSError, LinkEnded at the end."""
        self.wants_write = False
        try:
            count = self.connection.recv_into(target)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return 0
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return 0
        if not count:
            raise LinkEnded("the other end closed the connection")
        return count

    def send(self, source: memoryview) -> int:
        """How many of the bytes the socket took; after 0 the next call has to bring the same. Raises OSError."""
        try:
            return self.connection.send(source)
        except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0

    def close(self) -> None:
        """Let it go at once: bytes under way are lost."""
        self.connection.close()


class Incoming(Generic[MessageT]):
    """The messages of a stream, one by one, and never a byte more: what follows may have to go elsewhere."""

    def __init__(self, stream: Stream, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._stream, self._decoder = stream, decoder
        self._body = memoryview(bytearray(FRAME_BYTES_MAX))
        self._head = memoryview(bytearray(LENGTH_BYTES))
        self._left = self._head
        self._length = 0

    def next(self) -> MessageT | None:
        """The next message; None while it has not arrived. Raises OSError, and ProtocolError for what is none."""
        while self._left:
            count = self._stream.receive(self._left)
            if not count:
                return None
            self._left = self._left[count:]
            if not self._left and not self._length:
                self._length = int.from_bytes(self._head, "little")
                if not 0 < self._length <= FRAME_BYTES_MAX:
                    raise ProtocolError(f"a frame of {self._length} bytes: accepted are {FRAME_BYTES_MAX}")
                self._left = self._body[: self._length]
        body = self._body[: self._length]
        self._left, self._length = self._head, 0
        try:
            return self._decoder.decode(body)
        except _MALFORMED as error:
            raise ProtocolError(f"malformed message of {len(body)} bytes: {error}") from None


def tune(connection: socket.socket) -> None:
    """Options of a connection between nodes: no delay of small messages, and an end for one whose other end is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(QUIET_S_MAX * 1000))


def one_line(error: Any) -> str:
    """An error of a connection, in one line of bounded length."""
    return " ".join(str(error).split())[:500] or type(error).__name__

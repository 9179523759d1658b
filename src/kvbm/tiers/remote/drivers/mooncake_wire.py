"""What a node and its Mooncake process tell one another, on Unix stream sockets: frames of a length and msgpack.

The bytes of a blob follow their frame as they are. Each connection has one question under way.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from kvbm.tiers.remote.blobs import Buffer

BLOB_BYTES_MAX = 16 << 20
FRAME_BYTES_MAX = 1 << 20
CONNECTIONS = 16
"""So many questions at once. As many more may be stuck in Mooncake, given up by who asked."""

NOT_FOUND = -704
IS_THERE = 1
"""The answer to a put of what is there already."""

Operation = Literal["put", "read", "end", "sizes", "remove"]


class Setup(msgspec.Struct, frozen=True):
    """What the process is to do. The first frame that it gets."""

    master: str
    metadata: str
    protocol: str
    device: str
    segment_bytes: int
    """Memory that it gives to the pool; 0: none."""
    host: str
    """Its address for other nodes; empty: the one that the way to the master has."""
    replicas: int


class Ask(msgspec.Struct, frozen=True):
    """A question. `size`: of the bytes that follow (put), or that are wanted, from `start` (read) or before the end."""

    operation: Operation
    keys: Sequence[str]
    start: int = 0
    size: int = 0


class Answer(msgspec.Struct, frozen=True):
    """Mooncake's codes, one for each key: below 0 is an error, a size for `sizes`. `size` bytes follow."""

    codes: Sequence[int]
    size: int = 0
    blob_size: int = 0
    """Of the whole blob, for `end`."""


class Ended(msgspec.Struct, frozen=True):
    """The last frame of a process that cannot go on, and why."""

    line: str


_Message = TypeVar("_Message", Setup, Ask, Answer, Ended)
_encode = msgspec.msgpack.Encoder().encode


def frame(message: Setup | Ask | Answer | Ended) -> bytes:
    """A message's bytes."""
    body = _encode(message)
    assert len(body) <= FRAME_BYTES_MAX
    return len(body).to_bytes(4, "little") + body


def receive(connection: socket.socket, kind: type[_Message]) -> _Message:
    """The next message. Raises EOFError where the other end has closed, OSError, msgspec's errors."""
    length = int.from_bytes(receive_exactly(connection, 4), "little")
    if length > FRAME_BYTES_MAX:
        raise OSError(f"a frame of {length} bytes, over {FRAME_BYTES_MAX}")
    return msgspec.msgpack.decode(receive_exactly(connection, length), type=kind)


def receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """So many bytes. Raises as `receive`."""
    data = bytearray(size)
    fill(connection, memoryview(data))
    return data


def fill(connection: socket.socket, into: memoryview) -> None:
    """Fill a buffer. Raises as `receive`."""
    while len(into):
        count = connection.recv_into(into)
        if not count:
            raise EOFError
        into = into[count:]


def send(connection: socket.socket, message: Ask | Answer, parts: Sequence[Buffer] = ()) -> None:
    """A message, and the bytes after it. Raises OSError."""
    connection.sendall(frame(message))
    for part in parts:
        if len(part):
            connection.sendall(part)

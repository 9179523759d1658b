"""Messages on a Unix stream socket: each is a frame, a 4-byte little-endian length before the encoded message.

Both ends of a session use the same `FramedSocket`: the manager's `Session` and a client's `Channel`.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

import msgspec

from kvbm.block import KEY_BYTES
from kvbm.errors import MessageTooLong, ProtocolError
from kvbm.protocol import MESSAGE_BYTES_MAX, STORED_KEYS_MAX, Message

LENGTH_BYTES = 4
OUTGOING_BYTES_MAX = 32 << 20
RECEIVE_BYTES = 1 << 18
TOKEN_BYTES = 4
"""Of one token in `Reserve.tokens`."""
FACTS_BYTES_MAX = 1024
"""Of one block in `Reserve.facts`: what needs more is not announced."""
_VALUE_BYTES = 8
"""More than msgpack spends on the length of one of many values."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One frame: length and body. Raises MessageTooLong."""
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise MessageTooLong(
            f"a {type(message).__name__} of {len(body)} bytes cannot be sent: at most {MESSAGE_BYTES_MAX}"
        )
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def announced_keys_max(block_tokens: int) -> int:
    """The most keys of one `Reserve` whose blocks may be announced: with tokens and facts it is no longer than a
    message may be."""
    each = 2 * KEY_BYTES + 1 + TOKEN_BYTES * block_tokens + FACTS_BYTES_MAX + _VALUE_BYTES
    return max(1, min(STORED_KEYS_MAX, (MESSAGE_BYTES_MAX - FACTS_BYTES_MAX) // each))


class FrameBuffer:
    """Bytes in, whole frames out; refuses a frame over the bound before it is buffered."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames completed by `data`, in order. Raises ProtocolError when a length is over the bound."""
        self._data += data
        frames: list[bytes] = []
        start = 0
        with memoryview(self._data) as view:  # a slice of it copies nothing
            size = len(view)
            while size - start >= LENGTH_BYTES:
                length = int.from_bytes(view[start : start + LENGTH_BYTES], "little")
                if length > MESSAGE_BYTES_MAX:
                    raise ProtocolError(
                        f"frame length {length} is over the accepted {MESSAGE_BYTES_MAX} bytes"
                    )
                end = start + LENGTH_BYTES + length
                if size < end:
                    break
                frames.append(bytes(view[start + LENGTH_BYTES : end]))
                start = end
        del self._data[:start]
        return frames


class FramedSocket:
    """A connected socket that never blocks: bytes that it does not take at once are kept, up to `OUTGOING_BYTES_MAX`.

    `outgoing` has the bytes that wait; `ended` becomes True when the other end has closed. Of the file descriptors that
    come with a read, at most `fds_max` are taken, into `fds`; the kernel closes the rest.
    """

    def __init__(self, connection: socket.socket, fds_max: int = 0) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.ended = False
        self.fds: list[int] = []
        self._fds_max = fds_max
        self._frames = FrameBuffer()
        self.outgoing = bytearray()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame, and send as much as the socket takes; descriptors go with its first byte. Raises OSError."""
        if fds:
            assert not self.outgoing, "descriptors travel with the first message"
            data = data[socket.send_fds(self.connection, [data], list(fds)) :]
        self.queue(data)
        self.flush()

    def queue(self, data: bytes) -> int:
        """Keep a frame for the next `flush`. Returns how many bytes wait; raises OSError when they are too many."""
        self.outgoing += data
        waiting = len(self.outgoing)
        if waiting > OUTGOING_BYTES_MAX:
            raise OSError(errno.ENOBUFS, f"{waiting} bytes wait")
        return waiting

    def flush(self) -> None:
        """Send as many of the bytes that wait as the socket takes. Raises OSError."""
        while self.outgoing:
            try:
                sent = self.connection.send(self.outgoing)
            except (BlockingIOError, InterruptedError):
                return
            del self.outgoing[:sent]

    def receive(self) -> list[bytes]:
        """The messages, encoded, that arrived with one read. Raises OSError and ProtocolError."""
        return self._frames.feed(self.read())

    def read(self) -> bytes:
        """The bytes that arrived, at most `RECEIVE_BYTES`; they are lost to `receive`. Raises OSError."""
        try:
            data, fds, _, _ = socket.recv_fds(self.connection, RECEIVE_BYTES, self._fds_max)
        except (BlockingIOError, InterruptedError):
            return b""
        self.fds += fds
        self.ended = not data
        return data

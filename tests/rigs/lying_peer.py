"""A lender of a test's own making: it speaks the wire, and does at each ask what the test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import msgspec

from kvbm.block import BlockKey
from kvbm.fleet.directory import Peer
from kvbm.hashing import split_keys
from kvbm.tiers.peers.wire import (
    BROKEN,
    LENGTH_BYTES,
    WHOLE,
    WIRE_VERSION,
    Ask,
    FromReader,
    Greeting,
    Held,
    Lent,
    Offer,
    Welcome,
    begun_checksum,
    framed,
    from_reader,
)
from rigs.peers import FLEET, HOST, LAYOUT, NAMESPACE, content

Answering = Callable[["LyingPeer", socket.socket, Ask], None]


class LyingPeer:
    """Says that it holds `keys`, and answers each ask with `answer`; `welcome` is its first frame."""

    def __init__(self, keys: Sequence[BlockKey], answer: Answering, welcome: bytes | None = None) -> None:
        self.keys, self.answer = keys, answer
        self.welcome = (
            framed(Welcome(version=WIRE_VERSION, fleet=FLEET, node="liar")) if welcome is None else welcome
        )
        self.connections = 0
        self.asks: list[Ask] = []
        self.offers: list[Offer] = []
        self._listener = socket.create_server((HOST, 0))
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def peer(self) -> Peer:
        return Peer(f"{HOST}:{self._listener.getsockname()[1]}")

    def close(self) -> None:
        for each in [self._listener, *self._open]:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()
        self._thread.join(10.0)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            self.connections += 1
            try:
                self._serve(connection)
            except (OSError, EOFError):
                pass
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        greeting = self._next(connection)
        assert isinstance(greeting, Greeting)
        connection.sendall(self.welcome)
        connection.sendall(
            framed(Held(came=b"".join(key[:8] for key in self.keys), again=True, complete=True))
        )
        while True:
            message = self._next(connection)
            if isinstance(message, Offer):
                self.offers.append(message)
            if isinstance(message, Ask):
                self.asks.append(message)
                self.answer(self, connection, message)

    def _next(self, connection: socket.socket) -> FromReader:
        length = int.from_bytes(_exactly(connection, LENGTH_BYTES), "little")
        return from_reader.decode(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def head(to: Ask, index: int, **fields: object) -> Lent:
    """The head of an honest answer, but for these fields."""
    return msgspec.structs.replace(
        Lent(ask=to.number, index=index, there=True, size=LAYOUT.block_bytes), **fields
    )


def block(
    ask: Ask, index: int, shown: BlockKey | None = None, verdict: int = WHOLE, flip: bool = False
) -> bytes:
    """An answer whole: with the bytes of `shown`, another block, sealed as such; or with a flipped bit."""
    key = split_keys(ask.keys)[index]
    checksum = begun_checksum(NAMESPACE.fingerprint, shown or key)
    data = bytearray(b"".join(content(shown or key)))
    checksum.update(data)
    if flip:
        data[77] ^= 1
    return framed(head(ask, index)) + bytes(data) + bytes((verdict,)) + checksum.digest()


def honest(peer: LyingPeer, connection: socket.socket, ask: Ask) -> None:
    for index in range(len(split_keys(ask.keys))):
        connection.sendall(block(ask, index))


def silent(peer: LyingPeer, connection: socket.socket, ask: Ask) -> None:
    """It answers nothing, and stays."""


__all__ = ["BROKEN", "LyingPeer", "block", "head", "honest", "silent"]

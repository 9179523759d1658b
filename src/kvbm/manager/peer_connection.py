"""One reader of another node: a thread with its connection, which sends blocks straight out of host memory.

The thread knows no pool and no index. It passes asks on to the loop (`Lending.request`), and sends what the loop posts:
what host memory holds, and leased blocks. It never waits inside a send, so a lease is never held longer than its
deadline: then the connection ends, in the middle of a block if need be.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from kvbm.block import KEY_BYTES
from kvbm.errors import KvbmError, ProtocolError
from kvbm.fleet.tls import certified
from kvbm.hashing import split_keys
from kvbm.manager.peer_messages import (
    Admitted,
    AskFor,
    Enter,
    GiveBack,
    Leave,
    LentBlock,
    Part,
    Refused,
    TellMore,
)
from kvbm.tiers.peers.wire import (
    ASKS_MAX,
    BROKEN,
    CHECKSUM_BYTES,
    HEARTBEAT_S,
    QUIET_S_MAX,
    WHOLE,
    WIRE_VERSION,
    Ask,
    Beat,
    FromReader,
    Greeting,
    Held,
    Incoming,
    Lent,
    LinkEnded,
    Refusal,
    Stream,
    Welcome,
    begun_checksum,
    framed,
    from_reader,
    one_line,
    tune,
)

if TYPE_CHECKING:
    from kvbm.manager.peer_server import PeerServer

log = logging.getLogger("kvbm.manager")

GREET_S = 5.0
NEWS_EVERY_S = 0.05
"""What came and went is told together, so often at most."""
SENT_AT_ONCE = 1 << 18
"""Bytes that go to the socket in one call: they are still in the CPU's cache when their checksum is computed."""
READS_AT_ONCE = 32


class _Refusing(KvbmError):
    """Tell the reader this line, and end."""


class Digest(Protocol):
    """A checksum that grows."""

    def update(self, data: memoryview) -> None:
        """These bytes come next."""


class PeerConnection:
    """See the module. `start`, `stop`, `join` and `describe` are the server's, `post` is the loop's."""

    def __init__(self, server: PeerServer, connection: socket.socket, host: str) -> None:
        self.host = host
        self.node = ""
        self._server, self._connection, self._lend = server, connection, server.lend
        self._clock = server.clock
        self._posted: deque[Admitted | Refused | Part | Held] = deque()
        self._parts: deque[Part] = deque()
        self._frames: deque[bytes] = deque()
        self._sending: Iterator[None] | None = None
        self._part_deadline_s: float | None = None
        self._fingerprint = b""
        self._admitted = self._news_out = self._refusing = False
        self._tell_at_s: float | None = None
        self._open_asks: set[int] = set()
        self._heard_s = self._said_s = self._clock()
        self._stopping = False
        self._event_lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvbm-peer-reader", daemon=True)

    def start(self) -> None:
        """Begin. Raises RuntimeError when no thread is to be had."""
        self._thread.start()

    def stop(self) -> None:
        """End soon."""
        self._stopping = True
        self._wake()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def describe(self) -> dict[str, object]:
        """For operators."""
        return {"host": self.host, "node": self.node, "asks": len(self._open_asks)}

    def post(self, message: Admitted | Refused | Part | Held) -> None:
        self._posted.append(message)
        self._wake()

    def _wake(self) -> None:
        with self._event_lock:
            if self._event >= 0:  # else its thread has ended
                os.eventfd_write(self._event, 1)

    # ---- its thread

    def _run(self) -> None:
        trouble = ""
        stream: Stream | None = None
        try:
            tune(self._connection)
            stream = self._secured()
            self._serve(stream)
        except (OSError, KvbmError) as error:
            trouble = one_line(error)
        except Exception as error:
            # A defect of ours costs one reader.
            log.exception("reader %s", self.host)
            trouble = one_line(error)
        finally:
            self._connection.close()
            if stream is not None:
                stream.close()
            self._lend.request(Leave(self))
            self._server.gone(self)
            with self._event_lock:
                event, self._event = self._event, -1
                os.close(event)
        level = logging.INFO if self._admitted else logging.WARNING
        if self.node == self._server.node:
            level = logging.DEBUG
        elif not self._admitted:
            self._server.counts["refused"] += 1
        log.log(level, "reader %s (%s): %s", self.host, self.node or "?", trouble)

    def _secured(self) -> Stream:
        """The connection behind its TLS handshake, if there is to be one. Raises OSError and KvbmError."""
        if self._server.tls is None:
            return Stream(self._connection)
        self._connection.settimeout(GREET_S)
        secured: ssl.SSLSocket = self._server.tls.wrap_socket(self._connection, server_side=True)
        self._connection = secured
        self.node = certified(secured, self._server.fleet).node
        return Stream(secured)

    def _serve(self, stream: Stream) -> None:
        """Until an exception ends it: OSError or KvbmError."""
        incoming: Incoming[FromReader] = Incoming(stream, from_reader)
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        fd = stream.connection.fileno()
        poller.register(fd, select.POLLIN)
        while not self._stopping:
            try:
                more = self._read(incoming) if not self._refusing else False
                self._take_posted()
            except _Refusing as refusal:
                self._refuse(str(refusal))
                more = False
            blocked = self._send(stream)
            if self._refusing and not blocked:
                raise LinkEnded("refused")
            seconds = 0.0 if more else self._next_due_s()
            listening = 0 if self._refusing else select.POLLIN
            poller.modify(fd, listening | (select.POLLOUT if blocked or stream.wants_write else 0))
            for ready, _ in poller.poll(seconds * 1000):
                if ready == self._event:
                    os.eventfd_read(self._event)
        raise LinkEnded("the manager ends")

    def _next_due_s(self) -> float:
        """Seconds until something is due. Raises LinkEnded when the reader's time, or a lease's, is over."""
        now_s = self._clock()
        quiet_s_max = QUIET_S_MAX if self._admitted else GREET_S
        if now_s - self._heard_s >= quiet_s_max:
            raise LinkEnded(f"nothing was heard for {quiet_s_max:.0f} s")
        if self._part_deadline_s is not None and now_s >= self._part_deadline_s:
            raise LinkEnded("it takes its blocks too slowly: their lease has ended")
        due_s = self._heard_s + quiet_s_max
        if self._tell_at_s is not None:
            if now_s >= self._tell_at_s:
                self._tell_at_s = None
                self._lend.request(TellMore(self))
            else:
                due_s = min(due_s, self._tell_at_s)
        if self._part_deadline_s is not None:
            due_s = min(due_s, self._part_deadline_s)
        if self._admitted:
            due_s = min(due_s, self._said_s + HEARTBEAT_S)
        return max(0.0, due_s - now_s)

    # ---- in

    def _read(self, incoming: Incoming[FromReader]) -> bool:
        """Take what has arrived. False when there is nothing left for now."""
        for _ in range(READS_AT_ONCE):
            message = incoming.next()
            if message is None:
                return False
            self._heard_s = self._clock()
            if isinstance(message, Greeting):
                self._greeted(message)
            elif not self._admitted:
                raise ProtocolError(f"{type(message).__name__} before it was let in")
            elif isinstance(message, Ask):
                self._asked(message)
            else:
                assert isinstance(message, Beat)
        return True

    def _greeted(self, greeting: Greeting) -> None:
        server = self._server
        if self._fingerprint:
            raise ProtocolError("a second Greeting")
        if greeting.version != WIRE_VERSION:
            raise _Refusing(f"version {greeting.version} of the wire is not spoken here, but {WIRE_VERSION}")
        if greeting.fleet != server.fleet:
            raise _Refusing(f"this is a node of the fleet {server.fleet!r}, not of {greeting.fleet!r}")
        if server.tls is not None and greeting.node != self.node:
            raise _Refusing(f"the certificate is of node {self.node!r}, not of {greeting.node!r}")
        self.node, self._fingerprint = greeting.node, greeting.fingerprint
        if greeting.node == server.node:
            # It reached itself, by a list that names all nodes: the answer tells it so.
            self._frames.append(self._welcome())
            return
        enter = Enter(
            self, greeting.fingerprint, greeting.slot_bytes, greeting.shard_count, greeting.known_max
        )
        self._lend.request(enter)

    def _welcome(self) -> bytes:
        return framed(Welcome(version=WIRE_VERSION, fleet=self._server.fleet, node=self._server.node))

    def _asked(self, ask: Ask) -> None:
        if len(ask.keys) % KEY_BYTES:
            raise ProtocolError(f"{len(ask.keys)} bytes are no whole number of keys")
        if ask.number in self._open_asks or len(self._open_asks) >= ASKS_MAX:
            raise ProtocolError(f"{len(self._open_asks)} asks are open, and one more comes: {ask.number}")
        self._open_asks.add(ask.number)
        self._lend.request(AskFor(self, ask.number, split_keys(ask.keys)))

    def _take_posted(self) -> None:
        while self._posted:
            message = self._posted.popleft()
            if isinstance(message, Admitted):
                self._admitted = True
                self._server.counts["readers"] += 1
                log.info("reader %s (%s): let in", self.host, self.node)
                self._frames.append(self._welcome())
            elif isinstance(message, Refused):
                raise _Refusing(message.line)
            elif isinstance(message, Part):
                self._parts.append(message)
            else:
                self._news_out = True
                self._frames.append(framed(message))

    def _refuse(self, line: str) -> None:
        """Say why, after what is half said; then `_serve` ends."""
        self._refusing = True
        self._parts.clear()
        self._frames.append(framed(Refusal(line=line)))
        log.log(logging.INFO, "reader %s (%s): refused: %s", self.host, self.node or "?", line)

    # ---- out

    def _send(self, stream: Stream) -> bool:
        """Send what there is. Whether bytes are left that the socket does not take now."""
        quiet = self._sending is None and not self._frames and not self._refusing
        if quiet and self._admitted and self._clock() - self._said_s >= HEARTBEAT_S:
            self._frames.append(framed(Held()))
        while True:
            if self._sending is None:
                self._sending = self._next_sending(stream)
                if self._sending is None:
                    return False
            if next(self._sending, self) is not self:
                return True
            self._sending = None

    def _next_sending(self, stream: Stream) -> Iterator[None] | None:
        if self._frames:
            frames = b"".join(self._frames)
            self._frames.clear()
            told, self._news_out = self._news_out, False
            return self._send_frames(stream, frames, told)
        if self._parts:
            return self._send_part(stream, self._parts.popleft())
        return None

    def _send_frames(self, stream: Stream, frames: bytes, told: bool) -> Iterator[None]:
        yield from self._send_all(stream, memoryview(frames))
        if told:
            self._tell_at_s = self._clock() + NEWS_EVERY_S

    def _send_part(self, stream: Stream, part: Part) -> Iterator[None]:
        """Send the blocks of a part and give its lease back. Yields when the socket takes no more."""
        self._part_deadline_s = part.deadline_s if part.lease else None
        for index, block in enumerate(part.blocks, part.first):
            if block is None:
                yield from self._send_all(stream, memoryview(framed(Lent(ask=part.ask, index=index))))
            else:
                yield from self._send_block(stream, part.ask, index, block)
        self._part_deadline_s = None
        if part.last:
            self._open_asks.discard(part.ask)
        if part.lease:
            self._lend.request(GiveBack(self, part.lease))

    def _send_block(self, stream: Stream, ask: int, index: int, block: LentBlock) -> Iterator[None]:
        size = sum(view.nbytes for view in block.views)
        head = Lent(
            ask=ask,
            index=index,
            there=True,
            size=size,
            engine_hash=block.engine_hash,
            group=block.group,
            facts=block.facts,
        )
        yield from self._send_all(stream, memoryview(framed(head)))
        checksum = begun_checksum(self._fingerprint, block.key)
        for view in block.views:
            yield from self._send_all(stream, view, checksum)
        counts = self._server.counts
        # The slot may have changed hands between the bytes' way out and their way into the checksum.
        if block.intact():
            counts["blocks"] += 1
            counts["bytes"] += size
            seal = bytes((WHOLE,)) + checksum.digest()
        else:
            counts["broken"] += 1
            seal = bytes((BROKEN,)) + bytes(CHECKSUM_BYTES)
        yield from self._send_all(stream, memoryview(seal))

    def _send_all(self, stream: Stream, data: memoryview, checksum: Digest | None = None) -> Iterator[None]:
        while data:
            count = stream.send(data[:SENT_AT_ONCE])
            if not count:
                yield
                continue
            self._said_s = self._clock()
            if checksum is not None:
                checksum.update(data[:count])
            data = data[count:]

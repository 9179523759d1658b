"""One client of the manager: its socket, its frames, and what it said it is."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

from kvbm.manager.leases import Owner
from kvbm.peers import peer_uid
from kvbm.protocol import FrameBuffer, Hello, Message, ToManager, decode_to_manager, encode

OUTGOING_BYTES_MAX = 32 << 20
_RECEIVE_BYTES = 1 << 20
_PEER_ENDED = (errno.EPIPE, errno.ECONNRESET)


class Session:
    """A connected client. `number` owns its leases and reservations; `hello` is None until it introduced itself.

    Sending never blocks: what the socket does not take waits in a bounded buffer, and a client that lets it run
    over is dropped (`closed` becomes True).

    `closed`: it is served no more. `ended_by_peer`: the other end has closed its socket, as a process that dies does.
    `lingering`: we ended it, and keep our end open only to see when the other end closes.
    """

    def __init__(self, connection: socket.socket, number: Owner) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.number = number
        self.hello: Hello | None = None
        self.closed = False
        self.ended_by_peer = False
        self.lingering = False
        self._frames = FrameBuffer()
        self._outgoing = bytearray()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing)

    @property
    def writes(self) -> bool:
        """It is a worker that was let in: it has our memory mapped and may be copying into it."""
        return self.hello is not None and self.hello.role == "worker"

    def peer_uid(self) -> int:
        """The user id of the process at the other end."""
        return peer_uid(self.connection)

    def receive(self) -> list[ToManager]:
        """The messages that arrived; `closed` becomes True when the client has gone or talks nonsense."""
        return [decode_to_manager(frame) for frame in self._frames.feed(self._take())]

    def discard(self) -> None:
        """Throw away what the client of a lingering session still says; notices when it closes its end."""
        self._take()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue one message and send what the socket takes. Descriptors go with the first byte."""
        if self.closed:
            return
        frame = encode(message)
        if fds:
            assert not self._outgoing, "descriptors travel with the first message"
            try:
                sent = socket.send_fds(self.connection, [frame], list(fds))
            except OSError as error:  # it went between its Hello and our answer
                self._broke(error)
                return
            frame = frame[sent:]
        self._outgoing += frame
        if len(self._outgoing) > OUTGOING_BYTES_MAX:
            self.closed = True
            return
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        while self._outgoing and not self.closed:
            try:
                sent = self.connection.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._broke(error)
                return
            del self._outgoing[:sent]

    def linger(self) -> None:
        """Say that we are done with it, and keep the descriptor: reading tells when the other end closes."""
        self.closed = self.lingering = True
        self._outgoing.clear()
        with contextlib.suppress(OSError):  # it went just now: the next read finds that
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.closed = True
        self.connection.close()

    def _take(self) -> bytes:
        """The bytes that arrived, if any."""
        try:
            data = self.connection.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as error:
            self._broke(error)
            return b""
        if not data:
            self.closed = self.ended_by_peer = True
        return data

    def _broke(self, error: OSError) -> None:
        """The socket failed. Only some failures mean that the other end has closed it."""
        self.closed = True
        self.ended_by_peer = self.ended_by_peer or error.errno in _PEER_ENDED

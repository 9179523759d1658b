"""One client of the manager: its socket, and its Hello."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections import deque
from collections.abc import Iterator, Sequence

from kvbm.admin_protocol import ToManager, decode_to_manager
from kvbm.framing import FramedSocket, encode
from kvbm.manager.leases import Owner
from kvbm.peers import peer_uid
from kvbm.protocol import Hello, Message, Refused

WAITS = object()
"""What the work for a message yields when it cannot go on yet, because another thread has to do its part first."""
_PEER_ENDED = (errno.EPIPE, errno.ECONNRESET)


class Session:
    """A connected client. `number` owns its leases and reservations; `hello` is None until it introduced itself.

    Sending never blocks: bytes that the socket does not take wait in a bounded buffer, and a client that lets it run
    over is dropped (`closed` becomes True).

    `closed`: it is served no more. `ended_by_peer`: the other end has closed its socket, as a process that dies does.
    `lingering`: we ended it, and keep our end open only to see when the other end closes.
    """

    def __init__(self, connection: socket.socket, number: Owner) -> None:
        self.connection = connection
        self.number = number
        self.hello: Hello | None = None
        self.closed = False
        self.ended_by_peer = False
        self.lingering = False
        self.work: Iterator[object] | None = None
        """What is left to do for the message that was taken last; the next one waits for that."""
        self.parked = False
        """The rest of the work waits for another thread."""
        self._wire = FramedSocket(connection)
        self._frames: deque[bytes] = deque()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._wire.outgoing)

    @property
    def writes(self) -> bool:
        """It is a worker that was let in: it has our memory mapped and may be copying into it."""
        return self.hello is not None and self.hello.role == "worker"

    def peer_uid(self) -> int:
        """The user id of the process at the other end."""
        return peer_uid(self.connection)

    @property
    def waiting(self) -> bool:
        """A message is being answered, or whole ones were read and not taken yet."""
        return self.work is not None or bool(self._frames)

    def advance(self) -> None:
        """Go on with the work for the message that was taken last."""
        if self.work is not None:
            step = next(self.work, self)
            self.parked = step is WAITS
            if step is self:
                self.work = None

    def take(self) -> ToManager | None:
        """The next message, or None. The socket is read only when no message waits, so that they wait in its buffers.

        `closed` becomes True when the client has gone. Raises ProtocolError.
        """
        if not self._frames:
            with self._noting_the_end():
                self._frames.extend(self._wire.receive())
        return decode_to_manager(self._frames.popleft()) if self._frames else None

    def refuse(self, reason: str) -> None:
        """Say why it is served no more, and take no more of its messages."""
        self.send(Refused(reason=reason))
        self.fail()

    def fail(self) -> None:
        """It is served no more; messages that wait are dropped."""
        self.closed = True
        self.work, self.parked = None, False
        self._frames.clear()

    def discard(self) -> None:
        """Drop the bytes that the client of a lingering session still sends; notices when it closes its end."""
        with self._noting_the_end():
            self._wire.read()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue one message and send as many bytes as the socket takes. Descriptors go with the first byte."""
        if not self.closed:
            with self._noting_the_end():
                self._wire.send(encode(message), fds)

    def flush(self) -> None:
        """Send as many of the bytes that wait as the socket takes."""
        if not self.closed:
            with self._noting_the_end():
                self._wire.flush()

    def linger(self) -> None:
        """Announce our end of the session, and keep the descriptor: a read finds out when the other end closes."""
        self.closed = self.lingering = True
        self._wire.outgoing.clear()
        with contextlib.suppress(OSError):  # it went just now: the next read finds that
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.closed = True
        self.connection.close()

    @contextlib.contextmanager
    def _noting_the_end(self) -> Iterator[None]:
        """A socket that fails is closed. Only some failures mean that the other end has closed it."""
        try:
            yield
        except OSError as error:
            self.closed = True
            self.ended_by_peer = self.ended_by_peer or error.errno in _PEER_ENDED
        if self._wire.ended:
            self.closed = self.ended_by_peer = True

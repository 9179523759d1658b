"""A client's end of a session with the manager: framed messages over a Unix socket, never blocking unless asked to."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvbm.errors import ManagerRefused, ManagerUnavailable, ManagerUntrusted, ProtocolError
from kvbm.framing import FramedSocket, encode
from kvbm.peers import accepted_users, is_trusted, peer_uid
from kvbm.protocol import FromManager, Hello, Message, Refused, Welcome
from kvbm.protocol_decoding import decode_from_manager
from kvbm.settings import variable

_SEND_BUFFER_BYTES = 1 << 20
_FDS_MAX = 4


def readable_among(fds: Iterable[int], timeout_s: float) -> list[int]:
    """Those of the descriptors that can be read, or whose other end has gone; waits for the first of them.

    Unlike `select.select` it takes any descriptor: an engine with a thousand open files has numbers above 1023.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000.0)]


class Channel:
    """One session. Not shared between threads.

    `send` and `receive` never wait. A broken connection raises ManagerUnavailable from either, once and for all.
    """

    def __init__(
        self,
        connection: socket.socket,
        decode: Callable[[bytes], FromManager] = decode_from_manager,
    ) -> None:
        """`decode` knows the messages that may come."""
        self._decode = decode
        self._wire = FramedSocket(connection, _FDS_MAX)
        self._incoming: deque[FromManager] = deque()

    @classmethod
    def connect(cls, socket_path: str, peer_uids: Iterable[int] = ()) -> Channel:
        """Connect at once or raise ManagerUnavailable.

        Raises ManagerUntrusted when another user listens there: not ourselves, not root, none of `peer_uids`.
        """
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # no descriptor left
            raise ManagerUnavailable(f"no connection to {socket_path}: {error.strerror}") from None
        # A lookup of thousands of keys should leave in one go, not wait half-way for its reader.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # A local connection is made at once or not at all; blocking, it would wait for a manager that is stopped.
        connection.setblocking(False)
        try:
            connection.connect(socket_path)
        except OSError as error:
            connection.close()
            raise ManagerUnavailable(f"no manager at {socket_path}: {error.strerror}") from None
        uid = peer_uid(connection)
        if not is_trusted(uid, peer_uids):
            connection.close()
            raise ManagerUntrusted(
                f"user {uid} listens at {socket_path}: accepted there are {accepted_users(peer_uids)} "
                f"(peer_uids, or {variable('peer_uids')}, lists others, for a socket that you name)"
            )
        return cls(connection)

    def fileno(self) -> int:
        return self._wire.connection.fileno()

    def send(self, message: Message) -> None:
        """Queue a message and send as many bytes as the socket takes."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """`send`, of a message that is encoded."""
        with _unavailable_on_error:
            self._wire.send(frame)

    def queue(self, message: Message) -> int:
        """Queue a message that leaves with the next `flush`, `send`, `receive` or `wait`. Returns how many bytes
        wait."""
        try:
            return self._wire.queue(encode(message))
        except OSError as error:
            raise _unavailable(error) from None

    def flush(self) -> None:
        """Send as many of the queued bytes as the socket takes."""
        with _unavailable_on_error:
            self._wire.flush()

    @property
    def queued_bytes(self) -> int:
        """Bytes that were queued and have not left."""
        return len(self._wire.outgoing)

    def take_fds(self) -> list[int]:
        """The file descriptors that came; the caller closes them."""
        fds, self._wire.fds = self._wire.fds, []
        return fds

    def receive(self) -> list[FromManager]:
        """The messages that have arrived; empty when there are none."""
        self.flush()
        self._read()
        messages = list(self._incoming)
        self._incoming.clear()
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Wait until something can be received, at most `timeout_s`; True when it can."""
        if self._incoming:
            return True
        deadline_s = time.monotonic() + timeout_s
        while self._wire.outgoing:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN | select.POLLOUT)
            events = poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000.0)
            if not events:
                return False
            if events[0][1] & ~select.POLLOUT:
                return True
            with _unavailable_on_error:
                self._wire.flush()
        return bool(readable_among([self.fileno()], deadline_s - time.monotonic()))

    def introduce(self, hello: Hello, timeout_s: float) -> Welcome:
        """Say hello and wait for the welcome. Raises ManagerRefused or ManagerUnavailable."""
        try:
            self.send(hello)
        except ManagerUnavailable:
            self._wire.outgoing.clear()  # it may have said why before it closed
        while self.wait(timeout_s):
            self._read()
            while self._incoming:
                message = self._incoming.popleft()
                if isinstance(message, Welcome):
                    return message
                if isinstance(message, Refused):
                    raise ManagerRefused(message.reason)
        raise ManagerUnavailable(f"the manager did not answer within {timeout_s:g} s")

    def close(self) -> None:
        """End the session; descriptors that were not taken are closed too."""
        with contextlib.suppress(OSError):  # it has gone already
            # A child that was forked meanwhile holds the socket open too: say to the other end that this is over.
            self._wire.connection.shutdown(socket.SHUT_RDWR)
        self._wire.connection.close()
        for fd in self.take_fds():
            os.close(fd)

    def _read(self) -> None:
        with _unavailable_on_error:
            self._incoming.extend(map(self._decode, self._wire.receive()))
        # Its last messages are delivered first: the next read finds the end again.
        if self._wire.ended and not self._incoming:
            raise ManagerUnavailable("the manager has gone: it closed the session")


def _unavailable(error: OSError) -> ManagerUnavailable:
    state = "takes no messages" if error.errno == errno.ENOBUFS else "has gone"
    return ManagerUnavailable(f"the manager {state}: {error.strerror}")


class _UnavailableOnError:
    """A socket that breaks, and bytes that are no message, end the session. A class: it is entered for each message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise _unavailable(error) from None
        if isinstance(error, ProtocolError):
            raise ManagerUnavailable(str(error)) from None


_unavailable_on_error = _UnavailableOnError()

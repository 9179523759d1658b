"""A client's end of a session with the manager: framed messages over a Unix socket, never blocking unless asked to."""

from __future__ import annotations

import select
import socket
from collections import deque

from kvbm.errors import ManagerRefused, ManagerUnavailable, ProtocolError
from kvbm.protocol import (
    FrameBuffer,
    FromManager,
    Hello,
    Message,
    Refused,
    Welcome,
    decode_from_manager,
    encode,
)

OUTGOING_BYTES_MAX = 32 << 20
_RECEIVE_BYTES = 1 << 20
_FDS_MAX = 4


class Channel:
    """One session. Not shared between threads.

    `send` and `receive` never wait. A broken connection raises ManagerUnavailable from either, once and for all.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._frames = FrameBuffer()
        self._outgoing = bytearray()
        self._incoming: deque[FromManager] = deque()
        self.fds: list[int] = []

    @classmethod
    def connect(cls, socket_path: str) -> Channel:
        """Connect at once or raise ManagerUnavailable."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(socket_path)
        except OSError as error:
            connection.close()
            raise ManagerUnavailable(f"no manager at {socket_path}: {error.strerror}") from None
        return cls(connection)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Queue a message and send what the socket takes."""
        self._outgoing += encode(message)
        if len(self._outgoing) > OUTGOING_BYTES_MAX:
            raise ManagerUnavailable(f"the manager takes no messages: {len(self._outgoing)} bytes wait")
        self._flush()

    def receive(self) -> list[FromManager]:
        """The messages that have arrived; empty when there are none."""
        if self._outgoing:
            self._flush()
        self._read()
        messages = list(self._incoming)
        self._incoming.clear()
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Wait until something can be received, at most `timeout_s`; True when it can."""
        if self._incoming:
            return True
        writers = [self._connection] if self._outgoing else []
        readable, writable, _ = select.select([self._connection], writers, [], timeout_s)
        if writable:
            self._flush()
        return bool(readable)

    def introduce(self, hello: Hello, timeout_s: float) -> Welcome:
        """Say hello and wait for the welcome. Raises ManagerRefused or ManagerUnavailable."""
        self.send(hello)
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
        self._connection.close()

    def _flush(self) -> None:
        while self._outgoing:
            try:
                sent = self._connection.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ManagerUnavailable(f"the manager has gone: {error.strerror}") from None
            del self._outgoing[:sent]

    def _read(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._connection, _RECEIVE_BYTES, _FDS_MAX)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ManagerUnavailable(f"the manager has gone: {error.strerror}") from None
            self.fds += fds
            if not data:
                if self._incoming:
                    return  # deliver what it said last; the next read finds the end again
                raise ManagerUnavailable("the manager has gone: it closed the session")
            try:
                self._incoming.extend(decode_from_manager(frame) for frame in self._frames.feed(data))
            except ProtocolError as error:
                raise ManagerUnavailable(str(error)) from None
            if len(data) < _RECEIVE_BYTES:
                return

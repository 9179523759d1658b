"""Carries the bytes of one session between a Unix socket and a connection to another node, in a thread of its own.

Neither end of the session knows of it: a leader's thread and a manager's loop have a local socket, and no handshake,
lost packet or slow network is theirs to wait for.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl

BUFFERED_BYTES_MAX = 1 << 20
"""In each direction; no more is read until the other end has taken some."""
_READ_BYTES = 1 << 18
_SILENCE_S = 10
_ENDINGS = (OSError, ssl.SSLError)


def keep_watch(connection: socket.socket) -> None:
    """A node that vanishes without a word ends the connection after about ten seconds, idle or not."""
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000),
    )
    for level, name, value in options:
        connection.setsockopt(level, name, value)


class Pump:
    """`run` carries until one end closes, then closes both. `stop` ends it, from any thread."""

    def __init__(self, local: socket.socket, far: socket.socket) -> None:
        """`far` is connected, its handshake done; it may be TLS."""
        self._ends = (local, far)
        for end in self._ends:
            end.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = [True, True]
        # What was read from each end, for the other.
        self._read = [bytearray(), bytearray()]

    def stop(self) -> None:
        """End it soon."""
        with contextlib.suppress(OSError):  # it has ended
            os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Carry the bytes. Returns when the session is over."""
        try:
            while self._carry():
                pass
        except _ENDINGS:
            pass
        finally:
            for end in self._ends:
                with contextlib.suppress(OSError):  # the other end has closed it
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            wake, self._wake = self._wake, -1
            os.close(wake)

    def _carry(self) -> bool:
        moved = any([self._take(0), self._take(1), self._give(0), self._give(1)])
        if not all(self._open) and not any(self._read[end] for end in (0, 1) if not self._open[end]):
            return False  # one has closed, and all that it said has been passed on
        return moved or self._wait()

    def _take(self, end: int) -> bool:
        """Read from one end what there is room for. Whether that was anything."""
        if not self._open[end] or len(self._read[end]) >= BUFFERED_BYTES_MAX:
            return False
        try:
            data = self._ends[end].recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        self._open[end] = bool(data)
        self._read[end] += data
        return True

    def _give(self, end: int) -> bool:
        """Pass on what the other end said. Whether any of it was taken."""
        said = self._read[1 - end]
        if not said:
            return False
        try:
            sent = self._ends[end].send(said)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        del said[:sent]
        return sent > 0

    def _wait(self) -> bool:
        """Wait until something can be done. False when it is to end."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for number, end in enumerate(self._ends):
            room = self._open[number] and len(self._read[number]) < BUFFERED_BYTES_MAX
            events = (select.POLLIN if room else 0) | (select.POLLOUT if self._read[1 - number] else 0)
            if events:
                poller.register(end, events)
        return self._wake not in dict(poller.poll())

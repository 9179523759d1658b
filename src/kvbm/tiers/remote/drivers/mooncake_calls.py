"""A node's side of its Mooncake process: questions with a deadline, and the process kept running while it is needed.

The process is started by the first question, and again by a later one after it has ended, at most once in
`RESTART_S`. Who asks waits no longer than the deadline; the connection is then closed, and the call goes on in the
process without anybody. When as many calls in a row as there are connections were given up, the process is killed.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from kvbm.clock import Clock
from kvbm.settings import process_environment
from kvbm.tiers.own_process import program_of
from kvbm.tiers.remote.blobs import Buffer, StoreError
from kvbm.tiers.remote.drivers.mooncake_wire import (
    CONNECTIONS,
    Answer,
    Ask,
    Ended,
    Setup,
    frame,
    receive,
)

RESTART_S = 2.0
_PROGRAM = program_of("kvbm.tiers.remote.drivers.mooncake_process")


class _Process:
    """One run of the process, and the connections to it that nobody uses."""

    def __init__(self, setup: Setup) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            # A session of its own: an interrupt of the node's terminal is the node's to handle.
            self._child = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # Else it writes a line for everything that it does.
                env={"MC_LOG_LEVEL": "ERROR", **process_environment()},
                start_new_session=True,
            )
        self.control.sendall(frame(setup))
        self.free: list[socket.socket] = []
        self._said = ""

    def ended(self, wait_s: float = 0.0) -> str | None:
        """Why it has ended; None while it runs."""
        try:
            status = self._child.wait(wait_s) if wait_s else self._child.poll()
        except subprocess.TimeoutExpired:
            return None
        if status is None:
            return None
        try:
            # Several threads may ask: the first one gets the line, the others soon see it.
            self.control.settimeout(0.0)
            self._said = receive(self.control, Ended).line
        except (OSError, EOFError, msgspec.MsgspecError):
            pass
        how = f"killed by signal {-status}" if status < 0 else f"with status {status}"
        return self._said or f"its Mooncake process ended, {how}"

    def connect(self) -> socket.socket:
        """A new connection. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [b"c"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def end(self) -> None:
        """At once: who asks now gets an error."""
        self._child.kill()
        self._child.wait()
        self.control.close()
        for connection in self.free:
            connection.close()
        self.free.clear()


class MooncakeCalls:
    """Thread-safe. `place` is for people."""

    def __init__(self, setup: Setup, place: str, deadline_s: float, clock: Clock) -> None:
        self._setup = setup
        self._place = place
        self._deadline_s = deadline_s
        self._clock = clock
        self._turn = threading.Condition()
        self._process: _Process | None = None
        self._started_s: float | None = None
        self._why = ""
        self._asking = 0
        self._given_up = 0
        """So many in a row."""
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process that runs."""
        process = self._process
        return None if process is None else process._child.pid

    def ask(self, ask: Ask, parts: Sequence[Buffer] = ()) -> tuple[Answer, memoryview]:
        """The answer, and the bytes that came with it. Raises StoreError `slow` after the deadline, `unreachable`."""
        end_s = time.monotonic() + self._deadline_s
        with self._turn:
            if not self._turn.wait_for(lambda: self._asking < CONNECTIONS, self._deadline_s):
                raise StoreError("slow", f"{self._place}: {CONNECTIONS} calls wait for it already")
            process, connection = self._connection()
            self._asking += 1
        kept = False
        try:
            answer, data = _asked(connection, ask, parts, end_s)
            kept = True
            return answer, data
        except TimeoutError:
            self._late(process)
            raise StoreError("slow", f"{self._place} did not answer within {self._deadline_s:g} s") from None
        except (OSError, EOFError):
            why = process.ended(wait_s=0.5) or "its Mooncake process has too much to do"
            raise StoreError("unreachable", f"{self._place}: {why}") from None
        finally:
            self._let_go(process, connection, kept)

    def close(self) -> None:
        """End the process."""
        with self._turn:
            self._closed = True
            self._end()

    def _connection(self) -> tuple[_Process, socket.socket]:
        """With the lock held."""
        if self._closed:
            raise StoreError("unreachable", f"{self._place} was closed")
        try:
            process = self._running()
            return process, process.free.pop() if process.free else process.connect()
        except OSError as error:
            raise StoreError(
                "unreachable", f"{self._place}: no Mooncake process ({error.strerror})"
            ) from None

    def _running(self) -> _Process:
        if self._process is not None and (why := self._process.ended()) is not None:
            self._why = why
            self._end()
        if self._process is None:
            now_s = self._clock()
            if self._started_s is not None and now_s - self._started_s < RESTART_S:
                raise StoreError("unreachable", f"{self._place}: {self._why}")
            self._started_s, self._given_up = now_s, 0
            self._process = _Process(self._setup)
        return self._process

    def _let_go(self, process: _Process, connection: socket.socket, kept: bool) -> None:
        with self._turn:
            self._asking -= 1
            self._turn.notify()
            if kept:
                self._given_up = 0
            if kept and process is self._process:
                process.free.append(connection)
            else:
                connection.close()

    def _late(self, process: _Process) -> None:
        with self._turn:
            if process is self._process:
                self._given_up += 1
                if self._given_up >= CONNECTIONS:
                    self._why = f"{CONNECTIONS} calls in a row got no answer"
                    self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def _asked(
    connection: socket.socket, ask: Ask, parts: Sequence[Buffer], end_s: float
) -> tuple[Answer, memoryview]:
    """Raises TimeoutError, OSError, EOFError. The kernel's time-outs are each system call's, so they are set anew."""
    for data in (frame(ask), *parts):
        left = memoryview(data).cast("B")
        while len(left):
            _set_timeout(connection, end_s)
            left = left[connection.send(left) :]
    _set_timeout(connection, end_s)
    answer = receive(connection, Answer)
    into = memoryview(bytearray(answer.size))
    rest = into
    while len(rest):
        _set_timeout(connection, end_s)
        count = connection.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return answer, into


def _set_timeout(connection: socket.socket, end_s: float) -> None:
    left_s = end_s - time.monotonic()
    if left_s <= 0.0:
        raise TimeoutError
    connection.settimeout(left_s)

"""A manager's mover (`mover_process`), kept running by a thread, and the way to it for the threads of connections.

Whoever wants memory known to it calls `open`, and gets a channel that never waits. A mover that ends, or says nothing
for a while, costs its channels: their ends see that, and blocks travel over the connections themselves until there is
another mover.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvbm.settings import process_environment
from kvbm.tiers.own_process import program_of
from kvbm.tiers.peers.mover_wire import (
    PACKET_BYTES_MAX,
    Channel,
    Failed,
    Open,
    Ping,
    Ready,
    from_mover,
    packet,
)
from kvbm.tiers.peers.staging import Staging

log = logging.getLogger("kvbm.tiers")

WRITE_S = 1.0
"""A block that has not arrived at the other node by then travels over the connection instead."""
START_S = 60.0
PING_S = 5.0
GONE_S = 15.0
END_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 120.0
"""A mover that ran so long makes up for those that ended before it."""

_PROGRAM = program_of("kvbm.tiers.peers.mover_process")
_RDMA_DEVICES = "/sys/class/infiniband"


class Child(Protocol):
    """A process that runs, as `subprocess.Popen` has it."""

    def kill(self) -> None:
        """End it now."""

    def wait(self) -> int:
        """Its status, once it has ended; the number of the signal that ended it, less than 0."""


def rdma_devices() -> list[str]:
    """The RDMA devices of this machine."""
    try:
        return sorted(os.listdir(_RDMA_DEVICES))
    except OSError:
        return []


def start_process(control: socket.socket) -> Child:
    """A mover with this control socket. Raises OSError."""
    # Reasons come as exceptions, so neither library needs to write lines of its own. Where there is RDMA nobody shall
    # reach the process over TCP. What the operator says for the libraries counts.
    quiet = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    only_rdma = {"UCX_TLS": "^tcp"} if rdma_devices() else {}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=control.fileno(),
        stdout=subprocess.DEVNULL,
        env={**quiet, **only_rdma, **process_environment()},
        start_new_session=True,
    )


class Mover:
    """See the module. Thread-safe. `trouble` is empty while it runs, else one line."""

    def __init__(
        self, start: Callable[[socket.socket], Child] = start_process, write_limit_s: float = WRITE_S
    ) -> None:
        self.write_limit_s = write_limit_s
        self.trouble = "it is starting"
        self.starts = 0
        """Of movers that ran: a channel belongs to one of them."""
        self._start = start
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self.child: Child | None = None
        self._closing = threading.Event()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The kernel ends the child with the thread that started it: this one lives as long.
        self._thread = threading.Thread(target=self._run, name="kvbm-mover", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether `open` has somebody to ask."""
        return self._control is not None

    def open(self, staging: Staging, lands: bool) -> Channel:
        """Make memory known. `Mapped` or `Unmapped` comes first on the channel. Raises OSError where none runs."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with theirs, self._lock:
                    if self._control is None:
                        raise OSError("no mover runs")
                    message = packet(Open(size=staging.size, lands=lands))
                    socket.send_fds(self._control, [message], [theirs.fileno(), staging.fd])
            except OSError:
                ours.close()
                raise
        finally:
            staging.forget_fd()
        return Channel(ours)

    def close(self) -> None:
        """End it."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.eventfd_write(self._event, 1)
        self._thread.join(END_S)
        if not self._thread.is_alive():  # else the kernel does not let the child go yet
            os.close(self._event)

    # ---- the thread

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            began_s, starts = time.monotonic(), self.starts
            try:
                line, for_good = self._keep()
            except OSError as error:
                line, for_good = f"no process is to be had ({error.strerror or error})", False
            if self._closing.is_set():
                break
            if line != self.trouble or self.starts != starts:
                log.warning("NIXL moves no blocks between nodes, they travel over TCP: %s", line)
            self.trouble = line
            if for_good:
                break
            if time.monotonic() - began_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _keep(self) -> tuple[str, bool]:
        """Start a mover and stay with it until it ends: why, and whether another would fare no better."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)  # nobody waits for a mover that takes no more
        with control:
            with theirs:
                self.child = child = self._start(theirs)
            try:
                line, for_good = self._stay(control)
            finally:
                with self._lock:
                    self._control = None
                with contextlib.suppress(OSError):  # the mover has ended already
                    control.shutdown(socket.SHUT_RDWR)
                child.kill()
                status = child.wait()
        how = f"killed by signal {-status}" if status < 0 else f"with status {status}"
        return line or f"its process ended, {how}", for_good

    def _stay(self, control: socket.socket) -> tuple[str, bool]:
        poller = select.poll()
        poller.register(control, select.POLLIN)
        poller.register(self._event, select.POLLIN)
        heard_s = time.monotonic()
        while not self._closing.is_set():
            ready = dict(poller.poll(PING_S * 1000))
            now_s = time.monotonic()
            if control.fileno() in ready:
                try:
                    data = control.recv(PACKET_BYTES_MAX)
                except OSError:
                    data = b""
                if not data:
                    return "", False
                heard_s = now_s
                try:
                    message = from_mover.decode(data)
                except msgspec.MsgspecError as error:
                    return f"its process says what is no message ({error})", False
                if isinstance(message, Failed):
                    return message.line, True
                if isinstance(message, Ready):
                    self._is_ready(control)
            elif not ready:
                if now_s - heard_s >= (GONE_S if self.running else START_S):
                    return f"its process said nothing for {now_s - heard_s:.0f} s", False
                with contextlib.suppress(OSError):  # it has ended or takes no more: found above
                    control.send(packet(Ping()))
        return "it was ended", False

    def _is_ready(self, control: socket.socket) -> None:
        log.info("NIXL moves blocks between nodes")
        self.trouble = ""
        with self._lock:
            self.starts += 1
            self._control = control

"""The mover: a manager's child that has NIXL, and nothing else of the manager's than memory for blocks under way.

One thread. It answers on its sockets, looks after transfers that are under way, and lets others write to memory for
which somebody waits. Between two looks at which nothing happened it sleeps a moment, longer after a while. With its
control socket, or with the manager, it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvbm.tiers.nixl.network import NetworkAgent, UcxAgent
from kvbm.tiers.peers.mover_wire import (
    PACKET_BYTES_MAX,
    Expect,
    Failed,
    Mapped,
    Open,
    Ping,
    Pong,
    Reach,
    Reached,
    Ready,
    ToMover,
    Unmapped,
    Write,
    Written,
    packet,
    to_mover,
)
from kvbm.tiers.peers.wire import one_line

CHANNELS_MAX = 256
LANDING_FDS = 16
"""Descriptors of memory that others write to: 13 were counted, for its channel and for an agent of its own."""
OTHER_FDS = 384
"""Kept free for channels without an agent, and for what the process has besides."""
FDS_WANTED = 1 << 16
"""No more than that: some libraries go through all numbers that a descriptor may have."""
STUCK_CHANNELS_MAX = 16
"""So many channels with transfers that do not end: the mover ends instead, and all of them with it. One reader that
hangs has one channel, however many transfers were under way to it; each holds its memory until they end."""
_SOON_S = 0.00005
_LATER_S = 0.001
_SOON_FOR_S = 0.02
_STUCK_LOOK_S = 1.0
_PR_SET_PDEATHSIG = 1

MakeAgent = Callable[[str], NetworkAgent]


@dataclass(slots=True, eq=False)
class _Transfer:
    number: int
    handle: object
    end_s: float


class _Memory:
    """One channel, with its memory and what is under way from it. All methods raise OSError."""

    def __init__(self, connection: socket.socket, fd: int, opened: Open, agent: NetworkAgent) -> None:
        self.connection, self.agent, self.lands = connection, agent, opened.lands
        self.expecting = False
        self.transfers: list[_Transfer] = []
        self.stuck: list[object] = []
        self.size = opened.size
        self._peer = ""
        self._map = mmap.mmap(fd, opened.size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._registration = agent.register(self._address, opened.size)

    def mapped(self) -> Mapped:
        metadata = self.agent.metadata(self._registration) if self.lands else b""
        return Mapped(address=self._address, metadata=metadata)

    def reach(self, metadata: bytes) -> None:
        self._peer = self.agent.meet(metadata)

    def begin(self, write: Write) -> None:
        spans = [(self._address + offset, there, size) for offset, there, size in write.spans]
        if any(offset < 0 or offset + size > self.size for offset, _, size in write.spans):
            raise OSError("a piece beyond the memory")
        handle = self.agent.begin(spans, self._peer)
        self.transfers.append(_Transfer(write.number, handle, time.monotonic() + write.limit_s))

    def look(self, now_s: float) -> list[Written]:
        """The transfers that have ended since the last look."""
        ended: list[Written] = []
        for transfer in list(self.transfers):
            try:
                if self.agent.ended(transfer.handle):
                    ended.append(Written(number=transfer.number))
                elif now_s >= transfer.end_s:
                    self.stuck.append(transfer.handle)
                    ended.append(Written(number=transfer.number, line="it took too long"))
                else:
                    continue
            except OSError as error:
                ended.append(Written(number=transfer.number, line=one_line(error)))
            self.transfers.remove(transfer)
        return ended

    def look_at_stuck(self) -> None:
        for handle in list(self.stuck):
            try:
                if not self.agent.ended(handle):
                    continue
            except OSError:  # it has ended in its own way
                pass
            self.stuck.remove(handle)

    def let_go(self) -> None:
        """Nothing is under way."""
        self.connection.close()
        if self._peer:
            with contextlib.suppress(OSError):  # it was forgotten with another channel
                self.agent.forget(self._peer)
        self.agent.deregister(self._registration)
        if self.lands:
            self.agent.close()


class MoverLoop:
    """See the module."""

    def __init__(self, control: socket.socket, make_agent: MakeAgent) -> None:
        self._control, self._make_agent = control, make_agent
        self._memories: dict[int, _Memory] = {}
        self._leaving: list[_Memory] = []
        self._landings_max = landings_within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._active_s = self._stuck_look_s = 0.0
        self._poller = select.epoll()
        self._poller.register(control, select.EPOLLIN)

    def run(self) -> None:
        """Until the control socket ends, or too much is stuck."""
        try:
            sender = self._make_agent(_name())
        except OSError as error:
            self._control.send(packet(Failed(line=one_line(error))))
            return
        self._sender = sender
        self._control.send(packet(Ready()))
        with self._poller:
            while sum(bool(each.stuck) for each in self._all()) < STUCK_CHANNELS_MAX:
                for fd, _ in self._poller.poll(self._rest_s()):
                    if fd != self._control.fileno():
                        self._hear(fd)
                    elif not self._told():
                        return
                self._look()

    def _all(self) -> list[_Memory]:
        return [*self._memories.values(), *self._leaving]

    def _rest_s(self) -> float | None:
        """How long to wait for words; sleeps a moment itself where something is under way."""
        memories = self._all()
        if not any(each.expecting or each.transfers for each in memories):
            return _STUCK_LOOK_S if any(each.stuck for each in memories) else None
        idle_s = time.monotonic() - self._active_s
        time.sleep(_SOON_S if idle_s < _SOON_FOR_S else _LATER_S)
        return 0.0

    # ---- words

    def _told(self) -> bool:
        """Take one message of the manager's. False when it has gone."""
        data, fds, _, _ = socket.recv_fds(self._control, PACKET_BYTES_MAX, 2)
        if not data:
            return False
        message = to_mover.decode(data)
        if isinstance(message, Ping):
            self._control.send(packet(Pong()))
        elif isinstance(message, Open):
            self._opened(fds, message)
            # An agent takes a while to make: who asked for many shall not find the process silent.
            self._control.send(packet(Pong()))
        return True

    def _opened(self, fds: list[int], message: Open) -> None:
        """The descriptors are those that arrived: fewer than were sent where this process can have no more."""
        if not fds:
            return  # the channel has closed with it
        connection = socket.socket(fileno=fds[0])
        try:
            if len(fds) < 2:
                raise OSError("the process has no descriptor left")
            self._open(connection, fds[1], message)
        except OSError as error:
            with contextlib.suppress(OSError):  # the other end has gone
                connection.send(packet(Unmapped(line=one_line(error))))
            connection.close()
        finally:
            for fd in fds[1:]:
                os.close(fd)

    def _open(self, connection: socket.socket, fd: int, message: Open) -> None:
        if len(self._all()) >= CHANNELS_MAX:
            raise OSError(f"{CHANNELS_MAX} pieces of memory are open")
        if message.lands and sum(each.lands for each in self._all()) >= self._landings_max:
            raise OSError(f"others write to {self._landings_max} pieces of memory: no descriptors for more")
        agent = self._make_agent(_name()) if message.lands else self._sender
        try:
            memory = _Memory(connection, fd, message, agent)
        except OSError:
            if message.lands:
                agent.close()
            raise
        try:
            connection.setblocking(False)
            connection.send(packet(memory.mapped()))
        except OSError:  # nobody waits for it any more
            memory.let_go()
            raise
        self._memories[connection.fileno()] = memory
        self._poller.register(connection, select.EPOLLIN)

    def _hear(self, fd: int) -> None:
        """Take one message of a channel."""
        memory = self._memories[fd]
        try:
            data = memory.connection.recv(PACKET_BYTES_MAX)
            if not data:
                raise OSError("closed")
            self._do(memory, to_mover.decode(data))
        except (OSError, msgspec.MsgspecError):
            self._end(fd)

    def _do(self, memory: _Memory, message: ToMover) -> None:
        self._active_s = time.monotonic()
        if isinstance(message, Reach):
            try:
                memory.reach(message.metadata)
            except OSError as error:
                memory.connection.send(packet(Unmapped(line=one_line(error))))
                raise
            memory.connection.send(packet(Reached()))
        elif isinstance(message, Write):
            try:
                memory.begin(message)
            except OSError as error:
                memory.connection.send(packet(Written(number=message.number, line=one_line(error))))
        elif isinstance(message, Expect):
            memory.expecting = message.on

    def _end(self, fd: int) -> None:
        """The manager is done with this memory; it goes when nothing is under way from it."""
        memory = self._memories.pop(fd)
        self._poller.unregister(fd)
        memory.expecting = False
        self._leaving.append(memory)

    # ---- bytes

    def _look(self) -> None:
        now_s = time.monotonic()
        for fd, memory in list(self._memories.items()):
            try:
                ended = memory.look(now_s) if memory.transfers else []
                if memory.expecting:
                    memory.agent.progress()
                for each in ended:
                    self._active_s = now_s
                    memory.connection.send(packet(each))
            except OSError:
                self._end(fd)
        if now_s - self._stuck_look_s >= _STUCK_LOOK_S:
            self._stuck_look_s = now_s
            for memory in self._all():
                memory.look_at_stuck()
        for memory in list(self._leaving):
            memory.look(now_s)
            if not memory.transfers and not memory.stuck:
                self._leaving.remove(memory)
                with contextlib.suppress(OSError):  # the other node's mover has gone before
                    memory.let_go()


def _name() -> str:
    """A name that no other agent of the fleet has."""
    return f"kvbm-{secrets.token_hex(8)}"


def landings_within(fds: int) -> int:
    """How many pieces of memory others may write to, in a process that may have so many descriptors."""
    if fds == resource.RLIM_INFINITY:
        return CHANNELS_MAX
    return max(1, min(CHANNELS_MAX, (fds - OTHER_FDS) // LANDING_FDS))


def _raise_fd_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FDS_WANTED if hard == resource.RLIM_INFINITY else min(FDS_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then there is room for fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Serve the manager at the other end of the standard input."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _raise_fd_limit()
    status = 1
    try:
        MoverLoop(socket.socket(fileno=os.dup(0)), UcxAgent).run()
        status = 0
    except OSError:
        pass  # the manager has gone
    finally:
        # Not by Python's own way out: see `kvbm.tiers.nixl.network`.
        os._exit(status)


if __name__ == "__main__":
    main()

"""Publishes a manager's KV events over ZMQ, as vLLM's publisher does, from a thread of its own.

Two sockets: subscribers hear everything on the one (frames: topic, number, payload), and ask on the other for what they
missed. The manager's thread hands over messages through a short queue. While it is full, what there is to tell waits in
the manager as marks of slots.

| who is slow | what happens |
| --- | --- |
| one subscriber, briefly | all wait for it, up to `PATIENCE_S` |
| one subscriber, for longer | it loses messages for `LOSSY_S`, which it sees by their numbers; the others go on |
| one who asks for a replay | its replies wait in the thread, up to `REPLAY_S` |
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import zmq

from kvbm.clock import Clock
from kvbm.errors import SettingsError
from kvbm.events.tier_form import tier_fields
from kvbm.events.wire import SEQUENCE_BYTES, cleared_fields, encode
from kvbm.protocol import TierEvents
from kvbm.settings import variable
from kvbm.strict import record_swallowed
from kvbm.unix_sockets import clear_socket_path, refuse_socket_path

log = logging.getLogger("kvbm.manager")

QUEUE_MAX = 32
"""Messages that wait for the thread."""
WAITING_MAX = 1000
"""Messages that wait for one subscriber, at each end of its connection."""
KEPT_MAX, KEPT_BYTES_MAX = 10_000, 64 << 20
"""What can be asked for again."""
PATIENCE_S, LOSSY_S = 1.0, 10.0
REPLAYS_MAX, REPLAY_S, REPLIES_AT_ONCE = 16, 10.0, 64
TOPICS_MAX = 64
"""Subscriptions that the manager has yet to notice; more are taken for one to everything."""
RETRY_MS = 5
REQUEST_BYTES_MAX = 4096
LINGER_MS = 500
IPC = "ipc://"
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


class Kept(NamedTuple):
    """A message as it was published."""

    number: int
    topic: bytes
    payload: bytes

    @property
    def frames(self) -> tuple[bytes, bytes, bytes]:
        """As a subscriber receives it."""
        return self.topic, self.number.to_bytes(SEQUENCE_BYTES, "big"), self.payload


@dataclass
class _Replay:
    """One who asked: the messages from `following` up to `end`, and one that says that there are no more."""

    who: bytes
    following: int
    end: int
    until_s: float


class EventPublisher:
    """The manager's end is `publish`, `room`, `take_subscribed` and the descriptor, for one thread; `start` and `close`
    begin and end the other one, which alone uses the sockets. `wall_s` is seconds since 1970.

    Raises SettingsError where it cannot listen.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None, clock: Clock, wall_s: Clock) -> None:
        self._clock, self._wall_s = clock, wall_s
        self._context: zmq.Context[Any] = zmq.Context()
        self._replies: zmq.Socket[Any] | None = None
        try:
            self._output = self._listen(zmq.XPUB, "events_endpoint", endpoint)
            if replay_endpoint is not None:
                self._replies = self._listen(zmq.ROUTER, "events_replay_endpoint", replay_endpoint)
        except SettingsError:
            self._context.destroy(0)
            raise
        self.endpoint, self.replay_endpoint = _bound(self._output), _bound(self._replies)
        self._wake, self._woken = _new_event(), _new_event()
        self._poller = zmq.Poller()
        for each in (self._output, self._replies, self._wake):
            if each is not None:
                self._poller.register(each, zmq.POLLIN)
        # Shared with the manager's thread, by single operations on a deque or a flag.
        self._queue: deque[tuple[bytes, TierEvents, bool]] = deque()
        self._subscribed: deque[bytes] = deque(maxlen=TOPICS_MAX)
        self._overrun = self._closing = self._failed = False
        # The thread's own.
        self._pending: Kept | None = None
        self._number = 0
        self._kept: deque[Kept] = deque()
        self._kept_bytes = 0
        self._replays: list[_Replay] = []
        self._full_since_s: float | None = None
        self._lossy_until_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="kvbm-events", daemon=True)

    # ---- the manager's thread

    def start(self) -> None:
        """Serve subscribers from now on."""
        self._thread.start()

    @property
    def room(self) -> bool:
        """Whether a message can be taken now. After False, the descriptor says when that may be so again."""
        return len(self._queue) < QUEUE_MAX and not self._failed

    def publish(self, topic: bytes, told: TierEvents, cleared: bool = False) -> None:
        """Hand over a message; `cleared`: subscribers of this topic forget what they know of it before. Only where
        there is room."""
        assert len(self._queue) < QUEUE_MAX
        self._queue.append((topic, told, cleared))
        os.eventfd_write(self._wake, 1)

    def fileno(self) -> int:
        """Readable when somebody has subscribed, or when there is room again."""
        return self._woken

    def take_subscribed(self) -> list[bytes]:
        """The topics that somebody has subscribed to since the last call; one stands for all that begin with it."""
        with contextlib.suppress(BlockingIOError):  # nothing was signalled
            os.eventfd_read(self._woken)
        taken = list[bytes]()
        while self._subscribed:
            taken.append(self._subscribed.popleft())
        if self._overrun:
            self._overrun = False
            taken.append(b"")
        return taken

    def close(self) -> None:
        """Publish what was handed over, as far as subscribers take it, and hang up."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        for socket in (self._output, self._replies):
            if socket is not None:
                socket.close(LINGER_MS)
        self._context.term()
        os.close(self._wake)
        os.close(self._woken)

    # ---- its own thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._lossy()
            while self._queue or self._pending is not None:
                self._send()
        except Exception as error:
            # A defect of ours costs events, never the cache.
            record_swallowed(error)
            self._failed = True
            log.exception("no KV events are published any more")

    def _turn(self) -> None:
        stalled = self._pending is not None or bool(self._replays)
        ready = dict(self._poller.poll(RETRY_MS if stalled else None))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        self._hear_subscribers()
        if self._replies is not None and self._replies in ready:
            self._hear_requests(self._replies)
        while self._queue or self._pending is not None:
            if not self._send():
                break
            self._hear_subscribers()
        for replay in list(self._replays):
            self._reply(replay)

    def _hear_subscribers(self) -> None:
        while _readable(self._output):
            frame = self._output.recv(zmq.NOBLOCK)
            if frame[:1] == b"\1":
                self._overrun = self._overrun or len(self._subscribed) == TOPICS_MAX
                self._subscribed.append(frame[1:])
                os.eventfd_write(self._woken, 1)

    def _send(self) -> bool:
        """Publish the next message; False where a subscriber has no room for it."""
        if self._pending is None:
            topic, told, cleared = self._queue.popleft()
            if len(self._queue) == QUEUE_MAX // 2:
                os.eventfd_write(self._woken, 1)
            events = [cleared_fields()] * cleared + tier_fields(told)
            self._pending = Kept(self._number, topic, encode(self._wall_s(), events))
        self._mind_the_slow()
        try:
            self._output.send_multipart(self._pending.frames, zmq.NOBLOCK)
        except zmq.Again:
            self._full_since_s = self._clock() if self._full_since_s is None else self._full_since_s
            return False
        self._full_since_s = None
        self._keep(self._pending)
        self._number, self._pending = self._number + 1, None
        return True

    def _mind_the_slow(self) -> None:
        """Wait for the slowest, or do not."""
        now_s = self._clock()
        if self._lossy_until_s is not None and now_s >= self._lossy_until_s:
            self._lossy_until_s = None
            self._output.setsockopt(zmq.XPUB_NODROP, 1)
        elif self._full_since_s is not None and now_s - self._full_since_s >= PATIENCE_S:
            log.warning(
                "a subscriber of KV events has read nothing for %g s: it loses some, from number %d on",
                PATIENCE_S,
                self._number,
            )
            self._lossy()

    def _lossy(self) -> None:
        self._full_since_s, self._lossy_until_s = None, self._clock() + LOSSY_S
        self._output.setsockopt(zmq.XPUB_NODROP, 0)

    def _keep(self, message: Kept) -> None:
        if self._replies is None:
            return
        self._kept.append(message)
        self._kept_bytes += len(message.payload)
        while len(self._kept) > KEPT_MAX or self._kept_bytes > KEPT_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft().payload)

    def _hear_requests(self, replies: zmq.Socket[Any]) -> None:
        while _readable(replies):
            frames = replies.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES or len(self._replays) == REPLAYS_MAX:
                continue  # it asks again, or is none of ours
            start = int.from_bytes(frames[2], "big")
            self._replays.append(_Replay(frames[0], start, self._number, self._clock() + REPLAY_S))

    def _reply(self, replay: _Replay) -> None:
        """Send some of what was asked for."""
        assert self._replies is not None
        try:
            for _ in range(REPLIES_AT_ONCE):
                oldest = self._kept[0].number if self._kept else self._number
                replay.following = max(replay.following, oldest)
                more = replay.following < replay.end
                frames = self._kept[replay.following - oldest].frames if more else (b"", END, b"")
                self._replies.send_multipart((replay.who, b"", *frames), zmq.NOBLOCK)
                replay.following += 1
                if not more:
                    self._replays.remove(replay)
                    return
        except zmq.Again:
            if self._clock() >= replay.until_s:
                self._replays.remove(replay)
        except zmq.ZMQError:  # it has gone
            self._replays.remove(replay)

    def _listen(self, kind: int, field: str, endpoint: str) -> zmq.Socket[Any]:
        if endpoint.startswith(IPC):
            # ZMQ removes whatever lies at the path.
            clear_socket_path(endpoint.removeprefix(IPC), variable(field))
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, WAITING_MAX if kind == zmq.XPUB else REPLIES_AT_ONCE)
        socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # the second subscription to a topic is told too
            socket.setsockopt(zmq.XPUB_NODROP, 1)
        else:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise SettingsError(
                variable(field),
                endpoint,
                f"an address of this machine where nobody listens yet ({error.strerror})",
            ) from None
        return socket


def refuse_endpoint(field: str, endpoint: str) -> None:
    """Raise SettingsError where this machine has no such address. A port in use is none: another one is tried."""
    if endpoint.startswith(IPC):
        refuse_socket_path(endpoint.removeprefix(IPC), variable(field))
        return
    address, _, _ = endpoint.rpartition(":")
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(f"{address}:*")
        except zmq.ZMQError as error:
            raise SettingsError(
                variable(field), endpoint, f"an address of this machine ({error.strerror})"
            ) from None


def _readable(socket: zmq.Socket[Any]) -> bool:
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _bound(socket: zmq.Socket[Any] | None) -> str:
    """Where it listens; empty without it."""
    return "" if socket is None else str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _new_event() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

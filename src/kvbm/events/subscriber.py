"""Reads the KV events of a publisher, as a router does that has just subscribed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq

from kvbm.clock import Clock
from kvbm.errors import KvbmError
from kvbm.events.wire import SEQUENCE_BYTES

CONNECT_S = 2.0
PAUSE_MS = 100
MESSAGE_BYTES_MAX = 64 << 20
QUEUE_MAX = 1000


class Message(NamedTuple):
    """A message of a publisher: topic (the namespace), sequence number and payload (`wire.events_in` reads it)."""

    topic: str
    number: int
    payload: bytes


def read_messages(endpoint: str, most_s: float, clock: Clock) -> Iterator[Message | None]:
    """The messages that come within `most_s` seconds; None for one whose frames have another form.

    Raises KvbmError where nothing is published at the endpoint.
    """
    context: zmq.Context[Any] = zmq.Context()
    socket: zmq.Socket[Any] = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.RCVHWM, QUEUE_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        connected = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise KvbmError(f"{endpoint} cannot be reached: {error.strerror}") from None
        if not connected.poll(int(min(CONNECT_S, most_s) * 1000)):
            raise KvbmError(
                f"no KV events are published at {endpoint}: no connection within {min(CONNECT_S, most_s):g} s"
            )
        ends_s = clock() + most_s
        while clock() < ends_s:
            if socket.poll(PAUSE_MS):
                yield _message_of(socket.recv_multipart(zmq.NOBLOCK))
    finally:
        socket.disable_monitor()
        context.destroy(0)  # the monitor's end of the connection too


def _message_of(frames: list[bytes]) -> Message | None:
    if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
        return None
    return Message(frames[0].decode(errors="replace"), int.from_bytes(frames[1], "big"), frames[2])

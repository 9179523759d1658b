"""Reads a publisher of KV events for a short while, as a router that has just come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import zmq

from kvbm.clock import Clock
from kvbm.errors import KvbmError
from kvbm.events.indexer_view import IndexerView
from kvbm.events.wire import SEQUENCE_BYTES

QUIET_S = 2.0
"""So long nothing comes: all was told. A manager tells everything to those who come within a second together."""
PAUSE_MS = 100
MESSAGE_BYTES_MAX = 64 << 20
QUEUE_MAX = 1000

End = Literal["complete", "quiet", "time", "full"]


def read_events(
    endpoint: str, view: IndexerView, complete: Callable[[], bool], most_s: float, clock: Clock
) -> End:
    """Read into `view` until it is `complete`, which is asked in every pause; until nothing came for a while; for at
    most `most_s` seconds; or until the view is full. What of it came.

    Raises KvbmError where nobody publishes at the endpoint.
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
            raise KvbmError(f"nobody can be reached at {endpoint}: {error.strerror}") from None
        if not connected.poll(int(min(QUIET_S, most_s) * 1000)):
            raise KvbmError(
                f"nobody publishes at {endpoint}: no connection within {min(QUIET_S, most_s):g} s"
            )
        return _read(socket, view, complete, most_s, clock)
    finally:
        socket.disable_monitor()
        context.destroy(0)  # the monitor's end of the connection too


def _read(
    socket: zmq.Socket[Any], view: IndexerView, complete: Callable[[], bool], most_s: float, clock: Clock
) -> End:
    began_s = heard_s = clock()
    while clock() - began_s < most_s:
        if socket.poll(PAUSE_MS):
            frames = socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 3 and len(frames[1]) == SEQUENCE_BYTES:
                view.read(frames[0], int.from_bytes(frames[1], "big"), frames[2])
            else:
                view.unreadable += 1
            heard_s = clock()
            if view.full:
                return "full"
        elif complete():
            return "complete"
        elif clock() - heard_s >= QUIET_S:
            return "quiet"
    return "time"

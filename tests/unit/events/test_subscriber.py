"""A reader of KV events: what it yields, and where nothing is published."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvbm.clock import ManualClock
from kvbm.errors import KvbmError
from kvbm.events import subscriber
from kvbm.events.subscriber import Message, read_messages


@pytest.fixture
def publisher() -> Iterator[tuple[str, zmq.Socket[Any]]]:
    with tempfile.TemporaryDirectory() as directory:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.XPUB)
        socket.bind(f"ipc://{directory}/e")
        yield f"ipc://{directory}/e", socket
        context.destroy(0)


def test_messages_are_yielded_until_the_time_is_over(publisher: tuple[str, zmq.Socket[Any]]) -> None:
    endpoint, socket = publisher
    heard = list[Message | None]()

    def clock() -> float:
        """The first call comes once the reader has subscribed; the time is over with the third message."""
        if not heard and socket.poll(0):
            assert socket.recv() == b"\1"
            socket.send_multipart([b"t", (4).to_bytes(8, "big"), b"payload"])
            socket.send_multipart([b"no event"])
            socket.send_multipart([b"t", (5).to_bytes(8, "big"), b""])
        return 30.0 if len(heard) == 3 else 0.0

    for message in read_messages(endpoint, 30.0, clock):
        heard.append(message)
    assert heard == [Message("t", 4, b"payload"), None, Message("t", 5, b"")]


def test_where_nothing_is_published_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "CONNECT_S", 0.01)
    for endpoint in ("tcp://127.0.0.1:1", "tcp://[::1]:1"):
        with pytest.raises(KvbmError, match="no KV events are published at tcp://"):
            next(read_messages(endpoint, 30.0, ManualClock(0.0)))
    with pytest.raises(KvbmError, match=r"ipc://.* cannot be reached: "):
        next(read_messages("ipc:///" + "x" * 200, 30.0, ManualClock(0.0)))

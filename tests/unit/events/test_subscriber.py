"""When a reader of events takes its account for whole."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvbm.block import Tier
from kvbm.clock import ManualClock
from kvbm.errors import KvbmError
from kvbm.events import indexer_view, subscriber
from kvbm.events.indexer_view import IndexerView
from kvbm.events.subscriber import QUIET_S, read_events
from kvbm.events.wire import encode

STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6],
    "block_size": 1,
    "medium": "CPU",
}


class Publisher:
    """Publishes messages to the one who subscribes, when that one pauses: `pause` is what it asks then."""

    def __init__(self, directory: str) -> None:
        self.endpoint = f"ipc://{directory}/e"
        self.view, self.clock = IndexerView(), ManualClock(0.0)
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(zmq.XPUB)
        self.socket.bind(self.endpoint)
        self.pauses = 0

    def close(self) -> None:
        self._context.destroy(0)

    def message(self, number: int) -> tuple[bytes, bytes, bytes]:
        return b"t", number.to_bytes(8, "big"), encode(1.0, [STORED])

    def read(self, most_s: float = 30.0, complete_at: int = 0) -> str:
        """A second of the reader's clock passes in each pause; in the first one it is told of two blocks."""

        def complete() -> bool:
            if not self.pauses:
                assert self.socket.recv() == b"\1"
                self.socket.send_multipart(self.message(4))
                self.socket.send_multipart([b"no event"])
            self.pauses += 1
            self.clock.advance(1.0)
            return self.view.count("t", Tier.HOST) == complete_at > 0

        return read_events(self.endpoint, self.view, complete, most_s, self.clock)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with tempfile.TemporaryDirectory() as directory:
        made = Publisher(directory)
        yield made
        made.close()


def test_it_ends_when_all_is_there(publisher: Publisher) -> None:
    assert publisher.read(complete_at=2) == "complete"
    assert (publisher.view.messages, publisher.view.first, publisher.view.unreadable) == (1, 4, 1)


def test_it_ends_when_nothing_more_comes(publisher: Publisher) -> None:
    assert publisher.read(complete_at=3) == "quiet"
    assert publisher.view.count("t", Tier.HOST) == 2
    assert publisher.clock() >= QUIET_S


def test_it_ends_when_its_time_is_over(publisher: Publisher) -> None:
    assert publisher.read(most_s=1.0) == "time"


def test_it_ends_when_it_is_full(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_view, "BLOCKS_MAX", 1)
    assert publisher.read() == "full"


def test_where_nobody_publishes_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "QUIET_S", 0.01)
    for endpoint in ("tcp://127.0.0.1:1", "tcp://[::1]:1"):
        with pytest.raises(KvbmError, match="nobody publishes at tcp://"):
            read_events(endpoint, IndexerView(), lambda: True, 30.0, ManualClock(0.0))
    with pytest.raises(KvbmError, match="nobody can be reached at ipc://"):
        read_events("ipc:///" + "x" * 200, IndexerView(), lambda: True, 30.0, ManualClock(0.0))

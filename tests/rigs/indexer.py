"""A router's end of a manager's KV events: what it believes the tiers to hold, by topic, and what it complains of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

Held = set[tuple[str, int]]
"""Medium and hash of each block."""
Message = tuple[bytes, int, list[dict[str, Any]]]

PATIENCE_MS = 30_000


@dataclass
class Indexer:
    """Subscribes to `endpoint`. `numbers` are those of the messages that it heard."""

    endpoint: str
    topic: bytes = b""
    held: dict[bytes, Held] = field(default_factory=dict)
    blocks: dict[int, tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)
    """By hash: that of the block before, and the tokens."""
    numbers: list[int] = field(default_factory=list)
    cleared: int = 0
    _context: Any = field(default_factory=zmq.Context)

    def __post_init__(self) -> None:
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, self.topic)
        self._socket.connect(self.endpoint)

    def hear(self, wait_ms: int = PATIENCE_MS) -> Message | None:
        """The next message, taken in; None where none comes."""
        if not self._socket.poll(wait_ms):
            return None
        message = decoded(self._socket.recv_multipart())
        self.take_in(message)
        return message

    def take_in(self, message: Message) -> None:
        """Believe a message."""
        topic, number, events = message
        self.numbers.append(number)
        for event in events:
            self._take_in(self.held.setdefault(topic, set()), event)

    def of(self, topic: str) -> Held:
        """What it believes of a namespace."""
        return self.held.get(topic.encode(), set())

    def close(self) -> None:
        """Unsubscribe."""
        self._socket.close(0)
        self._context.term()

    def _take_in(self, held: Held, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.cleared += 1
            held.clear()
            return
        names = event["block_hashes"]
        here = {(event["medium"], name) for name in names}
        if event["type"] == "BlockRemoved":
            held.difference_update(here)
            return
        size, before = event["block_size"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(names) == size * len(event["extra_keys"]) > 0
        for place, name in enumerate(names):
            block = before, tuple(event["token_ids"][place * size : (place + 1) * size])
            assert self.blocks.setdefault(name, block) == block, "one hash, two blocks"
            before = name
        held |= here


def decoded(frames: list[bytes]) -> Message:
    """Topic, number and events of a message."""
    topic, number, payload = frames
    seconds, events, rank = msgspec.msgpack.decode(payload)
    assert seconds > 0
    assert rank == 0
    return topic, int.from_bytes(number, "big", signed=True), events


def replayed(endpoint: str, start: int) -> list[Message]:
    """What a publisher repeats from this number on."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    try:
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        messages = list[Message]()
        while socket.poll(PATIENCE_MS):
            empty, *frames = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(frames[1], "big", signed=True) == -1:
                assert frames == [b"", frames[1], b""]
                return messages
            messages.append(decoded(frames))
        raise AssertionError("the replay does not end")
    finally:
        socket.close(0)
        context.term()

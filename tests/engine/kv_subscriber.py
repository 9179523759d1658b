"""A router's end of vLLM's KV events: subscribes over ZMQ and keeps its own account of what each tier holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

Block = tuple[int | None, tuple[int, ...]]
"""The hash of the block before it, and its tokens."""


@dataclass
class Subscriber:
    """`held[medium]` are the hashes that a tier holds, by what was published; `blocks` what each one is."""

    directory: Path
    held: dict[str, set[int]] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    twice: list[tuple[str, int]] = field(default_factory=list)
    """Blocks that lower tiers were said to have got while they had them, or to have lost while they had not."""
    _context: Any = field(default_factory=zmq.Context, init=False)
    _sequence: int = -1

    def __post_init__(self) -> None:
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(self._address("events"))

    @property
    def config(self) -> dict[str, Any]:
        """vLLM's `kv_events_config`. It binds these; it would connect to an address of TCP without a `*`."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._address("events"),
            "replay_endpoint": self._address("replay"),
        }

    def hear(self) -> None:
        """Take in all that was published, also what was so before we were connected."""
        while self._socket.poll(100):
            _, sequence, payload = self._socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if number > self._sequence + 1:
                self._catch_up()
            if number == self._sequence + 1:
                self._take_in_batch(number, payload)
        self._catch_up()

    def _catch_up(self) -> None:
        """Ask the publisher for what we have missed."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._address("replay"))
        socket.send_multipart([b"", (self._sequence + 1).to_bytes(8, "big")])
        while socket.poll(3000):
            _, _, sequence, payload = socket.recv_multipart()
            number = int.from_bytes(sequence, "big", signed=True)
            if number < 0:
                break
            assert number == self._sequence + 1, "a batch was lost"
            self._take_in_batch(number, payload)
        socket.close()

    def _take_in_batch(self, number: int, payload: bytes) -> None:
        self._sequence = number
        for event in msgspec.msgpack.decode(payload)[1]:
            self._take_in(event)

    def _address(self, name: str) -> str:
        return f"ipc://{self.directory}/{name}"

    def engine_gone(self) -> None:
        """A router forgets an engine that has gone; the next one counts from 0."""
        self.hear()
        self.held, self._sequence = {}, -1

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def _take_in(self, event: dict[str, Any]) -> None:
        kind, medium = event["type"], event.get("medium")
        if kind == "AllBlocksCleared":
            self.held.clear()
            return
        account = self.held.setdefault(str(medium), set())
        lower = medium in ("CPU", "STORAGE")
        if kind == "BlockRemoved":
            self.twice += [(medium, name) for name in event["block_hashes"] if lower and name not in account]
            account.difference_update(event["block_hashes"])
            return
        size, before = event["block_size"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for place, name in enumerate(event["block_hashes"]):
            block = before, tuple(event["token_ids"][place * size : (place + 1) * size])
            assert self.blocks.setdefault(name, block) == block, "one hash, two blocks"
            self.twice += [(medium, name)] * (lower and name in account)
            account.add(name)
            before = name

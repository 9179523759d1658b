"""Asks a manager for another size of host memory, and looks at what is there afterwards."""

from __future__ import annotations

from typing import Any

from kvbm.admin_protocol import Resize, Resized, decode_from_manager
from kvbm.block import BlockKey
from kvbm.clock import ManualClock
from kvbm.protocol import PROTOCOL_VERSION, Hello, Ready, Welcome
from kvbm.testing.oracle import block_bytes
from rigs.manager import LAYOUT, Client, ManagerBench


class PassingClock(ManualClock):
    """Time passes with every look at it, so that a turn of the manager takes one message, or one piece."""

    def __call__(self) -> float:
        self.advance(0.0015)
        return super().__call__()


def operator(manager: ManagerBench) -> Client:
    """A session of role admin."""
    admin = manager.client()
    admin.channel._decode = decode_from_manager
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
    admin.expect(Welcome)
    return admin


def begin(admin: Client, blocks: int) -> None:
    """Ask for room for so many blocks, without a step of the manager."""
    admin.channel.send(Resize(host_bytes=blocks * LAYOUT.block_bytes))


def resize(admin: Client, blocks: int) -> Resized:
    """The answer to it."""
    begin(admin, blocks)
    return admin.expect(Resized)


def come_back(manager: ManagerBench, name: str = "e", **hello: Any) -> tuple[Client, Client]:
    """An engine that was sent away, which connects again."""
    worker = manager.worker(name, **hello)
    leader = manager.leader(name)
    assert leader.expect(Ready).ready
    return leader, worker


def sent_away(leader: Client, worker: Client) -> None:
    """Both sessions were ended, and the engine closes its ends."""
    for client in (leader, worker):
        client.expect_end()
        client.close()
    client.bench.step()


def holds(leader: Client, worker: Client, number: int, keys: list[BlockKey]) -> int:
    """How many leading blocks are there; each has the bytes that were stored."""
    reply = leader.lookup(number, keys)
    for key, slot in zip(keys, reply.slots, strict=False):
        assert worker.read(slot) == block_bytes(key, 0, worker.welcome.slot_bytes)
    return len(reply.slots)

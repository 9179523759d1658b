"""A server on a real Unix socket, stepped by the test's own thread, and clients that talk to it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvbm.admin_protocol import WhyQuery, WhyReply, decode_from_manager
from kvbm.block import BlockKey
from kvbm.client.admin import _AdminChannel
from kvbm.client.channel import Channel
from kvbm.clock import ManualClock
from kvbm.errors import ManagerUnavailable
from kvbm.hashing import chain_keys, join_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.event_stream import Publisher
from kvbm.manager.leases import Lease
from kvbm.manager.scrapes import Scrapes
from kvbm.manager.server import Server
from kvbm.manager.space import Space
from kvbm.manager.traffic import Traffic
from kvbm.observe.metrics import Metrics
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Commit,
    FromManager,
    Hello,
    Lookup,
    LookupReply,
    Message,
    Ready,
    Refused,
    Reserve,
    ReserveReply,
    Welcome,
)
from kvbm.settings import Settings
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.host import open_arena
from kvbm.tiers.remote.contract import RemoteTier
from rigs import managers_thread

DEADLINE_S = 20.0
LAYOUT = BlockLayout(block_tokens=4, shard_bytes=4096)
NAMESPACE = Namespace(model="unit/model", fields=(("weights", "aa"), ("dtype", "float32")))
OTHER = Namespace(model="unit/model", fields=(("weights", "bb"), ("dtype", "float32")))
KEYS = chain_keys(bytes(32), range(4000), LAYOUT.block_tokens)

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def worker_hello(engine: str = "e", **hello: Any) -> Hello:
    """What a rank says first."""
    fields = {"namespace": NAMESPACE, "layout": LAYOUT, "request_blocks": 1, **hello}
    return Hello(version=PROTOCOL_VERSION, role="worker", engine=engine, **fields)


class ManagerBench:
    """The manager under test. `clock` is moved by hand; nothing happens but in `step`."""

    def __init__(
        self,
        directory: Path,
        namespaces: int = 1,
        clock: ManualClock | None = None,
        publisher: Publisher | None = None,
        peers: Callable[[Namespace, BlockLayout], RemoteTier] | None = None,
        **settings: Any,
    ) -> None:
        self._peers = peers
        self.path = str(directory / "m.sock")
        self.settings = Settings(**{"host_blocks": 16, "runtime_dir": str(directory), **settings})
        self.clock = clock or ManualClock(50.0)
        self.metrics = Metrics()
        self._namespaces = namespaces
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        traffic = Traffic(self.metrics, self.settings, self.clock)
        self.scrapes = Scrapes(self.metrics, self.clock, answer_s_max=DEADLINE_S)
        self.server = Server(
            self._listener, self._spaces, traffic, self.clock, scrapes=self.scrapes, publisher=publisher
        )
        self.clients: list[Client] = []
        self.open = True

    def _spaces(self, on_progress: Callable[[Lease], None]) -> SpaceTable:
        return SpaceTable(self.settings, self._namespaces, self.metrics, self.clock, on_progress, self._peers)

    def step(self, times: int = 3) -> None:
        """Deal with what has arrived."""
        for _ in range(times):
            self._turn()

    def _turn(self, timeout_s: float = 0.0) -> None:
        """A turn of the loop, in which calls to a disk or a network fail."""
        with managers_thread.turn():
            self.server.step(timeout_s)

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Step until the condition holds; fails after a deadline that only a defect reaches."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, what or "it never happened"
            self._turn(0.005)

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes, and the server notices."""
        self.clock.advance(seconds)
        self.step()

    def space(self, number: int = 0) -> Space:
        """One of the spaces, in the order in which they were made."""
        return list(self.server.spaces)[number][1]

    def check(self) -> None:
        for _, space in self.server.spaces:
            space.check()

    def client(self) -> Client:
        """A connection that has not said anything."""
        client = Client(self, Channel.connect(self.path))
        self.clients.append(client)
        self.step()
        return client

    def leader(self, engine: str = "e", **hello: Any) -> Client:
        client = self.client()
        client.send(Hello(version=PROTOCOL_VERSION, role="leader", engine=engine, **hello))
        client.welcome = client.expect(Welcome)
        return client

    def worker(self, engine: str = "e", **hello: Any) -> Client:
        client = self.client()
        client.send(self.worker_hello(engine, **hello))
        client.welcome = client.expect(Welcome)
        return client

    def worker_hello(self, engine: str = "e", **hello: Any) -> Hello:
        return worker_hello(engine, **{"request_blocks": 4, **hello})

    def engine(self, name: str = "e", **hello: Any) -> tuple[Client, Client]:
        """A leader and its one worker, ready."""
        leader = self.leader(name)
        worker = self.worker(name, **hello)
        assert leader.expect(Ready).ready
        return leader, worker

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.open:
            self.open = False
            self.server.close(keep=False)


class Client:
    """One end of a session."""

    def __init__(self, bench: ManagerBench, channel: Channel) -> None:
        self.bench = bench
        self.channel = channel
        self.welcome = Welcome(version=0, epoch=0)
        self.inbox: list[FromManager] = []
        self.gone = False
        self._memory: Any = None

    def send(self, message: Message) -> None:
        self.channel.send(message)
        self.bench.step()

    def take(self) -> list[FromManager]:
        """All that has arrived by now."""
        self.bench.step()
        self._receive()
        messages, self.inbox = self.inbox, []
        return messages

    def expect(self, kind: type[MessageT]) -> MessageT:
        """The next message, which must be of this kind."""
        self.bench.until(self._receive, f"no {kind.__name__} came")
        message = self.inbox.pop(0)
        assert isinstance(message, kind), message
        return message

    def expect_end(self) -> None:
        """The manager closes the session."""
        self.bench.until(lambda: self._receive() and self.gone, "the session stays open")

    def _receive(self) -> bool:
        try:
            self.inbox += self.channel.receive()
        except ManagerUnavailable:
            self.gone = True
        return bool(self.inbox) or self.gone

    def lookup(self, number: int, keys: list[BlockKey], skip: int = 0, **said: Any) -> LookupReply:
        self.send(Lookup(lookup=number, keys=join_keys(keys), skip=skip, **said))
        return self.expect(LookupReply)

    def reserve(self, number: int, keys: list[BlockKey], parent: bytes = b"") -> tuple[int, ...]:
        self.send(Reserve(store=number, parent=parent, keys=join_keys(keys)))
        return self.expect(ReserveReply).slots

    def memory(self) -> Any:
        """The worker's own mapping of the arena."""
        if self._memory is None:
            self._memory, generations = open_arena(self.channel.take_fds())
            generations.close()
        return self._memory

    def write(self, slot: int, key: BlockKey, nonce: int = 0) -> None:
        """As a worker does: straight into shared memory, whatever the manager thinks of it."""
        size = self.welcome.slot_bytes
        self.memory()[slot * size : (slot + 1) * size] = block_bytes(key, nonce, size)

    def read(self, slot: int) -> bytes:
        size = self.welcome.slot_bytes
        return bytes(self.memory()[slot * size : (slot + 1) * size])

    def close(self) -> None:
        """As if the process were killed."""
        self.channel.close()


def connect_operator(manager: ManagerBench) -> Client:
    """A session of role admin."""
    admin = manager.client()
    admin.channel._decode = decode_from_manager
    admin.send(Hello(version=PROTOCOL_VERSION, role="admin"))
    admin.expect(Welcome)
    return admin


def store(leader: Client, worker: Client, number: int, keys: list[BlockKey]) -> tuple[int, ...]:
    """One store from end to end."""
    slots = leader.reserve(number, keys)
    for key, slot in zip(keys, slots, strict=True):
        if slot >= 0:
            worker.write(slot, key)
    leader.send(Commit(store=number))
    return slots


def why(manager: ManagerBench, request: str = "", limit: int = 20) -> WhyReply:
    """What an operator is told of requests."""
    client = Client(manager, _AdminChannel.connect(manager.path))
    try:
        client.send(Hello(version=PROTOCOL_VERSION, role="admin"))
        client.expect(Welcome)
        client.send(WhyQuery(request=request, limit=limit))
        return client.expect(WhyReply)
    finally:
        client.close()
        manager.step()


def one(manager: ManagerBench, request: str) -> dict[str, Any]:
    """What is told of a request that is known."""
    reply = why(manager, request)
    assert reply.matching == 1
    (found,) = reply.requests
    return found


def refusal(client: Client) -> str:
    reason = client.expect(Refused).reason
    assert "\n" not in reason
    client.expect_end()
    return reason

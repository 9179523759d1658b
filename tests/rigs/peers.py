"""Nodes of a fleet in one process: a space whose memory is lent, a loop like the manager's, and a tier that reads."""

from __future__ import annotations

import mmap
import select
import selectors
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence

from kvbm.block import BlockKey, Outcome
from kvbm.clock import Clock, monotonic
from kvbm.fleet.directory import Peer
from kvbm.hashing import chain_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.lending import Lending, LendOptions
from kvbm.manager.peer_server import READERS_MAX, PeerServer
from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmitAll
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.contract import Completion
from kvbm.tiers.host import HostArena
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.options import PeerOptions
from kvbm.tiers.peers.tier import PeerTier, open_peer_tier
from kvbm.tiers.remote.contract import Buffers
from rigs.manager_probe import wait_for

LAYOUT = BlockLayout(block_tokens=4, shard_bytes=8192, shard_count=2)
NAMESPACE = Namespace(model="test", fields=(("weights", "a"),))
OTHER_NAMESPACE = Namespace(model="test", fields=(("weights", "b"),))
FLEET = "test-fleet"
HOST = "127.0.0.1"
WAIT_S = 20.0


def keys_of(count: int, seed: int = 0) -> list[BlockKey]:
    """The keys of a chain."""
    first = seed * 1_000_000
    return chain_keys(bytes(32), range(first, first + 4 * count), 4)


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    """Poll, for a bounded time."""
    wait_for(lambda: bool(condition()), WAIT_S, lambda: f"never: {what or condition}")


def content(key: BlockKey, layout: BlockLayout = LAYOUT) -> list[bytes]:
    """The bytes of each shard of a block."""
    return [block_bytes(key, shard, layout.slot_bytes) for shard in range(layout.shard_count)]


class ListedPeers:
    """A directory that a test changes."""

    place = "a test"
    fault = ""

    def __init__(self, peers: Iterable[Peer] = ()) -> None:
        self.listed = tuple(peers)

    def peers(self) -> tuple[Peer, ...]:
        return self.listed

    def close(self) -> None: ...


class LendingNode:
    """A node that lends: a space, a loop of its own thread like the manager's, and a door.

    What touches the space goes through `on_loop`. `hold` keeps the loop from turning.
    """

    def __init__(
        self,
        node: str = "lender",
        slots: int = 64,
        layout: BlockLayout = LAYOUT,
        namespace: Namespace = NAMESPACE,
        tls: ssl.SSLContext | None = None,
        fleet: str = FLEET,
        options: LendOptions | None = None,
        clock: Clock = monotonic,
        listen: str = f"{HOST}:0",
        staging: bool = False,
        mover: Mover | None = None,
        readers_max: int = READERS_MAX,
    ) -> None:
        self.node, self.layout, self.namespace = node, layout, namespace
        self.arena = HostArena(layout, slots, touch_threads=0)
        self.space = Space(
            layout,
            self.arena,
            None,
            AdmitAll(),
            Metrics(),
            clock,
            lambda lease: None,
            SpaceOptions(staging=staging),
        )
        self.spaces: list[tuple[Namespace, Space]] = [(namespace, self.space)]
        self.lending = Lending(_Live(self), clock, options or LendOptions(share=0.5))
        self.server = PeerServer(
            listen, tls, fleet, node, self.lending, readers_max=readers_max, clock=clock, mover=mover
        )
        self.turns = 0
        self._numbers = iter(range(1, 1 << 30))
        self._work: list[Callable[[], object]] = []
        self._gate = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.server.port}"

    @property
    def peer(self) -> Peer:
        return Peer(self.address, self.node)

    def _loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.lending.fileno(), selectors.EVENT_READ)
            while not self._stopping:
                ready = selector.select(0.02)
                with self._gate:
                    if ready or self.turns % 10 == 0:
                        self.lending.turn()
                    self.space.expire_leases()
                    self.turns += 1

    def hold(self) -> threading.Lock:
        """With this lock held, the loop stands still."""
        return self._gate

    def store(
        self, keys: Sequence[BlockKey], parent: BlockKey | None = None, wrong: bool = False
    ) -> list[int]:
        """Store blocks; `wrong`: with the content of other blocks."""
        with self._gate:
            number = next(self._numbers)
            slots = self.space.reserve(1, number, parent, list(keys))
            for key, slot in zip(keys, slots, strict=True):
                if slot >= 0:
                    self.fill(slot, content(key if not wrong else BlockKey(key[::-1]), self.layout))
            self.space.commit(1, number)
            return slots

    def fill(self, slot: int, shards: Sequence[bytes]) -> None:
        for view, shard in zip(self.arena.slot_views(slot), shards, strict=True):
            view[:] = shard

    def drop(self) -> None:
        """Drop all blocks that are not in use."""
        with self._gate:
            self.space.clear("host")

    def leased(self) -> int:
        with self._gate:
            return self.space.host_pool.counts().leased

    def close(self) -> None:
        self.server.close()
        self._stopping = True
        self._thread.join(WAIT_S)
        self.lending.close()
        assert self.space.host_pool.counts().leased == 0, "a lease outlived its reader"
        self.space.check()
        self.space.close(keep=False)


class _Live:
    def __init__(self, node: LendingNode) -> None:
        self._node = node

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._node.spaces)


def open_tier(
    peers: Iterable[Peer] | ListedPeers,
    layout: BlockLayout = LAYOUT,
    namespace: Namespace = NAMESPACE,
    tls: ssl.SSLContext | None = None,
    clock: Clock = monotonic,
    node: str = "reader",
    fleet: str = FLEET,
    mover: Mover | None = None,
    **options: float,
) -> PeerTier:
    """A tier that reads from these peers; waits are as short as can be."""
    directory = peers if isinstance(peers, ListedPeers) else ListedPeers(peers)
    chosen = PeerOptions(fleet=fleet, node=node, **options)  # type: ignore[arg-type]
    return open_peer_tier(directory, layout, namespace, chosen, clock, tls, lambda: 0.0, mover)


class Targets:
    """Memory for the blocks of one load, full of a pattern."""

    def __init__(self, count: int, layout: BlockLayout = LAYOUT) -> None:
        size = layout.slot_bytes
        self.memory = memoryview(mmap.mmap(-1, count * layout.block_bytes))
        self.memory[:] = b"\xa5" * len(self.memory)
        views = [self.memory[at : at + size] for at in range(0, len(self.memory), size)]
        each = layout.shard_count
        self.blocks: list[Buffers] = [views[i * each : (i + 1) * each] for i in range(count)]

    def block(self, index: int) -> list[bytes]:
        return [bytes(view) for view in self.blocks[index]]


class Loads:
    """Submits loads and collects their ends."""

    def __init__(self, tier: PeerTier, layout: BlockLayout = LAYOUT) -> None:
        self.tier, self.layout = tier, layout
        self.ended: dict[int, Completion] = {}
        self._next = 0

    def begin(self, keys: Sequence[BlockKey]) -> tuple[int, Targets]:
        place = self.tier.places(keys)[0]
        targets = Targets(len(keys), self.layout)
        self._next += 1
        outcome = self.tier.submit_load(self._next, keys, place, targets.blocks, None)
        assert outcome is Outcome.PENDING, outcome
        return self._next, targets

    def collect(self) -> None:
        for completion in self.tier.poll():
            assert completion.job_id not in self.ended, "a load completed twice"
            self.ended[completion.job_id] = completion

    def wait(self, job: int) -> Completion:
        while job not in self.ended:
            self.wait_any()
        return self.ended[job]

    def wait_any(self) -> None:
        """Until another load ends."""
        ready, _, _ = select.select([self.tier.fileno()], [], [], WAIT_S)
        assert ready, f"no load ends; ended are {sorted(self.ended)}"
        self.collect()

    def load(self, keys: Sequence[BlockKey]) -> tuple[Completion, Targets]:
        job, targets = self.begin(keys)
        return self.wait(job), targets


def knows(tier: PeerTier, keys: Sequence[BlockKey]) -> bool:
    """Whether the tier knows where all of these are."""
    return tier.held_elsewhere(keys) == b"\x01" * len(keys)

"""What is in use stays in a store, also where nobody reads it there; what is not goes. One clock that stands still."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvbm.block import BlockKey
from kvbm.manager.space import Space
from kvbm.manager.write_behind import RemoteRules
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmitAll
from kvbm.testing.oracle import block_bytes
from kvbm.testing.stored_runs import LAYOUT
from kvbm.tiers.host import HostArena
from kvbm.tiers.remote.blob_tier import BlobTier
from kvbm.tiers.remote.contract import NOWHERE
from kvbm.tiers.remote.upkeep import TOUCHES_AT_ONCE
from rigs.faulty_blobs import BlobFault, BlobRule, FaultyBlobs
from rigs.remote_nodes import Nodes, settled
from rigs.space import KEYS, ME, OTHER

TTL_S = 4000.0


class Above:
    """A space over one node's tier."""

    def __init__(self, nodes: Nodes, tier: BlobTier, rules: RemoteRules, host_slots: int) -> None:
        self.nodes, self.tier = nodes, tier
        self.arena = HostArena(LAYOUT, host_slots, touch_threads=0)
        remotes = [(tier, rules, AdmitAll())]
        self.space = Space(
            LAYOUT, self.arena, None, AdmitAll(), Metrics(), nodes.clock, lambda _: None, remotes=remotes
        )
        self._number = 0

    @property
    def touched(self) -> int:
        """So many packs it has told the store of."""
        return int(str(self.tier.describe()["touched"]))

    def shares(self, keys: list[BlockKey]) -> None:
        """Compute blocks, and wait until they are in the store."""
        self._number += 1
        slots = self.space.reserve(ME, self._number, None, keys)
        for key, slot in zip(keys, slots, strict=True):
            for shard, view in enumerate(self.arena.slot_views(slot)):
                view[:] = block_bytes(key, shard, LAYOUT.slot_bytes)
        self.space.commit(ME, self._number)
        self.passes(0.0)

    def hit(self, keys: list[BlockKey]) -> None:
        """A request that finds them in host memory."""
        self._number += 1
        lease = self.space.lookup(ME, self._number, keys, 0)
        assert lease is not None and lease.ready == len(keys)
        self.space.release(ME, self._number)

    def passes(self, seconds: float) -> None:
        """So much time goes by, and all that is due is done."""
        self.nodes.clock.advance(seconds)
        self.space.pump()
        assert self.tier.drain(20.0)
        self.space.pump()
        self.space.below.tick()
        settled(self.tier)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
def above(nodes: Nodes) -> Iterator[Callable[..., Above]]:
    made: list[Above] = []

    def make(
        tier: BlobTier | None = None, host_slots: int = 64, requests_per_hour: int = 0, writes: bool = True
    ) -> Above:
        rules = RemoteRules(linger_s=0.0, requests_per_hour=requests_per_hour, writes=writes)
        made.append(Above(nodes, tier or nodes.make(ttl_s=TTL_S), rules, host_slots))
        return made[-1]

    yield make
    for each in made:
        each.space.close(keep=False)


def there(nodes: Nodes, keys: list[BlockKey]) -> bool:
    """Whether a node that looks now finds them all."""
    node = nodes.make()
    nodes.pass_on(node, seconds=0.0)
    return NOWHERE not in node.places(keys)


def test_a_block_that_is_hit_in_host_memory_alone_outlives_its_ttl(
    nodes: Nodes, above: Callable[..., Above]
) -> None:
    node = above()
    node.shares(KEYS[:4])
    node.shares(OTHER[:4])
    puts, read = nodes.blobs.requests()["put"], node.tier.describe()["read_bytes"]
    for _ in range(120):
        node.passes(TTL_S / 40)
        for _ in range(5):
            node.hit(KEYS[:4])
        node.tier.collector.run(in_turn=False)
    puts = nodes.blobs.requests()["put"] - puts
    assert node.tier.describe()["read_bytes"] == read, "no block came from the store"
    assert there(nodes, KEYS[:4])
    assert not there(nodes, OTHER[:4]), "nobody asked for it"
    touched = node.touched
    assert touched in range(10, 13), "once for a quarter of three times to live"
    # Beside it only the collections wrote: their mark.
    assert puts <= touched + 2 * 120


def test_a_node_that_only_reads_says_what_it_uses_too(nodes: Nodes, above: Callable[..., Above]) -> None:
    writer = above()
    writer.shares(KEYS[:4])
    reader = above(nodes.make(ttl_s=TTL_S), writes=False)
    reader.shares(KEYS[:4])
    for _ in range(30):
        reader.passes(TTL_S / 10)
        reader.hit(KEYS[:4])
        writer.tier.collector.run(in_turn=False)
    assert there(nodes, KEYS[:4])


def test_what_is_in_use_is_told_within_the_hours_budget(nodes: Nodes, above: Callable[..., Above]) -> None:
    """Five minutes' worth of requests at once, for packs and for touches together."""
    node = above(requests_per_hour=96)
    packs = [KEYS[n : n + 1] for n in range(48)]
    for number, keys in enumerate(packs):
        node.shares(keys)
        if number % 8 == 7:
            node.passes(400.0)
    node.passes(TTL_S)
    nodes.pass_on(node.tier, seconds=2.0)
    before = node.touched
    for _ in range(10):
        for keys in packs:
            node.hit(keys)
    for _ in range(10):
        node.passes(1.0)
    assert node.touched - before == 8
    node.passes(3600.0)
    for keys in packs:
        node.hit(keys)
    for _ in range(10):
        node.passes(1.0)
    assert node.touched - before == 16, "what was not told is told later"


def test_touches_come_in_batches_and_hold_up_no_log(nodes: Nodes, above: Callable[..., Above]) -> None:
    node = above(host_slots=256)
    packs = [KEYS[n : n + 1] for n in range(3 * TOUCHES_AT_ONCE)]
    for keys in packs:
        node.shares(keys)
    node.passes(TTL_S / 2)
    for keys in packs:
        node.hit(keys)
    told = []
    for _ in range(4):
        before = node.touched
        node.passes(1.0)
        told.append(node.touched - before)
    assert told == [TOUCHES_AT_ONCE] * 3 + [0]


def test_a_store_that_is_off_is_told_when_it_works_again(nodes: Nodes, above: Callable[..., Above]) -> None:
    bad = FaultyBlobs(nodes.blobs)
    node = above(nodes.make(bad, ttl_s=TTL_S))
    node.shares(KEYS[:4])
    node.passes(TTL_S / 2)
    bad.arm(BlobRule(fault=BlobFault.UNREACHABLE))
    while not node.tier.fault:
        node.passes(5.0)
    node.hit(KEYS[:4])
    bad.disarm()
    while node.tier.fault:
        node.passes(60.0)
    node.passes(2.0)
    assert node.touched == 1

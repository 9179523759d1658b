"""Host memory that is small for what comes, above a store alone: blocks are written before they are evicted."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence

import pytest

from kvbm.block import BlockKey
from kvbm.hashing import chain_keys
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.write_behind import IN_FLIGHT_SHARE, SUBMITTED_AT_ONCE, RemoteRules
from kvbm.tiers.remote.pack_size import OPEN_SHARE
from rigs.fake_remote import FakeStore
from rigs.remote import RemoteBench
from rigs.space import KEYS, LAYOUT, ME, OTHER

SLOTS = 64


@pytest.fixture
def node() -> Iterator[Callable[..., RemoteBench]]:
    made: list[RemoteBench] = []

    def make(**options: object) -> RemoteBench:
        made.append(RemoteBench(FakeStore(LAYOUT), **{"host_slots": SLOTS, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for bench in made:
        bench.space.check()
        bench.close()


def prompts(count: int, blocks: int = 4) -> Iterator[list[BlockKey]]:
    """Chains that have no block in common."""
    for number in range(count):
        first = 1_000_000 + 1000 * number
        yield chain_keys(bytes(32), range(first, first + LAYOUT.block_tokens * blocks), LAYOUT.block_tokens)


def skipped(bench: RemoteBench) -> float:
    return bench.metrics.value("kvbm_remote_skipped_blocks_total", reason="evicted")


@pytest.mark.parametrize("eviction", ["lru", "gittins"])
def test_blocks_are_written_before_they_are_evicted(node: Callable[..., RemoteBench], eviction: str) -> None:
    """All of host memory changes in a third of the time that a block waits for the next ones."""
    a = node(space_options=SpaceOptions(eviction=eviction))
    computed = list(prompts(200))
    for keys in computed:
        a.compute(keys)
        a.settle(0.2)
    a.settle(10.0)
    assert skipped(a) == 0
    assert len(a.store.blocks) == 4 * len(computed)
    assert set(a.remote.stores) == {4}, "each chain in one piece"


def test_a_chain_that_grows_slowly_waits_while_nothing_is_evicted(node: Callable[..., RemoteBench]) -> None:
    a = node()
    for first in range(0, 40, 2):
        a.compute(KEYS[first : first + 1], KEYS[first - 1] if first else None)
        a.compute(KEYS[first + 1 : first + 2], KEYS[first])
        a.settle(0.1)
    assert set(a.remote.stores) == {8}
    a.settle(10.0)
    assert sum(a.remote.stores) == 40


def test_what_waits_in_full_host_memory_is_a_share_of_it(node: Callable[..., RemoteBench]) -> None:
    a = node()
    for keys in prompts(40, blocks=2):
        a.compute(keys)
        a.settle()
        assert a.space.remotes[0].queued_count <= max(a.space.host_pool.free_count, SLOTS // OPEN_SHARE)


def test_a_store_that_is_behind_pins_no_more_than_before(node: Callable[..., RemoteBench]) -> None:
    """Newcomers find room; what host memory evicts meanwhile is counted; and no more packs are closed for nothing."""
    a = node()
    a.remote.pending_limit = 2
    for keys in prompts(60, blocks=2):
        a.compute(keys)
        assert a.space.host_pool.find(keys[-1]) is not None
        a.space.pump()
        a.clock.advance(0.1)
        assert a.space.host_pool.counts().leased <= SLOTS // IN_FLIGHT_SHARE
    writer = a.space.remotes[0].writer
    assert writer is not None
    assert len(a.remote.stores) == 2
    assert len(writer._ready) <= SUBMITTED_AT_ONCE
    a.settle()
    a.settle(10.0)
    assert skipped(a) + sum(a.remote.stores) == 120


def test_early_packs_leave_requests_to_full_ones(node: Callable[..., RemoteBench]) -> None:
    """Many chains grow slowly: with small packs the hour's requests would store less than with full ones."""
    a = node(options=RemoteRules(linger_s=10.0, requests_per_hour=360))
    chains = list(prompts(8, blocks=20))
    for place in range(20):
        for keys in chains:
            a.compute(keys[place : place + 1], keys[place - 1] if place else None)
            a.settle(0.1)
    a.settle(10.0)
    assert a.remote.stores[0] < 8 and 8 in a.remote.stores
    assert len(a.store.blocks) > 100, "with early packs alone 93"
    assert a.metrics.value("kvbm_remote_skipped_blocks_total", reason="budget") == 0


def weighs(bench: RemoteBench) -> None:
    """The policy of host memory finds no block that it has worth less than a newcomer."""
    policy = bench.space.host_pool.policy
    inner = policy.victims

    def victims(needed: int, incoming: Sequence[Hashable], leased: Container[int], now_s: float) -> list[int]:
        return [] if incoming else inner(needed, incoming, leased, now_s)

    policy.victims = victims  # type: ignore[method-assign]


def test_host_memory_is_the_way_into_a_store(node: Callable[..., RemoteBench]) -> None:
    """What a policy finds worth little here may be worth much to others."""
    a = node(host_slots=4)
    a.compute(KEYS[:4])
    a.settle(10.0)
    weighs(a)
    a.shares(OTHER[:4])
    assert len(a.store.blocks) == 8
    # A store that is full, or off, takes nothing: the policy decides.
    a.remote.full = "full"
    assert a.space.reserve(ME, 2, None, KEYS[10:12]) == a.space.refuse(KEYS[10:12])
    a.remote.full = ""
    a.remote.break_down()
    assert a.space.reserve(ME, 1, None, OTHER[10:12]) == a.space.refuse(OTHER[10:12])


def test_a_store_that_is_only_read_is_no_reason_to_take_a_block(node: Callable[..., RemoteBench]) -> None:
    a = node(host_slots=4, options=RemoteRules(writes=False))
    a.compute(KEYS[:4])
    weighs(a)
    assert a.space.reserve(ME, 1, None, OTHER[:2]) == a.space.refuse(OTHER[:2])

"""The guarantees of a remote tier, on the one that reads other nodes' memory: a lender with a loop, and bytes over TCP,
by NIXL, and by a model of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbm.block import BlockKey, Outcome
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.tier import PeerTier
from kvbm.tiers.remote.contract import NOWHERE
from rigs.movers import ModelNetwork, model_mover, moves, needs_nixl, nixl_mover
from rigs.peers import LendingNode, Loads, Targets, content, keys_of, knows, open_tier, wait_until

KEYS = keys_of(16)
Movers = tuple[Mover | None, Mover | None]


@pytest.fixture(scope="module", params=["tcp", "model", pytest.param("nixl", marks=needs_nixl)])
def movers(request: pytest.FixtureRequest) -> Iterator[Movers]:
    """The lender's, and the reader's."""
    if request.param == "tcp":
        yield None, None
        return
    network = ModelNetwork()
    both = [model_mover(network) if request.param == "model" else nixl_mover() for _ in range(2)]
    yield both[0], both[1]
    for mover in both:
        mover.close()


@pytest.fixture
def lender(movers: Movers) -> Iterator[LendingNode]:
    node = LendingNode(mover=movers[0])
    yield node
    node.close()


def opened(lender: LendingNode, movers: Movers, **options: int) -> PeerTier:
    return open_tier([lender.peer], mover=movers[1], deadline_s=60.0, **options)


def by_the_mover(lender: LendingNode, tier: PeerTier, movers: Movers) -> None:
    """From now on blocks come as they shall."""
    if movers[1] is not None:
        wait_until(lambda: moves(lender, tier), "the lender knows the reader's memory")


def test_a_hit_brings_what_was_stored(lender: LendingNode, movers: Movers) -> None:
    lender.store(KEYS)
    tier = opened(lender, movers)
    try:
        wait_until(lambda: knows(tier, KEYS))
        by_the_mover(lender, tier, movers)
        places = tier.places(KEYS)
        assert places == list(range(places[0], places[0] + len(KEYS))), "a chain stored at once lies in a row"
        loads = Loads(tier)
        completion, targets = loads.load(KEYS[3:8])
        assert completion.outcome is Outcome.HIT
        assert completion.bytes_moved == 5 * lender.layout.block_bytes
        for index, key in enumerate(KEYS[3:8]):
            assert targets.block(index) == content(key)
            assert completion.blocks[index].engine_hash == key
        assert lender.server.counts["moved"] == (0 if movers[0] is None else 5)
        wait_until(lambda: lender.leased() == 0)
        assert tier.expected_s(1 << 20) > 0
        assert list(tier.news().came) == KEYS[3:8]
    finally:
        tier.close()


def test_what_comes_and_goes_is_told(lender: LendingNode, movers: Movers) -> None:
    tier = opened(lender, movers)
    try:
        assert tier.places(KEYS) == [NOWHERE] * len(KEYS)
        lender.store(KEYS[:4])
        wait_until(lambda: knows(tier, KEYS[:4]))
        assert tier.held_elsewhere(KEYS[:6]) == bytes((1, 1, 1, 1, 0, 0))
        loads = Loads(tier)
        loads.load(KEYS[:2])
        assert list(tier.news().came) == KEYS[:2]
        wait_until(lambda: lender.leased() == 0, "their leases are given back: a block in use is not dropped")
        lender.drop()
        wait_until(lambda: not any(tier.held_elsewhere(KEYS)))
        tier.tick()
        assert sorted(tier.news().gone) == sorted(KEYS[:2])
    finally:
        tier.close()


def test_a_block_that_went_costs_no_other(lender: LendingNode, movers: Movers) -> None:
    lender.store(KEYS[:4])
    tier = opened(lender, movers)
    try:
        wait_until(lambda: knows(tier, KEYS[:4]))
        by_the_mover(lender, tier, movers)
        missing = BlockKey(bytes(31) + b"\x01")
        loads = Loads(tier)
        completion, targets = loads.load([KEYS[0], missing, KEYS[2]])
        assert [end.outcome for end in completion.blocks] == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
        assert targets.block(2) == content(KEYS[2])
        assert completion.outcome is Outcome.MISS and not completion.corrupt
    finally:
        tier.close()


def test_no_more_than_the_limit(lender: LendingNode, movers: Movers) -> None:
    lender.store(KEYS[:4])
    tier = opened(lender, movers, pending_limit=3)
    try:
        wait_until(lambda: knows(tier, KEYS[:4]))
        by_the_mover(lender, tier, movers)
        loads = Loads(tier)
        with lender.hold():
            jobs = [loads.begin(KEYS[:2]) for _ in range(3)]
            assert tier.load_room == 0
            outcome = tier.submit_load(99, KEYS[:1], tier.places(KEYS)[0], Targets(1).blocks, None)
            assert outcome is Outcome.THROTTLED
        for job, targets in jobs:
            assert loads.wait(job).outcome is Outcome.HIT
            assert targets.block(1) == content(KEYS[1])
        assert tier.load_room == 3
    finally:
        tier.close()


def test_it_stores_nothing(lender: LendingNode, movers: Movers) -> None:
    tier = opened(lender, movers)
    try:
        assert tier.store_room == 0
        assert tier.submit_store(1, [], [], None) is Outcome.RETRY
    finally:
        tier.close()


def test_what_is_pending_when_it_closes_completes(lender: LendingNode, movers: Movers) -> None:
    lender.store(KEYS[:4])
    tier = opened(lender, movers)
    wait_until(lambda: knows(tier, KEYS[:4]))
    by_the_mover(lender, tier, movers)
    loads = Loads(tier)
    with lender.hold():
        job, targets = loads.begin(KEYS[:2])
        tier.close()
    loads.collect()
    assert loads.ended[job].outcome is Outcome.RETRY
    assert targets.block(0) == [b"\xa5" * lender.layout.slot_bytes] * 2

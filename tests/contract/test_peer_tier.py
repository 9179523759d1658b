"""The guarantees of a remote tier, on the one that reads other nodes' memory: over TCP, and a lender with a loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbm.block import BlockKey, Outcome
from kvbm.tiers.remote.contract import NOWHERE
from rigs.peers import LendingNode, Loads, Targets, content, keys_of, knows, open_tier, wait_until

KEYS = keys_of(16)


@pytest.fixture
def lender() -> Iterator[LendingNode]:
    node = LendingNode()
    yield node
    node.close()


def test_a_hit_brings_what_was_stored(lender: LendingNode) -> None:
    lender.store(KEYS)
    tier = open_tier([lender.peer])
    try:
        wait_until(lambda: knows(tier, KEYS))
        places = tier.places(KEYS)
        assert places == list(range(places[0], places[0] + len(KEYS))), "a chain stored at once lies in a row"
        loads = Loads(tier)
        completion, targets = loads.load(KEYS[3:8])
        assert completion.outcome is Outcome.HIT
        assert completion.bytes_moved == 5 * lender.layout.block_bytes
        for index, key in enumerate(KEYS[3:8]):
            assert targets.block(index) == content(key)
            assert completion.blocks[index].engine_hash == key
        wait_until(lambda: lender.leased() == 0)
        assert tier.expected_s(1 << 20) > 0
        assert list(tier.news().came) == KEYS[3:8]
    finally:
        tier.close()


def test_what_comes_and_goes_is_told(lender: LendingNode) -> None:
    tier = open_tier([lender.peer])
    try:
        assert tier.places(KEYS) == [NOWHERE] * len(KEYS)
        lender.store(KEYS[:4])
        wait_until(lambda: knows(tier, KEYS[:4]))
        assert tier.held_elsewhere(KEYS[:6]) == bytes((1, 1, 1, 1, 0, 0))
        loads = Loads(tier)
        loads.load(KEYS[:2])
        assert list(tier.news().came) == KEYS[:2]
        lender.drop()
        wait_until(lambda: not any(tier.held_elsewhere(KEYS)))
        tier.tick()
        assert sorted(tier.news().gone) == sorted(KEYS[:2])
    finally:
        tier.close()


def test_a_block_that_went_costs_no_other(lender: LendingNode) -> None:
    lender.store(KEYS[:4])
    tier = open_tier([lender.peer])
    try:
        wait_until(lambda: knows(tier, KEYS[:4]))
        missing = BlockKey(bytes(31) + b"\x01")
        loads = Loads(tier)
        completion, targets = loads.load([KEYS[0], missing, KEYS[2]])
        assert [end.outcome for end in completion.blocks] == [Outcome.HIT, Outcome.MISS, Outcome.HIT]
        assert targets.block(2) == content(KEYS[2])
        assert completion.outcome is Outcome.MISS and not completion.corrupt
    finally:
        tier.close()


def test_no_more_than_the_limit(lender: LendingNode) -> None:
    lender.store(KEYS[:4])
    tier = open_tier([lender.peer], pending_limit=3)
    try:
        wait_until(lambda: knows(tier, KEYS[:4]))
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


def test_it_stores_nothing(lender: LendingNode) -> None:
    tier = open_tier([lender.peer])
    try:
        assert tier.store_room == 0
        assert tier.submit_store(1, [], [], None) is Outcome.RETRY
    finally:
        tier.close()


def test_what_is_pending_when_it_closes_completes(lender: LendingNode) -> None:
    lender.store(KEYS[:4])
    tier = open_tier([lender.peer])
    wait_until(lambda: knows(tier, KEYS[:4]))
    loads = Loads(tier)
    with lender.hold():
        job, targets = loads.begin(KEYS[:2])
        tier.close()
    loads.collect()
    assert loads.ended[job].outcome is Outcome.RETRY
    assert targets.block(0) == [b"\xa5" * lender.layout.slot_bytes] * 2

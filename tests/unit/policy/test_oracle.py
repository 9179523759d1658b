"""`lru` against libCacheSim's on flat traces: every request one block, every block a chain of its own."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from kvbm.policy import EvictionPolicy, LeafFirstLru

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed")

OBJECTS = 3000
REQUESTS = 20_000
TRACES = [(1, 0.7, 50), (2, 0.7, 500), (3, 1.0, 100), (4, 1.0, 301), (5, 1.2, 20)]
"""Seed, skew of the Zipf distribution, capacity in blocks."""


def zipf(seed: int, skew: float) -> list[int]:
    weights = list(accumulate(1 / (rank + 1) ** skew for rank in range(OBJECTS)))
    return random.Random(seed).choices(range(OBJECTS), cum_weights=weights, k=REQUESTS)


def phases(seed: int, capacity: int) -> list[int]:
    """Loops longer and shorter than the capacity, scans, and popular blocks that change, in turns."""
    chance, requests, fresh = random.Random(seed), list[int](), 1_000_000
    while len(requests) < REQUESTS:
        first = chance.randrange(10) * 10_000
        length = chance.choice((capacity // 2, capacity + 1, capacity * 3 // 2, capacity * 2))
        kind = chance.randrange(4)
        if kind == 0:
            requests += list(range(first, first + length)) * chance.randint(2, 5)
        elif kind == 1:
            requests += range(fresh, fresh + length)
            fresh += length
        elif kind == 2:
            requests += [first + min(int(chance.paretovariate(0.7)), 9999) for _ in range(4 * length)]
        else:
            requests += [chance.randrange(first, first + length) for _ in range(2 * length)]
    return requests


def our_hits(policy: EvictionPolicy, capacity: int, requests: list[int]) -> int:
    slot_of: dict[int, int] = {}
    block_in: dict[int, int] = {}
    hits = 0
    for second, block in enumerate(requests):
        slot = slot_of.get(block, -1)
        policy.requested((block,), (slot,), float(second))
        if slot >= 0:
            hits += 1
            continue
        slot = len(slot_of)
        if slot == capacity:
            (slot,) = policy.victims(1, (block,), (), float(second))
            del slot_of[block_in[slot]]
        slot_of[block], block_in[slot] = slot, block
        policy.inserted((block,), (slot,), -1, float(second))
        policy.evictable((slot,))
    return hits


def their_hits(capacity: int, requests: list[int]) -> int:
    cache = libcachesim.LRU(capacity)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = 0
    for block in requests:
        request.obj_id = block + 1
        hits += cache.get(request)
    return hits


@pytest.mark.parametrize(("seed", "skew", "capacity"), TRACES)
def test_hits_are_equal(seed: int, skew: float, capacity: int) -> None:
    requests = zipf(seed, skew)
    assert our_hits(LeafFirstLru(capacity), capacity, requests) == their_hits(capacity, requests)


@pytest.mark.parametrize("capacity", [20, 60, 200])
def test_hits_are_equal_where_the_traffic_changes(capacity: int) -> None:
    requests = phases(capacity, capacity)
    assert our_hits(LeafFirstLru(capacity), capacity, requests) == their_hits(capacity, requests)

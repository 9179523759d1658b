"""Lookups of a model with several groups: what is leased, what is counted, and what is given up first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import pytest

from kvbm.block import BlockKey, Tier
from kvbm.grouping import LOOKED_UP_AT_ONCE, Grouping
from kvbm.groups import Group, GroupKind
from kvbm.hashing import chain_keys
from kvbm.layout import BlockLayout
from kvbm.manager.leases import Lease
from kvbm.manager.pool import SlotPool
from kvbm.manager.space import Space
from kvbm.policy import AdmitAll, LeafFirstLru
from kvbm.slices import advance
from kvbm.tiers.host import HostArena
from rigs.fake_tier import FakeTier
from rigs.space import KEYS, ME, Bench

WINDOW = Group(kind=GroupKind.WINDOW, reach=2)
GROUPING = Grouping((Group(), WINDOW, WINDOW))
LAYOUT = BlockLayout(block_tokens=4, shard_bytes=4096, groups=GROUPING.groups)
CHAIN = GROUPING.keys(KEYS, GROUPING.chain(0, 12))


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make(host_slots=64, disk_slots=64, layout=LAYOUT)


def store_tail(bench: Bench, boundary: int) -> None:
    places = GROUPING.tail(boundary)
    number = next(bench.numbers)
    groups = bytes(place.group for place in places)
    keys = GROUPING.keys(KEYS, places)
    bench.space.reserve(ME, number, CHAIN[boundary - 1], keys, group=groups)
    bench.space.commit(ME, number)


def looked_up(bench: Bench, blocks: int, skip: int = 0) -> Lease | None:
    return bench.space.lookup(ME, next(bench.numbers), KEYS[:blocks], skip)


def hits(bench: Bench) -> tuple[int, ...]:
    return tuple(
        int(bench.metrics.value(f"kvbm_hit_{what}_total", tier=tier))
        for what in ("blocks", "bytes")
        for tier in ("host", "disk")
    )


def test_blocks_of_the_prompt_are_counted_and_bytes_of_all_groups(bench: Bench) -> None:
    bench.store(CHAIN[:6])
    store_tail(bench, 6)
    lease = looked_up(bench, 8)
    assert lease is not None
    assert (lease.boundary, lease.prompt_blocks, len(lease.slots)) == (6, 6, 6 + 2 * 2)
    assert hits(bench) == (6, 0, 10 * LAYOUT.block_bytes, 0)
    assert bench.metrics.value("kvbm_queried_blocks_total") == 8


def test_a_device_that_holds_the_beginning_needs_the_tail_too(bench: Bench) -> None:
    bench.store(CHAIN[:6])
    store_tail(bench, 6)
    lease = looked_up(bench, 8, skip=4)
    assert lease is not None
    assert (lease.boundary, lease.prompt_blocks, len(lease.slots)) == (6, 2, 2 + 2 * 2)
    assert hits(bench) == (2, 0, 6 * LAYOUT.block_bytes, 0)
    assert looked_up(bench, 8, skip=6) is None


def test_bytes_are_of_the_tier_that_each_block_of_a_group_is_in(bench: Bench) -> None:
    bench.store(CHAIN[:6])
    store_tail(bench, 6)
    bench.finish_all()
    bench.space.clear("host")
    bench.store(CHAIN[:6])  # only the windows are on disk alone
    lease = looked_up(bench, 6)
    assert lease is not None
    assert [lease.sources.count(tier) for tier in (Tier.HOST, Tier.DISK)] == [6, 4]
    on_host, on_disk, host_bytes, disk_bytes = hits(bench)
    assert on_host + on_disk == 6
    assert 0 < on_disk < 6
    assert (host_bytes, disk_bytes) == (6 * LAYOUT.block_bytes, 4 * LAYOUT.block_bytes)


def test_without_the_tail_it_is_a_miss_of_no_bytes(bench: Bench) -> None:
    bench.store(CHAIN[:6])
    assert looked_up(bench, 8) is None
    assert hits(bench) == (0, 0, 0, 0)
    assert bench.metrics.value("kvbm_lookups_total", outcome="miss") == 1


@pytest.mark.parametrize("held_at", [0, 40])
def test_a_search_far_back_takes_turns_and_asks_little(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, held_at: int
) -> None:
    """Windows of 64 blocks, of which none is held behind a long prompt: each block is asked for a few times at most."""
    length, wide = 6000, Grouping((Group(), *[Group(kind=GroupKind.WINDOW, reach=64)] * 6))
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, groups=wide.groups)
    bench = make(host_slots=8192, disk=False, layout=layout)
    keys = chain_keys(bytes(32), range(length * 4), 4)
    for start in range(0, length, 1000):
        bench.store(keys[start : start + 1000], keys[start - 1] if start else None)
    places, number = wide.tail(held_at), next(bench.numbers)
    if places:
        groups = bytes(place.group for place in places)
        bench.space.reserve(ME, number, keys[held_at - 1], wide.keys(keys, places), group=groups)
        bench.space.commit(ME, number)
    pool, asked = bench.space.host_pool, [0]
    find_all = pool.find_all
    monkeypatch.setattr(
        pool, "find_all", lambda wanted: asked.__setitem__(-1, asked[-1] + len(wanted)) or find_all(wanted)
    )
    looking = bench.space.looking_up(ME, next(bench.numbers), keys, 0)
    while (found := advance(looking)) is None:
        asked.append(0)
    assert (found.full, found.lease.boundary if found.lease is not None else 0) == (length, held_at)
    assert max(asked) <= 2 * LOOKED_UP_AT_ONCE
    assert sum(asked) <= 3 * length


def test_the_oldest_window_of_a_boundary_is_given_up_first(make: Callable[..., Bench]) -> None:
    """Of a tail the last tokens' blocks serve longer prompts for longest."""
    bench = make(host_slots=6 + 4, disk=False, layout=LAYOUT)
    bench.store(CHAIN[:6])
    store_tail(bench, 6)
    tail = GROUPING.keys(KEYS, GROUPING.tail(6))
    bench.clock.advance(1.0)
    bench.store(GROUPING.keys(KEYS, GROUPING.chain(6, 8)), CHAIN[5])
    held = [bench.space.host_pool.holds(key) for key in tail]
    assert held == [True, True, False, False]
    assert [place.block for place in GROUPING.tail(6)] == [5, 5, 4, 4]


class Hears(LeafFirstLru):
    """Writes down what it is told."""

    def __init__(self, slot_count: int) -> None:
        super().__init__(slot_count)
        self.told: list[tuple[str, Sequence[Hashable]]] = []

    def requested(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        self.told.append(("chain", keys))
        super().requested(keys, slots, now_s)


class HearsTails(Hears):
    def requested_tail(self, keys: Sequence[Hashable], slots: Sequence[int], now_s: float) -> None:
        self.told.append(("tail", keys))

    def inserted_tail(
        self, keys: Sequence[Hashable], slots: Sequence[int], parent: int, now_s: float
    ) -> None:
        self.inserted(keys, slots, parent, now_s)


@pytest.mark.parametrize("knows", [True, False])
def test_policies_hear_of_a_request_once_and_of_the_tails_that_it_wants(
    make: Callable[..., Bench], knows: bool
) -> None:
    bench = make(host_slots=64, disk=False, layout=LAYOUT)
    policy = (HearsTails if knows else Hears)(64)
    bench.space.host_pool.policy = policy
    bench.store(CHAIN[:6])
    store_tail(bench, 4)
    looked_up(bench, 8)
    bench.finish_all()
    tails = [GROUPING.keys(KEYS, GROUPING.tail(boundary)) for boundary in (4, 6)]
    named = "tail" if knows else "chain"
    assert policy.told == [("chain", CHAIN[:8]), (named, tails[0]), (named, tails[1])]


def test_what_is_taken_up_counts_as_used_on_disk(make: Callable[..., Bench]) -> None:
    admission = CountsHits()
    bench = make(host_slots=64, disk_slots=64, layout=LAYOUT, admission=admission)
    bench.store(CHAIN[:6])
    store_tail(bench, 4)
    bench.finish_all()
    looked_up(bench, 8)
    bench.finish_all()
    assert admission.hits == [*CHAIN[:4], *GROUPING.keys(KEYS, GROUPING.tail(4))]


class CountsHits(AdmitAll):
    def __init__(self) -> None:
        self.hits: list[Hashable] = []

    def hit(self, key: Hashable, now_s: float) -> None:
        self.hits.append(key)


def marked(pool: SlotPool[BlockKey]) -> dict[BlockKey, bool]:
    return {key: pool.is_tail(slot) for slot, key in pool.resident()}


def test_blocks_of_tails_are_known_as_such_on_disk_after_a_restart_and_when_they_are_back(
    make: Callable[..., Bench],
) -> None:
    bench = make(host_slots=64, disk_slots=64, layout=LAYOUT)
    bench.store(CHAIN[:6])
    store_tail(bench, 6)
    bench.finish_all()
    expected = dict.fromkeys(CHAIN[:6], False) | dict.fromkeys(GROUPING.keys(KEYS, GROUPING.tail(6)), True)
    assert [marked(pool) for pool in bench.space.pools] == [expected] * 2
    bench.space.close(keep=True)
    bench.arena, bench.tier = HostArena(LAYOUT, 64, touch_threads=0), FakeTier(bench.medium)
    bench.space = Space(
        LAYOUT, bench.arena, bench.tier, AdmitAll(), bench.metrics, bench.clock, bench.progressed
    )
    assert [marked(pool) for pool in bench.space.pools] == [{}, expected]
    looked_up(bench, 8)
    bench.finish_all()
    assert [marked(pool) for pool in bench.space.pools] == [expected] * 2

"""`Space`: lookups and stores, the cases that a random walk meets too rarely."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvbm.block import BlockState, Outcome, Tier
from kvbm.manager.lookups import LEASE_S
from kvbm.manager.storing import RESERVATION_S
from kvbm.protocol import HELD, REFUSED
from kvbm.testing.oracle import block_bytes
from rigs.space import KEYS, LAYOUT, ME, OTHER, PEER, Bench

# ---- lookups


def test_a_run_over_both_tiers_is_brought_up_in_order(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:5])
    bench.store(KEYS[:2])
    lease = bench.space.lookup(PEER, 1, KEYS[:6], 0)
    assert lease is not None
    assert bytes(lease.sources) == bytes([Tier.HOST, Tier.HOST, Tier.DISK, Tier.DISK, Tier.DISK])
    assert (lease.ready, lease.final) == (2, False)
    bench.tier.release(1, first=1)  # the second of the three comes first
    bench.space.pump()
    assert (lease.ready, bench.progress) == (2, [])
    bench.tier.release(1)
    bench.space.pump()
    assert bench.progress == [(1, 4, False)]
    bench.finish_all()
    assert bench.progress == [(1, 4, False), (1, 5, True)]
    for key, slot in zip(KEYS, lease.slots, strict=False):
        assert bench.content(slot) == block_bytes(key, 0, LAYOUT.slot_bytes)


def test_a_run_does_not_go_on_behind_a_gap(bench: Bench) -> None:
    bench.store(KEYS[:4])
    bench.finish_all()
    assert bench.space.disk is not None
    bench.space.host_pool.evict(bench.space.host_pool.find(KEYS[1]))  # type: ignore[arg-type]
    bench.space.disk.pool.evict(bench.space.disk.pool.find(KEYS[1]))  # type: ignore[arg-type]
    lease = bench.space.lookup(PEER, 1, KEYS[:4], 0)
    assert lease is not None
    assert lease.keys == KEYS[:1]
    assert bench.space.lookup(PEER, 2, KEYS[:4], 1) is None
    later = bench.space.lookup(PEER, 3, KEYS[:4], 2)
    assert later is not None
    assert later.keys == KEYS[2:4]


def test_what_is_leased_is_not_evicted_for_its_own_continuation(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4)
    bench.only_on_disk(KEYS[:4])
    bench.only_on_disk(OTHER[:2])
    bench.space.clear("host")
    first = bench.space.lookup(PEER, 1, KEYS[:4], 0)
    assert first is not None
    assert len(first.slots) == 4
    assert bench.space.lookup(PEER, 2, OTHER[:2], 0) is None, "every host slot is on its way to somebody"
    bench.finish_all()
    assert first.ready == 4
    assert bench.space.lookup(PEER, 3, OTHER[:2], 0) is None, "every host slot is leased"
    bench.space.release(PEER, 1)
    assert bench.space.lookup(PEER, 4, OTHER[:2], 0) is not None


def test_two_leases_wait_for_one_load(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:3])
    mine = bench.space.lookup(ME, 1, KEYS[:3], 0)
    theirs = bench.space.lookup(PEER, 2, KEYS[:3], 1)
    assert mine is not None
    assert theirs is not None
    assert bench.tier.pending_count == 3
    bench.space.release(ME, 1)
    bench.finish_all()
    assert theirs.ready == 2
    assert bench.progress == [(2, 1, False), (2, 2, True)]
    assert bench.space.host_pool.counts().leased == 2


def test_a_load_that_nobody_waits_for_is_not_started(make: Callable[..., Bench]) -> None:
    bench = make(pending_limit=1)
    bench.only_on_disk(KEYS[:3])
    assert bench.space.lookup(ME, 1, KEYS[:3], 0) is not None
    assert bench.tier.pending_count == 1
    bench.space.release(ME, 1)
    bench.finish_all()
    assert bench.metrics.value("kvbm_transfer_seconds", source="disk", target="host") == 1
    assert bench.space.host_pool.counts().filling == 0


def test_a_corrupt_block_ends_the_run_and_is_dropped_everywhere(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:4])
    assert bench.space.disk is not None
    bench.medium.corrupt(bench.space.disk.pool.find(KEYS[2]))  # type: ignore[arg-type]
    lease = bench.space.lookup(ME, 1, KEYS[:4], 0)
    assert lease is not None
    generations = [bench.arena.generation(slot) for slot in lease.slots]
    slots = list(lease.slots)
    bench.finish_all()
    assert (lease.ready, lease.final, len(lease.slots)) == (2, True, 2)
    assert bench.progress[-1] == (1, 2, True)
    assert bench.metrics.value("kvbm_failures_total", tier="disk", kind="corrupt") == 1
    assert not bench.space.disk.pool.holds(KEYS[2])
    assert bench.space.host_pool.find(KEYS[2]) is None
    assert bench.arena.generation(slots[2]) > generations[2], "a worker that waits for it must notice"
    assert bench.space.host_pool.find(KEYS[3]) is not None, "it arrived, though this run ends before it"
    assert not bench.space.host_pool.is_leased(bench.space.host_pool.find(KEYS[3]))  # type: ignore[arg-type]


def test_blocks_that_came_before_the_one_that_failed_are_let_go(bench: Bench) -> None:
    """The run ends before it, and what lay ready behind it is nobody's any more."""
    bench.only_on_disk(KEYS[:4])
    assert bench.space.disk is not None
    bench.medium.corrupt(bench.space.disk.pool.find(KEYS[1]))  # type: ignore[arg-type]
    lease = bench.space.lookup(ME, 1, KEYS[:4], 0)
    assert lease is not None
    for first in (3, 2, 0, 0):
        bench.tier.release(1, first)
        bench.space.pump()
    assert (lease.ready, lease.final, lease.keys) == (1, True, KEYS[:1])
    assert bench.space.host_pool.counts().leased == 1
    bench.space.release(ME, 1)
    assert bench.space.host_pool.counts().leased == 0


def test_a_tier_that_refuses_at_once_leaves_no_lease_behind(bench: Bench) -> None:
    """The tier may turn off between the question whether it works and the first load."""
    bench.only_on_disk(KEYS[:2])

    def refuse(*arguments: object) -> Outcome:
        return Outcome.RETRY

    bench.tier.submit_load = refuse  # type: ignore[method-assign]
    assert bench.space.lookup(ME, 1, KEYS[:2], 0) is None
    assert len(bench.space.leases) == 0
    assert bench.space.host_pool.counts().filling == 0
    assert bench.space.disk is not None
    assert bench.space.disk.pool.counts().leased == 0


def test_a_block_that_an_engine_is_storing_is_not_found(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:2])
    assert bench.space.reserve(ME, 1, None, KEYS[:1])[0] >= 0
    assert bench.space.lookup(PEER, 2, KEYS[:2], 0) is None
    assert bench.space.host_pool.counts().leased == 0


def test_a_number_in_use_is_refused(bench: Bench) -> None:
    bench.store(KEYS[:2])
    lease = bench.space.lookup(ME, 5, KEYS[:2], 0)
    assert bench.space.lookup(ME, 5, KEYS[:1], 0) is None
    assert bench.space.leases.get(ME, 5) is lease
    assert bench.space.lookup(PEER, 5, KEYS[:1], 0) is not None, "numbers are each owner's own"


def test_one_key_twice_in_a_question_is_no_harm(bench: Bench) -> None:
    bench.only_on_disk(KEYS[:1])
    lease = bench.space.lookup(ME, 1, [KEYS[0], KEYS[0], KEYS[1]], 0)
    assert lease is not None
    bench.finish_all()
    assert lease.ready == 2
    bench.space.release(ME, 1)
    assert bench.space.host_pool.counts().leased == 0


def test_leases_of_one_owner_are_bounded(bench: Bench) -> None:
    bench.store(KEYS[:1])
    bound = bench.space.leases.per_owner_max
    for number in range(bound):
        assert bench.space.lookup(ME, number + 1, KEYS[:1], 0) is not None
    assert bench.space.lookup(ME, bound + 1, KEYS[:1], 0) is None
    assert bench.space.lookup(PEER, 1, KEYS[:1], 0) is not None
    assert bench.metrics.value("kvbm_lookups_total", outcome="throttled") == 1


# ---- stores


def test_a_store_asks_only_for_what_is_missing(bench: Bench) -> None:
    bench.store(KEYS[:2])
    answer = bench.space.reserve(PEER, 1, None, KEYS[:4])
    assert answer[:2] == [HELD, HELD]
    assert min(answer[2:]) >= 0
    assert bench.space.reserve(ME, 2, None, KEYS[:4]) == [HELD] * 4
    assert bench.space.reservations.get(ME, 2) is None


def test_without_its_prefix_a_block_gets_no_slot(bench: Bench) -> None:
    assert bench.space.reserve(ME, 1, KEYS[3], KEYS[4:6]) == [REFUSED, REFUSED]
    assert bench.space.host_pool.counts().filling == 0
    bench.only_on_disk(KEYS[:4])
    assert min(bench.space.reserve(ME, 2, KEYS[3], KEYS[4:6])) >= 0, "a prefix on disk is a prefix"


def test_a_host_pool_full_of_leases_refuses_and_counts(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=3)
    bench.store(KEYS[:3])
    bench.finish_all()
    assert bench.space.lookup(ME, 1, KEYS[:3], 0) is not None
    assert bench.space.reserve(ME, 2, None, OTHER[:2]) == [REFUSED, REFUSED]
    assert bench.metrics.value("kvbm_skipped_offloads_total", reason="full") == 2


def test_a_long_store_never_evicts_its_own_prefix(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=4)
    bench.store(KEYS[:2])
    bench.finish_all()
    answer = bench.space.reserve(ME, 100, KEYS[1], KEYS[2:8])
    assert [slot >= 0 for slot in answer] == [True, True, False, False, False, False]
    assert all(bench.space.host_pool.holds(key) for key in KEYS[:4])


POLICIES = ("gittins", "lru")


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "host alone"])
@pytest.mark.parametrize("host_slots", [1, 2, 9])
def test_two_requests_longer_than_host_memory_both_get_on(
    make: Callable[..., Bench], eviction: str, disk: bool, host_slots: int
) -> None:
    """Side by side, over and over: no answer waits for the other, what is found is a head, and some is found."""
    bench = make(host_slots=host_slots, disk_slots=64, eviction=eviction, disk=disk)
    chains = {ME: KEYS[:24], PEER: OTHER[:24]}
    found: dict[int, int] = {ME: 0, PEER: 0}
    numbers = itertools.count(1000)
    for _ in range(4):
        chains = dict(reversed(chains.items()))  # who asks first finds what there is room for
        number = next(numbers)
        leases = {owner: bench.space.lookup(owner, number, keys, 0) for owner, keys in chains.items()}
        bench.finish_all()
        for owner, keys in chains.items():
            lease = leases[owner]
            if lease is not None:
                assert lease.final, "nobody waits for what cannot come"
                assert lease.keys == keys[: lease.ready]
                assert lease.ready <= host_slots
                found[owner] += lease.ready
            bench.space.release(owner, number)
        for start in range(0, 24, 4):
            for owner, keys in chains.items():
                number = next(numbers)
                bench.space.reserve(
                    owner, number, keys[start - 1] if start else None, keys[start : start + 4]
                )
                bench.space.commit(owner, number)
            bench.finish_all()
            bench.clock.advance(0.1)
        bench.space.check()
    counts = bench.space.host_pool.counts()
    assert (counts.filling, counts.leased) == (0, 0)
    assert sum(found.values()) > 0
    if disk:
        assert min(found.values()) > 0, "what was pushed out comes back from disk"


def test_a_run_that_host_memory_cannot_hold_is_cut_and_what_lies_there_stays(
    make: Callable[..., Bench],
) -> None:
    bench = make(host_slots=6, disk_slots=32)
    bench.space.reserve(ME, 1, None, KEYS[:6])
    bench.space.commit(ME, 1)
    bench.finish_all()
    bench.space.clear("host")
    bench.space.reserve(ME, 2, KEYS[5], KEYS[6:12])
    bench.space.commit(ME, 2)
    bench.finish_all()
    # The first six on disk, the next six in both: the run's own end makes room for its head.
    lease = bench.space.lookup(PEER, 3, KEYS[:20], 0)
    assert lease is not None
    bench.finish_all()
    assert (lease.ready, lease.final, lease.keys) == (6, True, KEYS[:6])
    assert bench.space.lookup(ME, 4, OTHER[:3], 0) is None
    bench.space.release(PEER, 3)
    bench.store(OTHER[:3])
    assert bench.space.lookup(ME, 5, OTHER[:3], 0) is not None


def test_of_a_store_that_failed_in_part_the_rest_is_kept(bench: Bench) -> None:
    slots = bench.space.reserve(ME, 1, None, KEYS[:4])
    for key, slot in zip(KEYS, slots, strict=False):
        bench.fill(slot, key)
    assert bench.space.commit(ME, 1, (1, 17, -1)) == 3, "positions that do not exist mean nothing"
    assert [bench.space.host_pool.find(key) is not None for key in KEYS[:4]] == [True, False, True, True]
    bench.space.check()


def test_a_store_under_way_when_the_cache_is_cleared_is_given_back(bench: Bench) -> None:
    bench.space.reserve(ME, 1, None, KEYS[:2])
    assert bench.space.clear() == (0, 2)
    assert bench.space.commit(ME, 1) == 0
    assert bench.space.host_pool.counts().free == 8


def test_clearing_disk_leaves_a_store_to_host_memory_alone(bench: Bench) -> None:
    bench.only_on_disk(OTHER[:2])
    bench.space.reserve(ME, 100, None, KEYS[:2])
    assert bench.space.clear("disk") == (2, 0)
    assert bench.space.commit(ME, 100) == 2


def test_clearing_takes_continuations_before_their_prefix(bench: Bench) -> None:
    """And gives back every slot, in whatever order the blocks lie."""
    bench.store(KEYS[:6])
    bench.finish_all()
    lease = bench.space.lookup(ME, 50, KEYS[:3], 0)
    assert lease is not None
    assert bench.space.clear() == (3 + 6, 3)
    bench.space.check()
    assert bench.space.clear() == (0, 3)
    assert [bench.space.host_pool.find(key) is not None for key in KEYS[:6]] == [True] * 3 + [False] * 3


# ---- time


def test_what_runs_out_ends(bench: Bench) -> None:
    bench.store(KEYS[:2])
    bench.finish_all()
    bench.space.lookup(ME, 1, KEYS[:2], 0)
    bench.space.reserve(ME, 2, KEYS[1], KEYS[2:3])
    bench.clock.advance(min(LEASE_S, RESERVATION_S) - 1.0)
    assert bench.space.overdue() == []
    assert bench.space.host_pool.counts().leased == 2
    bench.clock.advance(2.0 + abs(LEASE_S - RESERVATION_S))
    (expired,) = bench.space.expire_leases()
    assert (expired.number, expired.final) == (1, True)
    (overdue,) = bench.space.overdue()
    assert overdue.keys == KEYS[2:3]
    assert bench.space.host_pool.counts().leased == 0
    overdue.condemned = True
    assert bench.space.overdue() == [], "condemned once"
    assert bench.space.commit(ME, 2) == 0
    assert bench.space.host_pool.state_of(overdue.slots[0]) is BlockState.FILLING, (
        "its worker may still write"
    )
    bench.space.abort(overdue)
    assert bench.space.host_pool.counts().filling == 0

"""A lookup in several turns: what others do in between, and what it finds then."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.manager.lookups import LEASE_S, Found, LookingUp
from kvbm.slices import advance
from rigs.space import KEYS, ME, OTHER, PEER, Bench

AT_ONCE = 2


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    bench = make(host_slots=16, disk_slots=32, run_blocks_max=4, brought_at_once=AT_ONCE)
    bench.only_on_disk(KEYS[:8])
    return bench


def begun(bench: Bench, owner: int = ME) -> LookingUp:
    """A lookup of eight blocks of which the first part is on its way."""
    looking = bench.space.looking_up(owner, 1, KEYS[:8], 0)
    assert advance(looking) is advance(looking) is None
    return looking


def ended(looking: LookingUp) -> Found:
    while (found := advance(looking)) is None:
        pass
    return found


def nothing_held(bench: Bench) -> bool:
    bench.finish_all()
    bench.space.check()
    return not any(pool.counts().leased or pool.counts().filling for pool in bench.space.pools)


def test_it_takes_as_many_turns_as_it_has_parts(bench: Bench) -> None:
    looking = bench.space.looking_up(ME, 1, KEYS[:8], 0)
    parts = 0
    while (found := advance(looking)) is None:
        assert bench.space.disk is not None
        assert bench.space.disk.onboarder.queued_count == parts * AT_ONCE
        parts += 1
    assert parts == 5
    assert found.lease is not None and found.lease.keys == KEYS[:8]
    bench.finish_all()
    assert (found.lease.ready, found.lease.final) == (8, True)


def test_what_was_read_meanwhile_is_ready_in_the_answer(bench: Bench) -> None:
    looking = begun(bench)
    bench.finish_all()
    found = ended(looking)
    assert found.lease is not None
    assert (found.lease.ready, found.lease.final) == (2, False)
    bench.finish_all()
    assert found.lease.ready == 8


def test_blocks_that_left_the_disk_meanwhile_end_it(bench: Bench) -> None:
    looking = begun(bench)
    assert bench.space.disk is not None
    slot = bench.space.disk.pool.find(KEYS[5])
    assert slot is not None
    bench.space.disk.pool.evict(slot)
    found = ended(looking)
    assert found.lease is not None
    assert (found.lease.keys, found.no_room) == (KEYS[:5], 3)
    bench.finish_all()
    assert (found.lease.ready, found.lease.final) == (5, True)
    bench.space.release(ME, 1)
    assert nothing_held(bench)


def test_blocks_that_reached_host_memory_meanwhile_are_pinned(bench: Bench) -> None:
    looking = begun(bench)
    whole = bench.space.lookup(PEER, 1, KEYS[:8], 0)
    assert whole is not None
    bench.finish_all()
    bench.space.release(PEER, 1)
    found = ended(looking)
    assert found.lease is not None
    assert (found.lease.ready, found.lease.final) == (8, True)
    assert [bench.space.host_pool.find(key) for key in KEYS[:8]] == found.lease.slots
    bench.space.release(ME, 1)
    assert nothing_held(bench)


def test_blocks_on_their_way_for_another_are_waited_for(bench: Bench) -> None:
    looking = begun(bench)
    assert bench.space.lookup(PEER, 1, KEYS[:8], 0) is not None
    found = ended(looking)
    assert found.lease is not None and found.lease.slots == [
        bench.space.host_pool.find_filling(key) for key in KEYS[:8]
    ]
    bench.finish_all()
    assert found.lease.ready == 8


def test_host_memory_that_filled_up_meanwhile_cuts_it(bench: Bench) -> None:
    looking = begun(bench)
    slots = bench.space.reserve(PEER, 9, None, OTHER[:13])
    assert min(slots) >= 0
    found = ended(looking)
    assert found.lease is not None
    assert (found.lease.keys, found.no_room) == (KEYS[:3], 5)


def test_an_owner_that_went_meanwhile_holds_nothing(bench: Bench) -> None:
    looking = begun(bench)
    bench.finish_all()
    assert bench.space.release(ME, 1) is not None
    looking.close()
    assert len(bench.space.leases) == 0
    assert nothing_held(bench)


def test_a_lookup_whose_time_is_over_found_nothing(bench: Bench) -> None:
    looking = begun(bench)
    bench.clock.advance(LEASE_S + 1.0)
    bench.space.expire_leases()
    assert ended(looking) == Found()
    assert nothing_held(bench)


def test_a_lookup_that_is_given_up_holds_nothing(bench: Bench) -> None:
    looking = begun(bench)
    bench.finish_all()
    looking.close()
    assert len(bench.space.leases) == 0
    assert nothing_held(bench)


def test_a_failure_in_a_later_part_gives_the_pins_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = begun(bench)
    bench.finish_all()

    def broken(*args: object, **kwargs: object) -> list[int]:
        raise AssertionError("a policy's")

    monkeypatch.setattr(bench.space.host_pool, "reserve_chain", broken)
    with pytest.raises(AssertionError, match="a policy's"):
        ended(looking)
    assert len(bench.space.leases) == 0
    assert nothing_held(bench)

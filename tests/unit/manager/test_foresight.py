"""Sessions in a space: their blocks come up just before they are expected, a parent's when its child ends; below what
engines wait for, and bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.hashing import chain_keys
from kvbm.hints import Outcome, Why
from kvbm.manager.foresight import EARLY_S_MAX, LAST_LOOK_S
from kvbm.manager.leases import PREFETCHES
from kvbm.manager.prefetching import UNASKED_S_MAX
from rigs.foresight import hears, metric, on_host, turn
from rigs.space import KEYS, ME, OTHER, Bench

CHAINS = [chain_keys(bytes(32), range(first, first + 40), 4) for first in range(5000, 5600, 100)]


@pytest.fixture
def roomy(make: Callable[..., Bench]) -> Bench:
    return make(host_slots=64, disk_slots=128, pending_limit=64)


# ---- expected back


def test_a_session_that_is_expected_has_its_blocks_just_before(roomy: Bench) -> None:
    assert turn(roomy, KEYS[:3], KEYS[3:5], session="a", expect_s=20.0) == ()
    roomy.space.clear("host")
    roomy.clock.advance(9.9)
    roomy.finish_all()
    assert on_host(roomy, KEYS[:5]) == 0, "too early"
    roomy.clock.advance(0.2)
    roomy.finish_all()
    assert on_host(roomy, KEYS[:5]) == 5, "what was generated is asked for too"
    assert roomy.space.host_pool.counts().leased == 0
    assert metric(roomy, "prefetched_blocks", cause="expected") == 5
    hears(roomy, KEYS[:6], session="a")
    assert metric(roomy, "prefetched_blocks_ended", cause="expected", fate="asked") == 5


def test_what_was_evicted_again_comes_once_more_just_before_the_time(roomy: Bench) -> None:
    turn(roomy, KEYS[:3], KEYS[3:5], session="a", expect_s=60.0)
    roomy.space.clear("host")
    roomy.clock.advance(31.0)
    roomy.finish_all()
    assert on_host(roomy, KEYS[:5]) == 5
    roomy.space.clear("host")
    assert metric(roomy, "prefetched_blocks_ended", cause="expected", fate="evicted") == 5
    roomy.clock.advance(29.0 - LAST_LOOK_S + 0.1)
    roomy.finish_all()
    assert on_host(roomy, KEYS[:5]) == 5


def test_after_a_long_pause_nothing_comes_up_long_before(roomy: Bench) -> None:
    turn(roomy, KEYS[:3], [], session="a", expect_s=3600.0)
    roomy.space.clear("host")
    roomy.clock.advance(3600.0 - EARLY_S_MAX - 1.0)
    roomy.finish_all()
    assert on_host(roomy, KEYS[:3]) == 0
    roomy.clock.advance(2.0)
    roomy.finish_all()
    assert on_host(roomy, KEYS[:3]) == 3


def test_a_session_that_has_come_back_is_not_waited_for(roomy: Bench) -> None:
    turn(roomy, KEYS[:3], [], session="a", expect_s=20.0)
    hears(roomy, OTHER[:2], session="a")
    roomy.space.clear("host")
    roomy.clock.advance(100.0)
    roomy.finish_all()
    assert on_host(roomy, KEYS[:3]) == 0


def test_one_that_is_queued_is_left_when_the_session_comes(roomy: Bench) -> None:
    turn(roomy, KEYS[:3], [], session="a", expect_s=20.0)
    roomy.only_on_disk(OTHER[:3])
    roomy.space.lookup(ME, 900, OTHER[:3], 0)
    roomy.clock.advance(11.0)
    roomy.space.pump()
    assert roomy.space.foresight.prefetching.coming == 3
    hears(roomy, OTHER[:2], session="a")
    assert roomy.space.foresight.prefetching.coming == 0
    roomy.finish_all()
    assert on_host(roomy, KEYS[:3]) == 0


def test_what_nobody_asks_for_is_told_after_a_while(roomy: Bench) -> None:
    turn(roomy, KEYS[:3], [], session="a", expect_s=1.0)
    roomy.space.clear("host")
    roomy.clock.advance(1.0)
    roomy.finish_all()
    roomy.clock.advance(UNASKED_S_MAX + 1)
    roomy.space.pump()
    assert metric(roomy, "prefetched_blocks_ended", cause="expected", fate="unasked") == 3
    assert not roomy.space.foresight.prefetching._taken


# ---- prefetch, parent, final


def test_prefetch_brings_up_what_is_known_of_the_session_beyond_the_request(roomy: Bench) -> None:
    turn(roomy, KEYS[:6], KEYS[6:8], session="a")
    roomy.space.clear("host")
    assert hears(roomy, KEYS[:1], session="a", prefetch=True) == ()
    roomy.finish_all()
    assert on_host(roomy, KEYS[:8]) == 8
    assert metric(roomy, "prefetched_blocks", cause="session") == 7


def test_a_second_lookup_of_the_request_does_not_end_what_the_first_began(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=64, disk_slots=128, pending_limit=64)
    turn(bench, KEYS[:6], [], session="a")
    bench.only_on_disk(OTHER[:3])
    bench.space.clear("host")
    bench.space.lookup(ME, 900, OTHER[:3], 0)
    for again in (False, True):
        assert hears(bench, CHAINS[0][:1], again=again, session="a", prefetch=True) == ()
        assert bench.space.foresight.prefetching.coming == 6
    bench.finish_all()
    assert on_host(bench, KEYS[:6]) == 6


def test_a_space_that_ends_begins_no_more_reads(roomy: Bench) -> None:
    turn(roomy, KEYS[:6], [], session="a")
    roomy.only_on_disk(OTHER[:3])
    roomy.space.clear("host")
    roomy.space.lookup(ME, 900, OTHER[:3], 0)
    hears(roomy, CHAINS[0][:1], session="a", prefetch=True)
    roomy.stop()
    assert len(roomy.space.leases) == 0


def test_a_new_session_brings_up_its_parents(roomy: Bench) -> None:
    turn(roomy, KEYS[:4], KEYS[4:6], session="a")
    roomy.space.clear("host")
    assert hears(roomy, OTHER[:2], session="child", parent="a", prefetch=True) == ()
    roomy.finish_all()
    assert on_host(roomy, KEYS[:6]) == 6


def test_the_end_of_a_session_wakes_its_parent(roomy: Bench) -> None:
    turn(roomy, KEYS[:4], KEYS[4:6], session="a")
    turn(roomy, OTHER[:2], [], session="child", parent="a", expect_s=1.0)
    roomy.space.clear("host")
    assert turn(roomy, OTHER[:3], [], session="child", parent="a", final=True) == ()
    assert on_host(roomy, KEYS[:6]) == 6
    assert metric(roomy, "prefetched_blocks", cause="parent") == 6
    assert roomy.space.foresight.sessions.get("", "child") is None
    assert roomy.space.foresight.sessions.get("", "a") is not None


def test_a_session_that_ended_comes_up_no_more(roomy: Bench) -> None:
    turn(roomy, KEYS[:4], [], session="a", expect_s=5.0)
    turn(roomy, KEYS[:5], [], session="a", expect_s=5.0, final=True)
    roomy.space.clear("host")
    roomy.clock.advance(60.0)
    roomy.finish_all()
    assert on_host(roomy, KEYS[:5]) == 0
    assert roomy.space.foresight.sessions.count == 0


def test_another_tenants_session_is_unknown(roomy: Bench) -> None:
    turn(roomy, KEYS[:4], [], session="a", tenant="mine")
    roomy.space.clear("host")
    (verdict,) = hears(roomy, OTHER[:2], tenant="theirs", session="b", parent="a", final=True)
    assert (verdict.part, verdict.why) == ("parent", Why.NOTHING)
    (verdict,) = hears(roomy, OTHER[:2], tenant="theirs", session="a", prefetch=True)
    assert (verdict.part, verdict.outcome, verdict.why) == ("prefetch", Outcome.REJECTED, Why.NOTHING)
    roomy.finish_all()
    assert on_host(roomy, KEYS[:4]) == 0


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ({"prefetch": True}, "prefetch"),
        ({"session": "new", "prefetch": True}, "prefetch"),
        ({"session": "a", "prefetch": True}, "prefetch"),
        ({"session": "new", "parent": "nobody", "final": True}, "parent"),
        ({"session": "new", "parent": "new", "final": True}, "parent"),
        ({"parent": "a"}, "parent"),
        ({"demote": True}, "demote"),
    ],
)
def test_what_cannot_be_done_is_told(roomy: Bench, said: dict[str, object], part: str) -> None:
    turn(roomy, KEYS[:3], [], session="a")
    (verdict,) = hears(roomy, KEYS[:3], **said)  # type: ignore[arg-type]  # what it says
    assert (verdict.part, verdict.outcome, verdict.why) == (part, Outcome.REJECTED, Why.NOTHING)
    assert verdict.reason
    assert hears(roomy, KEYS[:3], again=True, **said) == ()  # type: ignore[arg-type]  # what it says


@pytest.mark.parametrize(
    "said",
    [
        {"session": "a"},
        {"session": "a", "expect_s": 3.0},
        {"expect_s": 3.0},
        {"final": True},
        {"session": "a", "parent": "later"},
        {"session": "a", "demote": True, "expect_s": 3.0},
        {},
    ],
)
def test_what_is_done_has_no_verdict_of_its_own(roomy: Bench, said: dict[str, object]) -> None:
    assert hears(roomy, KEYS[:3], **said) == ()  # type: ignore[arg-type]  # what it says


def test_without_a_disk_nothing_can_be_brought_up(make: Callable[..., Bench]) -> None:
    bench = make(disk=False)
    assert hears(bench, KEYS[:3], session="a", expect_s=2.0) == ()
    said = {"session": "a", "prefetch": True, "demote": True, "final": True, "parent": "b"}
    decided = hears(bench, KEYS[:3], **said)  # type: ignore[arg-type]  # what it says
    assert {(each.part, each.why) for each in decided} == {
        (part, Why.NOTHING) for part in ("prefetch", "demote", "parent")
    }
    bench.space.finished(KEYS[2], 1)
    assert bench.space.foresight.sessions.count == 0


# ---- below demand


def test_what_engines_wait_for_is_read_first(make: Callable[..., Bench]) -> None:
    bench = make(host_slots=64, disk_slots=128, pending_limit=1)
    turn(bench, KEYS[:6], [], session="a", expect_s=2.0)
    bench.only_on_disk(OTHER[:4])
    bench.space.clear("host")
    demanded = bench.space.lookup(ME, 900, OTHER[:4], 0)
    assert demanded is not None
    bench.clock.advance(2.0)
    for ready in range(4):
        bench.space.pump()
        assert (demanded.ready, bench.space.leases.of(PREFETCHES)) == (ready, [])
        assert bench.tier.release(1)
    bench.finish_all()
    assert on_host(bench, KEYS[:6]) == 6


def test_pieces_are_small_and_each_waits_for_demand(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm.manager.prefetching.PIECE_BLOCKS", 2)
    monkeypatch.setattr("kvbm.manager.prefetching.LOOKED_AT_ONCE", 2)
    bench = make(host_slots=64, disk_slots=128, pending_limit=64)
    turn(bench, KEYS[:6], [], session="a", expect_s=2.0)
    bench.only_on_disk(OTHER[:4])
    bench.space.clear("host")
    bench.clock.advance(2.0)
    bench.space.pump()
    (piece,) = bench.space.leases.of(PREFETCHES)
    assert piece.keys == KEYS[:2]
    joined = bench.space.lookup(ME, 900, KEYS[:1], 0)
    demanded = bench.space.lookup(ME, 901, OTHER[:4], 0)
    assert joined is not None
    assert demanded is not None
    bench.tier.release(2)
    bench.space.pump()
    assert (joined.ready, bench.space.leases.of(PREFETCHES)) == (1, []), "the lookups' reads come first"
    bench.tier.release(4)
    bench.space.pump()
    (piece,) = bench.space.leases.of(PREFETCHES)
    assert (demanded.ready, piece.keys) == (4, KEYS[2:4])
    bench.finish_all()
    assert on_host(bench, KEYS[:6]) == 6


def test_a_dropped_session_leaves_no_keys_behind(make: Callable[..., Bench]) -> None:
    """However long the disk is busy: the keys of prefetches are those of sessions, which are bounded."""
    bench = make(host_slots=64, disk_slots=128, pending_limit=64)
    for number in (0, 1):
        turn(bench, CHAINS[number][:6], [], session=str(number))
    bench.only_on_disk(OTHER[:3])
    bench.space.clear("host")
    bench.space.lookup(ME, 900, OTHER[:3], 0)
    foresight = bench.space.foresight
    for number in (0, 1):
        hears(bench, CHAINS[number][:1], session=str(number), prefetch=True)
        if not number:
            dropped = foresight.sessions.get("", "0")
            assert dropped is not None
            foresight.sessions.drop(dropped)
    assert [job.session is dropped for job in foresight.prefetching._jobs] == [False]
    assert foresight.prefetching.coming == 5, "the request itself asks for the first"


def test_a_block_that_is_damaged_ends_the_prefetch(roomy: Bench) -> None:
    turn(roomy, KEYS[:6], [], session="a", expect_s=2.0)
    roomy.space.clear("host")
    assert roomy.space.disk is not None
    roomy.medium.corrupt(roomy.space.disk.pool.find(KEYS[2]))  # type: ignore[arg-type]
    roomy.clock.advance(2.0)
    roomy.finish_all()
    prefetching = roomy.space.foresight.prefetching
    assert (prefetching.coming, prefetching._taken[""]) == (0, 2)
    assert roomy.space.host_pool.counts().leased == 0


# ---- bounds


def test_what_is_brought_up_unasked_is_bounded_and_shared_among_tenants(roomy: Bench) -> None:
    for number, chain in enumerate(CHAINS[:4]):
        turn(roomy, chain[:10], [], session=str(number), tenant=str(number % 2))
    roomy.space.clear("host")
    prefetching = roomy.space.foresight.prefetching
    assert prefetching.blocks_max == 16
    (verdict,) = hears(roomy, OTHER[:1], tenant="0", session="0", prefetch=True)
    assert (verdict.part, verdict.outcome, verdict.why) == ("prefetch", Outcome.CLIPPED, Why.BUDGET)
    roomy.finish_all()
    assert on_host(roomy, CHAINS[0]) == 8, "half of it, while nobody else has a part"
    (verdict,) = hears(roomy, OTHER[:1], tenant="0", session="2", prefetch=True)
    assert (verdict.outcome, verdict.why) == (Outcome.REJECTED, Why.BUDGET)
    (verdict,) = hears(roomy, OTHER[:1], tenant="1", session="1", prefetch=True)
    assert verdict.outcome is Outcome.CLIPPED
    roomy.finish_all()
    assert on_host(roomy, CHAINS[1]) == 5, "a third"
    assert metric(roomy, "prefetch_refused_blocks", cause="session") == 2 + 10 + 5
    hears(roomy, CHAINS[0][:8], tenant="0")
    assert prefetching.room("0") == 5, "what was asked for counts no more"


def test_blocks_that_leave_unasked_make_room_again(roomy: Bench) -> None:
    turn(roomy, CHAINS[0][:8], [], session="a")
    roomy.space.clear("host")
    hears(roomy, OTHER[:1], session="a", prefetch=True)
    roomy.finish_all()
    assert roomy.space.foresight.prefetching.room("") == 0
    roomy.space.clear("host")
    assert roomy.space.foresight.prefetching.room("") == 8
    assert metric(roomy, "prefetched_blocks_ended", cause="session", fate="evicted") == 8

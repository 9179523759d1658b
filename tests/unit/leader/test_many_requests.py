"""Many requests at one leader: whose lookup goes out, and who waits for another's load."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.rigs.leader import FINGERPRINT, HASHES, LEASE_S, TABLE, Bench

from kvbm.block import KEY_BYTES
from kvbm.framing import OUTGOING_BYTES_MAX
from kvbm.hashing import split_keys
from kvbm.leader.cost import WORST_TOKENS_PER_S
from kvbm.leader.joint_loads import WAIT_S_MAX, JointLoads
from kvbm.leader.patience import (
    ASSUMED_TOKENS_PER_S,
    REPLY_DEADLINE_S,
    REPLY_DEADLINE_S_MAX,
    SILENCE_S_MAX,
)
from kvbm.leader.tracked import Answer
from kvbm.protocol import Lookup, Progress, Ready, Release


def narrow(bench: Bench, lease_blocks: int) -> None:
    """The manager gives the engine's leases so many blocks."""
    bench.manager.send(
        Ready(
            ready=True,
            epoch=7,
            fingerprint=FINGERPRINT,
            lease_s=LEASE_S,
            tiers={"host": 100},
            lease_blocks=lease_blocks,
        )
    )
    bench.step()


def lookups(bench: Bench) -> list[Lookup]:
    return [message for message in bench.manager.said() if isinstance(message, Lookup)]


def test_requests_beyond_the_share_are_looked_up_when_those_before_them_went_on(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    narrow(bench, 10)
    for request in ("a", "b"):
        bench.leader.request_added(request, HASHES[:8], b"", 0)
    (first,) = lookups(bench)
    bench.answer(first, 8)
    assert bench.leader.matched("a", 0) == Answer(blocks=8)
    assert bench.leader.matched("b", 0) == Answer(later=True)
    assert lookups(bench) == []
    bench.leader.allocated("a", 8, TABLE)
    bench.step()
    (second,) = lookups(bench)
    assert second.lookup != first.lookup


def test_a_request_that_finds_nothing_makes_room_at_once(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    narrow(bench, 10)
    for request in ("a", "b"):
        bench.leader.request_added(request, HASHES[:8], b"", 0)
    (first,) = lookups(bench)
    bench.answer(first, 0)
    bench.step()
    assert len(lookups(bench)) == 1


def test_the_lookup_of_a_request_that_is_passed_over_is_given_up(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    narrow(bench, 10)
    for request in ("patient", "urgent"):
        bench.leader.request_added(request, HASHES[:8], b"", 0)
    (first,) = lookups(bench)
    bench.answer(first, 8)
    assert bench.leader.matched("urgent", 0) == Answer(later=True)
    assert bench.leader.matched("urgent", 0) == Answer(later=True)
    released, asked = bench.manager.said()
    assert isinstance(released, Release) and released.lookup == first.lookup
    assert isinstance(asked, Lookup)
    bench.answer(asked, 8)
    assert bench.leader.matched("urgent", 0) == Answer(blocks=8)
    bench.leader.allocated("urgent", 8, TABLE)
    (plan,) = bench.step().loads
    bench.arrive(plan)
    bench.leader.finished("urgent")
    assert bench.leader.matched("patient", 0) == Answer(later=True)


def test_every_request_of_a_crowd_is_answered(make_bench: Callable[..., Bench]) -> None:
    """Also when the engine takes none of the answers: promises that nobody takes up must not stop the others."""
    bench = make_bench()
    narrow(bench, 20)
    waiting = [f"r{number}" for number in range(50)]
    for request in waiting:
        bench.leader.request_added(request, HASHES[:8], b"", 0)
    for _ in range(len(waiting)):
        for lookup in lookups(bench):
            bench.answer(lookup, 8)
        waiting = [request for request in waiting if bench.leader.matched(request, 0).later]
        bench.step()
    assert waiting == []


def test_a_burst_of_long_requests_does_not_end_the_session(make_bench: Callable[..., Bench]) -> None:
    """Host memory has room for the leases of all, and the manager reads nothing meanwhile."""
    bench = make_bench()
    narrow(bench, 1 << 30)
    hashes = HASHES[:1] * (OUTGOING_BYTES_MAX // KEY_BYTES // 20)
    for number in range(25):
        bench.leader.request_added(f"r{number}", hashes, b"", 0)
    assert bench.leader.ready
    assert bench.leader.matched("r24", 0).later


def test_a_request_that_ends_leaves_the_window(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    narrow(bench, 10)
    for request in ("a", "b", "c"):
        bench.leader.request_added(request, HASHES[:8], b"", 0)
    for request in ("a", "b", "c"):
        bench.leader.finished(request)
    bench.step()
    assert len(bench.leader.lookups.window) == 0


def test_a_preempted_request_is_looked_up_in_its_turn_again(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    narrow(bench, 10)
    bench.add("preempted")
    bench.leader.allocated("preempted", 0, ())
    bench.step({"preempted": 1}, preempted=())
    bench.step(preempted=["preempted"])
    bench.manager.said()
    first = bench.add("first")
    bench.answer(first, 8)
    assert bench.leader.matched("first", 0) == Answer(blocks=8)
    assert bench.leader.matched("preempted", 0) == Answer(later=True)
    bench.leader.request_added("last", HASHES[:8], b"", 0)
    bench.leader.allocated("first", 8, TABLE)
    bench.step()
    (lookup,) = lookups(bench)
    bench.answer(lookup, 8)
    bench.clock.advance(WAIT_S_MAX)  # it waits for the other's load no longer
    assert bench.leader.matched("preempted", 0) == Answer(blocks=8)


def test_a_preempted_request_that_loads_again_in_the_same_step_counts_as_begun(
    make_bench: Callable[..., Bench],
) -> None:
    """The engine preempts all when its cache is reset: what it loads under earlier keys must not be stored later."""
    bench = make_bench()
    bench.promise(5)
    bench.leader.allocated("r", 5, TABLE)
    bench.step(preempted=["r"])
    bench.leader.weights_changed()
    assert bench.leader.requests["r"].outdated


def test_lookups_of_an_ended_session_keep_nobody_out(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    narrow(bench, 10)
    bench.add("open")
    bench.leader.request_added("waits", HASHES[8:16], b"", 0)
    bench.manager.die()
    bench.step()
    assert bench.leader.lookups.window.held_blocks == 0
    bench.reconnect()
    (lookup,) = lookups(bench)
    assert split_keys(lookup.keys) == HASHES[8:16]


def test_a_waiting_request_is_asked_again_after_a_new_session(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.add("r")
    bench.manager.die()
    bench.step()
    bench.reconnect()
    bench.leader.matched("r", 0)
    (lookup,) = lookups(bench)
    bench.answer(lookup, 5)
    assert bench.leader.matched("r", 0) == Answer(blocks=5)


def test_a_request_waits_for_the_load_of_another_and_then_needs_none(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    plan = bench.load(5, request="first")
    second = bench.add("second")
    bench.answer(second, 5)
    assert bench.leader.matched("second", 0) == Answer(later=True)
    bench.arrive(plan)
    assert bench.leader.matched("second", 5) == Answer(blocks=0), "the engine has found them on the device"


def test_a_request_whose_load_fails_keeps_nobody_waiting(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(device=None)
    plan = bench.load(5, request="first")
    bench.answer(bench.add("second"), 5)
    assert bench.leader.matched("second", 0).later
    bench.leader.updated(None, ["first"], set())
    assert plan.request == "first"
    assert bench.leader.matched("second", 0) == Answer(blocks=5)


def test_a_load_that_takes_too_long_is_not_waited_for(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.leader.cost.prefilled(100, 100.0)
    bench.load(5, request="first")
    bench.answer(bench.add("second", blocks=5), 5)
    bench.clock.advance(WAIT_S_MAX / 2)
    assert bench.leader.matched("second", 0).later
    bench.clock.advance(WAIT_S_MAX / 2)
    assert bench.leader.matched("second", 0) == Answer(blocks=5)


def test_loads_are_waited_for_by_those_that_want_their_blocks_alone() -> None:
    loads = JointLoads()
    loads.begun("a", HASHES[2:6], 0.0, compute_s=1.0)
    assert loads.awaited("b", HASHES, 2, 0.5)
    assert loads.awaited("b", HASHES, 5, 0.5)
    assert not loads.awaited("a", HASHES, 2, 0.5), "its own load"
    assert not loads.awaited("b", HASHES, 6, 0.5)
    assert not loads.awaited("b", HASHES[:2], 2, 0.5), "nothing left to find"
    assert not loads.awaited("b", HASHES, 2, 1.0), "computing them is as fast"
    loads.begun("b", HASHES[2:9], 0.5, compute_s=1.0)
    loads.ended("a")
    assert loads.awaited("c", HASHES, 2, 1.0), "the later load of the same blocks runs on"
    loads.ended("b")
    assert len(loads) == 0 and not loads.awaited("c", HASHES, 2, 1.0)


@pytest.mark.parametrize("talks", [True, False])
def test_a_manager_that_serves_others_first_is_waited_for(
    make_bench: Callable[..., Bench], talks: bool
) -> None:
    bench = make_bench()
    bench.leader.cost.block_tokens = int(
        5 * ASSUMED_TOKENS_PER_S / 8
    )  # eight blocks would take 5 s to compute
    bench.add("r")
    waited_s = 0.0
    while waited_s + REPLY_DEADLINE_S < SILENCE_S_MAX:
        bench.clock.advance(REPLY_DEADLINE_S)
        waited_s += REPLY_DEADLINE_S
        assert bench.leader.matched("r", 0).later
    while waited_s + REPLY_DEADLINE_S < 5.0:
        if talks:
            bench.manager.send(Progress(lookup=1, ready=0, final=True))
        bench.clock.advance(REPLY_DEADLINE_S)
        waited_s += REPLY_DEADLINE_S
        assert bench.leader.matched("r", 0).later is talks
    bench.clock.advance(2 * REPLY_DEADLINE_S)
    assert bench.leader.matched("r", 0) == Answer()
    assert REPLY_DEADLINE_S_MAX > 5.0


def test_a_waiting_request_whose_blocks_came_to_the_device_waits_no_longer(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    narrow(bench, 10)
    bench.leader.request_added("first", HASHES[:8], b"", 0)
    bench.leader.request_added("second", HASHES[:8], b"", 0)
    (lookup,) = lookups(bench)
    bench.answer(lookup, 8)
    assert bench.leader.matched("first", 0) == Answer(blocks=8)
    bench.leader.allocated("first", 8, TABLE)
    assert bench.leader.matched("second", 0).later
    (plan,) = bench.step().loads
    bench.arrive(plan)
    assert bench.leader.matched("second", 8) == Answer()


@pytest.mark.parametrize(("arrival_s", "blocks"), [(3.0, 8), (3.4, 3)])
def test_blocks_that_arrive_later_than_they_are_computed_are_not_promised(
    make_bench: Callable[..., Bench], arrival_s: float, blocks: int
) -> None:
    bench = make_bench()
    bench.leader.cost.prefilled(100, 16.0)  # 0.16 s a token, so 3.2 s for five blocks of four
    lookup = bench.add("r")
    bench.answer(lookup, 8, ready=3, disk=5, arrival_s=arrival_s)
    assert bench.leader.matched("r", 0) == Answer(blocks=blocks)


@pytest.mark.parametrize("promise_early", [True, False])
def test_blocks_that_arrive_in_100_s_are_never_promised_nor_waited_for(
    make_bench: Callable[..., Bench], promise_early: bool
) -> None:
    """Before a prefill was measured, and after it."""
    bench = make_bench(promise_early=promise_early)
    for number in range(64):
        if number == 32:
            bench.leader.cost.prefilled(100, 1.0)
        bench.answer(bench.add(str(number)), 8, ready=3, disk=5, arrival_s=100.0)
        assert bench.leader.matched(str(number), 0) == Answer(blocks=3), number


def test_blocks_of_an_unknown_arrival_are_waited_for_as_long_as_computing_takes_at_worst(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(promise_early=False)
    bench.answer(bench.add("r"), 8, ready=3, disk=5)
    assert bench.leader.matched("r", 0).later
    bench.clock.advance(8 * 4 / WORST_TOKENS_PER_S)
    assert bench.leader.matched("r", 0) == Answer(blocks=3)


def test_a_load_is_waited_for_by_others_as_long_as_computing_takes_at_worst(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    bench.load(5, request="first")
    bench.answer(bench.add("second", blocks=5), 5)
    assert bench.leader.matched("second", 0).later
    bench.clock.advance(5 * 4 / WORST_TOKENS_PER_S)
    assert bench.leader.matched("second", 0) == Answer(blocks=5)


def test_an_engine_that_needs_verified_blocks_does_not_wait_for_late_ones(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(promise_early=False)
    bench.leader.cost.prefilled(100, 1.0)  # 0.04 s a block
    prompt, late = bench.add("prompt"), bench.add("late")
    bench.answer(prompt, 8, ready=3, disk=5, arrival_s=0.1)
    bench.answer(late, 8, ready=3, disk=5, arrival_s=5.0)
    assert bench.leader.matched("prompt", 0).later
    assert bench.leader.matched("late", 0) == Answer(blocks=3)


def test_blocks_on_the_device_are_left_out_also_of_a_lookup_that_waited(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    narrow(bench, 10)
    bench.leader.request_added("first", HASHES[:8], b"", 0)
    bench.leader.request_added("second", HASHES[:8], b"", 3)
    (first,) = lookups(bench)
    bench.answer(first, 0)
    bench.step()
    (second,) = lookups(bench)
    assert second.skip == 3
    bench.answer(second, 0)
    assert bench.leader.matched("second", 1).later, "the device has dropped two of them since"
    assert lookups(bench)[-1].skip == 1

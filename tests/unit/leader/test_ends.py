"""A request that ends while its blocks are copied: what is pinned until when, and which stores a step releases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.leader.device import PINNED_SHARE
from kvbm.leader.stores import STORE_AGE_S_MAX
from kvbm.protocol import Commit
from rigs.leader import TABLE, Bench, ScriptedDevice


def test_a_store_is_released_when_its_request_ends(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.add("r")
    bench.add("s")
    first, second = bench.store("r"), bench.store("s")
    assert bench.step({"r": 4, "s": 4}).released == ()
    bench.leader.finished("r")
    assert bench.step().released == (first.store,)
    assert bench.step().released == (), "once: its blocks may be gone already"
    assert bench.step(preempted=["s"]).released == (second.store,)


def test_a_store_that_every_rank_has_reported_is_not_released(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(rank_count=2)
    bench.add()
    plan = bench.store()
    bench.report(plan)
    bench.leader.finished("r")
    assert bench.step().released == (plan.store,), "one rank may still copy"
    bench.report(plan)
    bench.manager.said()
    bench.add("s")
    done = bench.store("s")
    bench.report(done, ranks=2)
    bench.leader.finished("s")
    assert bench.step().released == ()


def test_a_store_planned_in_the_last_moment_is_released_with_its_plan(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    bench.add()
    bench.step({"r": 4})
    (reserve,) = bench.manager.said()
    bench.grant(reserve)
    bench.leader.finished("r")
    plan = bench.step()
    assert [store.store for store in plan.stores] == list(plan.released) == [reserve.store]


def test_no_step_waits_for_the_copies_of_a_request_that_has_ended(make_bench: Callable[..., Bench]) -> None:
    """Its blocks are pinned until all ranks have copied them."""
    device = ScriptedDevice()
    bench = make_bench(rank_count=2, device=device)
    bench.add()
    first = bench.store(complete=4)
    bench.step({"r": 8})
    bench.grant(bench.manager.said()[-1])
    bench.leader.receive()
    bench.leader.finished("r")
    assert sorted(device.pinned) == TABLE[:8], "a store that is planned, and one that has its slots"
    plan = bench.step()
    assert (len(plan.stores), plan.released) == (1, ())
    assert bench.leader.stores.unpins_soon
    assert bench.step().released == ()
    bench.report(first)
    assert sorted(device.pinned) == TABLE[:8], "one rank may still copy"
    assert bench.leader.stores.pending
    bench.report(first)
    assert device.pinned == TABLE[4:8]
    bench.report(plan.stores[0], ranks=2)
    assert device.pinned == []
    assert not (bench.leader.stores.pending or bench.leader.stores.unpins_soon)
    assert bench.step().released == ()
    commits = [said for said in bench.manager.said() if isinstance(said, Commit)]
    assert [said.failed for said in commits] == [(), ()]


def test_pins_of_ended_requests_are_bounded(make_bench: Callable[..., Bench]) -> None:
    """The engine needs its blocks: those of further requests are waited for, and so is an unanswered store."""
    device = ScriptedDevice()
    device.block_count = 5 * PINNED_SHARE
    bench = make_bench(device=device)
    for request in ("r", "s", "t"):
        bench.add(request)
    first, second = bench.store("r", 4), bench.store("s", 2)
    bench.leader.finished("r")
    bench.leader.finished("s")
    assert device.pinned == TABLE[:4]
    assert bench.step().released == (second.store,)
    bench.report(first)
    third = bench.store("t", 5)
    bench.leader.finished("t")
    assert (device.pinned, bench.step().released) == (TABLE[:5], ()), "there is room again"
    bench.report(third)
    assert device.pinned == []


def test_a_preempted_request_gets_no_pins(make_bench: Callable[..., Bench]) -> None:
    """The engine needs its blocks, and has handed them out."""
    device = ScriptedDevice()
    bench = make_bench(device=device)
    bench.add()
    plan = bench.store()
    assert bench.step(preempted=["r"]).released == (plan.store,)
    assert device.pinned == []


def test_copies_that_take_too_long_keep_no_blocks_and_are_not_waited_for(
    make_bench: Callable[..., Bench],
) -> None:
    """The device may hang, and the engine's stream with it as soon as it waits for them."""
    device = ScriptedDevice()
    bench = make_bench(device=device)
    bench.add()
    plan = bench.store()
    bench.leader.finished("r")
    bench.clock.advance(STORE_AGE_S_MAX - 1.0)
    assert bench.step().released == ()
    assert device.pinned == list(plan.device_blocks)
    assert bench.leader.stores.pending, "an idle engine steps on until it has its blocks"
    assert not bench.leader.stores.unpins_soon, "a busy one does not wait so long for them"
    bench.clock.advance(2.0)
    assert bench.step().released == ()
    assert device.pinned == []
    assert not bench.leader.stores.pending
    bench.report(plan)
    (commit,) = [said for said in bench.manager.said() if isinstance(said, Commit)]
    assert commit.failed == (0, 1, 2, 3)


def test_copies_that_take_too_long_are_not_released(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.add()
    plan = bench.store()
    bench.clock.advance(STORE_AGE_S_MAX + 1.0)
    assert bench.step(preempted=["r"]).released == ()
    bench.report(plan)
    (commit,) = [said for said in bench.manager.said() if isinstance(said, Commit)]
    assert commit.failed == (0, 1, 2, 3)


@pytest.mark.parametrize("planned", [True, False])
def test_a_session_that_ends_ends_the_pins(make_bench: Callable[..., Bench], planned: bool) -> None:
    device = ScriptedDevice()
    bench = make_bench(device=device)
    bench.add()
    if planned:
        bench.store()
    else:
        bench.step({"r": 4})
    bench.leader.finished("r")
    assert device.pinned == TABLE[:4]
    bench.manager.die()
    bench.step()
    assert device.pinned == []
    assert not bench.leader.stores.pending

"""The leader's loads and stores: planned once, for the right blocks, and given back whatever happens."""

from __future__ import annotations

import pytest

from kvbm.block import Tier
from kvbm.hashing import split_keys
from kvbm.leader.stores import OPEN_STORES_MAX, STORE_AGE_S_MAX
from kvbm.leader.tracked import Answer, Scheduled
from kvbm.protocol import HELD, REFUSED, Commit, Lookup, Release
from kvbm.step_plan import LoadPlan, StorePlan
from rigs.leader import HASHES, TABLE, Bench, keys

# ---- a load


def test_a_load_names_slots_generations_and_the_right_device_blocks(bench: Bench) -> None:
    lookup = bench.promise(blocks=5, computed=2)
    assert bench.leader.matched("r", 3) == Answer(blocks=4)
    bench.leader.allocated("r", 3, TABLE)
    (plan,) = bench.step().loads
    assert plan == LoadPlan(
        request="r",
        lookup=lookup.lookup,
        epoch=7,
        slots=(1, 2, 3),
        generations=(51, 52, 53),
        device_blocks=(103, 104, 105),
        offset=1,
        ready=3,
    )
    assert bench.leader.promised_sources("r", 3) == bytes([Tier.HOST] * 3)
    assert bench.step().loads == (), "once"
    bench.arrive(plan)
    assert bench.manager.said() == [
        Release(lookup=lookup.lookup, first=1, loaded=3, seconds=0.5, unloaded={"unused": 1})
    ], "the engine took one less than it was promised"
    assert bench.leader.lookups.loaded_blocks == {Tier.HOST: 3, Tier.DISK: 0, Tier.REMOTE: 0}


def test_the_manager_is_told_how_long_the_engine_waited(bench: Bench) -> None:
    """The answer is there when the engine looks, and the load has ended when its step is told."""
    plan = bench.load(blocks=5)
    bench.clock.advance(0.75)
    bench.arrive(plan)
    (release,) = bench.manager.said()
    assert release.wait_s == pytest.approx(0.75 + release.answer_s)


def test_blocks_that_failed_are_counted_and_told(bench: Bench) -> None:
    plan = bench.load(blocks=5, disk=3)
    bench.arrive(plan, invalid={plan.device_blocks[2], plan.device_blocks[4], 999})
    (release,) = bench.manager.said()
    assert (release.loaded, release.failed) == (2, 3)
    assert bench.leader.lookups.loaded_blocks == {Tier.HOST: 2, Tier.DISK: 0, Tier.REMOTE: 0}
    assert bench.leader.lookups.failed_blocks == 3
    bench.arrive(plan)
    assert bench.manager.said() == []


def test_a_manager_that_dies_between_promise_and_allocation_costs_no_request(bench: Bench) -> None:
    """The workers may still map that memory: the plan names the epoch of the promise, and they decide."""
    bench.promise(blocks=5, computed=1)
    bench.manager.die()
    bench.step()
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step().loads
    assert (plan.epoch, plan.device_blocks, plan.slots) == (7, (101, 102, 103, 104, 105), (0, 1, 2, 3, 4))
    bench.reconnect()
    bench.arrive(plan)
    assert bench.manager.said() == [], "nothing of an earlier life is released in this one"


def test_a_promise_that_was_forgotten_meanwhile_fails_the_right_blocks(bench: Bench) -> None:
    """Somebody asked for the sources after the manager died: the lookup is gone, and the engine waits for a load."""
    bench.promise(blocks=5, computed=2)
    bench.manager.die()
    bench.step()
    assert bench.leader.promised_sources("r", 5) == b""
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step().loads
    assert plan.epoch not in (7, 8)
    assert plan.device_blocks == (102, 103, 104, 105, 106)
    assert len(plan.slots) == len(plan.generations) == 5
    assert plan.ready == 0
    bench.arrive(plan, set(plan.device_blocks))
    assert bench.leader.lookups.failed_blocks == 5
    bench.leader.finished("r")


def test_a_request_that_is_aborted_while_it_loads_keeps_its_lease_until_the_end(bench: Bench) -> None:
    plan = bench.load()
    bench.leader.finished("r")
    assert bench.manager.said() == []
    bench.arrive(plan)
    (release,) = bench.manager.said()
    assert (release.lookup, release.loaded) == (plan.lookup, 5)


def test_a_request_that_is_aborted_before_it_loads_gives_its_lease_back(bench: Bench) -> None:
    lookup = bench.promise()
    bench.leader.finished("r")
    assert bench.manager.said() == [Release(lookup=lookup.lookup)]
    asked = bench.add("s")
    bench.leader.finished("s")
    bench.answer(asked, 3)
    bench.step()
    assert bench.manager.said() == [Release(lookup=asked.lookup)]


def test_a_preempted_request_asks_anew_when_it_comes_back(bench: Bench) -> None:
    plan = bench.load()
    bench.arrive(plan)
    bench.manager.said()
    bench.step(preempted=["r"])
    assert bench.leader.matched("r", 0).later
    assert [type(m) for m in bench.manager.said()] == [Lookup]


# ---- a store


def test_a_store_in_three_steps(bench: Bench) -> None:
    bench.add()
    assert bench.step({"r": 3}).stores == ()
    (reserve,) = bench.manager.said()
    assert (reserve.parent, split_keys(reserve.keys)) == (b"", keys(3))
    bench.clock.advance(0.25)
    bench.grant(reserve, (HELD, 4, HELD))
    (plan,) = bench.step({"r": 3}).stores
    assert plan == StorePlan(
        store=reserve.store, epoch=7, slots=(4,), generations=(74,), device_blocks=(101,)
    )
    assert bench.manager.said() == []
    bench.clock.advance(0.5)
    bench.report(plan)
    assert bench.manager.said() == [Commit(store=reserve.store, seconds=0.1, answer_s=0.25)]
    assert bench.step({"r": 5}).stores == ()
    (more,) = bench.manager.said()
    assert (more.parent, split_keys(more.keys)) == (keys(3)[2], keys(5)[3:])


def test_a_store_that_is_refused_is_not_planned(bench: Bench) -> None:
    bench.add()
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()
    bench.grant(reserve, (HELD, REFUSED))
    assert bench.step({"r": 2}).stores == ()
    assert bench.step({"r": 2}).stores == ()
    assert bench.manager.said() == []


def test_all_ranks_must_have_stored_it() -> None:
    bench = Bench(rank_count=3)
    bench.add()
    plan = bench.store(complete=3)
    bench.report(plan, ranks=1, failed=(1,))
    bench.report(plan, ranks=1)
    assert bench.manager.said() == []
    bench.report(plan, ranks=1, failed=(0, 1))
    assert bench.manager.said() == [Commit(store=plan.store, failed=(0, 1), seconds=0.1)]
    bench.report(plan, ranks=3)
    assert bench.manager.said() == []
    bench.leader.close()


def test_a_preempted_requests_blocks_are_copied_now_or_never(bench: Bench) -> None:
    bench.add()
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()
    bench.grant(reserve)
    (plan,) = bench.step(preempted=["r"]).stores
    assert plan.store == reserve.store
    bench.report(plan)
    assert [type(m) for m in bench.manager.said()] == [Commit]
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()
    assert bench.step(preempted=["r"]).stores == (), "no answer by now"
    bench.grant(reserve)
    assert bench.step().stores == (), "somebody else's bytes are there now"
    assert bench.manager.said() == [Commit(store=reserve.store, failed=(0, 1))]


def test_a_finished_requests_blocks_are_copied_now_or_never(bench: Bench) -> None:
    bench.add()
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()[-1:]
    bench.leader.finished("r")
    bench.step()
    # At once: with no request left there may be no step in which the answer would be read.
    assert bench.manager.said()[-1] == Commit(store=reserve.store, failed=(0, 1))
    bench.grant(reserve, (5, HELD))
    assert bench.step().stores == ()


def test_an_answer_that_is_too_old_is_given_back(bench: Bench) -> None:
    bench.add()
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()
    bench.clock.advance(STORE_AGE_S_MAX + 1.0)
    bench.grant(reserve)
    assert bench.step().stores == ()
    assert bench.manager.said() == [Commit(store=reserve.store, failed=(0, 1))]


def test_a_question_that_is_never_answered_is_forgotten(bench: Bench) -> None:
    bench.add()
    bench.step({"r": 2})
    (reserve,) = bench.manager.said()
    bench.clock.advance(STORE_AGE_S_MAX + 1.0)
    bench.step()
    assert bench.manager.said() == [Commit(store=reserve.store, failed=(0, 1))]
    bench.grant(reserve)
    assert bench.step().stores == ()


def test_stores_of_an_earlier_life_are_not_committed_and_begin_again(bench: Bench) -> None:
    bench.add()
    plan = bench.store(complete=3)
    bench.step({"r": 4})
    bench.manager.die()
    bench.step()
    bench.reconnect()
    bench.report(plan)
    assert bench.manager.said() == []
    assert bench.step({"r": 4}).stores == ()
    (reserve,) = bench.manager.said()
    assert split_keys(reserve.keys) == keys(4), (
        "everything that is on the device is offered to the new manager"
    )
    bench.grant(reserve)
    (again,) = bench.step().stores
    assert again.epoch == 8
    assert again.store != plan.store


def test_open_stores_are_bounded(bench: Bench) -> None:
    reserved = 0
    for first in range(0, 2 * OPEN_STORES_MAX, 128):
        requests = [f"r{number}" for number in range(first, first + 128)]
        for request in requests:
            bench.leader.request_added(request, HASHES[:1], b"", 1)
        bench.step(dict.fromkeys(requests, 1))
        reserved += len(bench.manager.said())
    assert reserved == OPEN_STORES_MAX


def test_a_request_whose_load_failed_is_computed_whatever_the_device_has_dropped(bench: Bench) -> None:
    """vLLM keeps room for all of it: if two such requests load again, each may wait for the other's room for ever."""
    plan = bench.load(2, computed=4)
    bench.arrive(plan, invalid={plan.device_blocks[0]})
    bench.manager.said()
    for _ in range(2):
        assert bench.leader.matched("r", 0) == Answer()
        bench.step()
    assert bench.manager.said() == []
    bench.step(preempted=["r"])
    assert bench.leader.matched("r", 0).later, "once vLLM has taken its room, it is looked up again"


def test_blocks_that_are_not_in_the_table_are_not_stored(bench: Bench) -> None:
    bench.add()
    bench.leader.step([Scheduled("r", 4, lambda: TABLE[:1])], (), 0, False)
    (reserve,) = bench.manager.said()
    assert split_keys(reserve.keys) == keys(1)
    bench.leader.step([Scheduled("unknown", 4, lambda: TABLE)], (), 0, False)
    assert bench.manager.said() == []

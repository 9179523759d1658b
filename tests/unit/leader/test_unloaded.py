"""Blocks that were found and are computed all the same: counted once, by reason, here and at the manager's.

And the two reasons that a leader can do something about: an answer that is late, and a load that looks slow.
"""

from __future__ import annotations

import pytest

from kvbm.block import Tier
from kvbm.client.channel import Channel
from kvbm.leader.patience import (
    ARRIVAL_DEADLINE_S,
    ATTEMPTS_MAX,
    REPLY_DEADLINE_S,
    REPLY_DEADLINE_S_MAX,
    UNANSWERED_MAX,
)
from kvbm.leader.tracked import Answer
from kvbm.protocol import UNLOADED_REASONS, Lookup, LookupReply, Progress, Ready, Release
from rigs.leader import FINGERPRINT, LEASE_S, TABLE, Bench


def counted(bench: Bench) -> dict[str, int]:
    """The leader's counts, without the zeros."""
    assert tuple(bench.leader.lookups.unloaded) == UNLOADED_REASONS
    return {reason: count for reason, count in bench.leader.lookups.unloaded.items() if count}


def told(bench: Bench) -> dict[str, int]:
    """The counts in the messages to the manager since the last call."""
    heard: dict[str, int] = {}
    for message in bench.manager.said():
        if isinstance(message, Release):
            for reason, count in message.unloaded.items():
                heard[reason] = heard.get(reason, 0) + count
    return heard


def computing_is_faster(bench: Bench) -> None:
    bench.leader.cost.prefilled(1000, 0.001)
    for tier in (Tier.HOST, Tier.DISK):
        for _ in range(3):
            bench.leader.cost.loaded(bytes([tier]), 10.0)


# ---- counted once, by reason


def test_a_load_that_brings_all_counts_nothing(bench: Bench) -> None:
    bench.arrive(bench.load(blocks=5))
    assert (counted(bench), told(bench)) == ({}, {})


def test_a_load_says_what_computing_its_blocks_would_have_taken(bench: Bench) -> None:
    def saved() -> list[float]:
        return [message.prefill_s for message in bench.manager.said() if isinstance(message, Release)]

    bench.arrive(bench.load(blocks=5))
    assert saved() == [0.0], "the engine has measured nothing yet"
    bench.leader.cost.prefilled(1000, 2.0)
    bench.arrive(bench.load(blocks=5, request="s"))
    assert saved() == [bench.leader.cost.prefill_s(5)]


def test_what_is_faster_to_compute(bench: Bench) -> None:
    computing_is_faster(bench)
    bench.answer(bench.add(), 5)
    for _ in range(3):
        assert bench.leader.matched("r", 0) == Answer()
    assert counted(bench) == {}, "nothing is lost before the engine goes on"
    bench.leader.allocated("r", 0, ())
    assert counted(bench) == told(bench) == {"cost": 5}
    bench.leader.allocated("r", 0, ())
    bench.leader.finished("r")
    assert counted(bench) == {"cost": 5}
    assert told(bench) == {}


def test_what_the_device_held_by_then_is_not_lost(bench: Bench) -> None:
    """It was found as well, because the device did not have it yet when the request came."""
    computing_is_faster(bench)
    bench.answer(bench.add(on_device=1), 6)
    assert bench.leader.matched("r", 5) == Answer()
    bench.leader.allocated("r", 0, ())
    assert counted(bench) == told(bench) == {"cost": 2}
    for request, computed in (("s", 4), ("t", 7)):
        bench.answer(bench.add(request), 4)
        assert bench.leader.matched(request, computed) == Answer()
        bench.leader.allocated(request, 0, ())
        assert counted(bench) == {"cost": 2}, "all of it is there, and perhaps more"
        assert told(bench) == {}


def test_an_answer_that_never_came_in_time(bench: Bench) -> None:
    late = bench.add(on_device=1)
    lost = bench.add("s")
    bench.clock.advance(REPLY_DEADLINE_S)
    for request in ("r", "s"):
        assert bench.leader.matched(request, 2 if request == "r" else 0) == Answer()
        bench.leader.allocated(request, 0, ())
    assert counted(bench) == {}, "nobody knows whether anything was found"
    bench.answer(late, 6)
    bench.answer(lost, 0)
    bench.step()
    assert counted(bench) == told(bench) == {"deadline": 5}
    bench.answer(late, 6)
    bench.step()
    assert counted(bench) == {"deadline": 5}


def test_an_answer_that_is_late_and_still_of_use_is_used(bench: Bench) -> None:
    lookup = bench.add()
    bench.clock.advance(REPLY_DEADLINE_S)
    assert bench.leader.matched("r", 0) == Answer()
    bench.answer(lookup, 5)
    assert bench.leader.matched("r", 0) == Answer(blocks=5), "the engine had no room for it meanwhile"
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step().loads
    bench.arrive(plan)
    assert (counted(bench), told(bench)) == ({}, {})


def test_bytes_that_do_not_come_in_time() -> None:
    bench = Bench(promise_early=False)
    bench.answer(bench.add(), 5, ready=2, disk=3)
    assert bench.leader.matched("r", 0).later
    bench.clock.advance(ARRIVAL_DEADLINE_S)
    assert bench.leader.matched("r", 0) == Answer(blocks=2)
    bench.leader.allocated("r", 2, TABLE)
    assert counted(bench) == {"deadline": 3}
    (plan,) = bench.step().loads
    bench.arrive(plan)
    assert told(bench) == {"deadline": 3}, "with the load's end"
    bench.leader.close()


def test_what_the_tier_below_does_not_give(bench: Bench) -> None:
    lookup = bench.add()
    bench.answer(lookup, 5, ready=1, disk=4)
    bench.manager.send(Progress(lookup=lookup.lookup, ready=2, final=True))
    assert bench.leader.matched("r", 0) == Answer(blocks=2)
    bench.leader.allocated("r", 2, TABLE)
    assert counted(bench) == {"refused": 3}


def test_both_what_did_not_come_and_what_does_not_pay(bench: Bench) -> None:
    computing_is_faster(bench)
    lookup = bench.add()
    bench.answer(lookup, 5, ready=1, disk=4)
    bench.manager.send(Progress(lookup=lookup.lookup, ready=2, final=True))
    assert bench.leader.matched("r", 0) == Answer()
    bench.leader.allocated("r", 0, ())
    assert counted(bench) == told(bench) == {"refused": 3, "cost": 2}


@pytest.mark.parametrize("found", [0, 2])
def test_what_the_manager_could_not_lease(bench: Bench, found: int) -> None:
    lookup = bench.add()
    bench.manager.send(
        LookupReply(
            lookup=lookup.lookup,
            slots=tuple(range(found)),
            generations=(0,) * found,
            ready=found,
            sources=bytes([Tier.DISK]) * found,
            no_room=3,
            refused=1,
        )
    )
    assert bench.leader.matched("r", 0) == Answer(blocks=found)
    bench.leader.allocated("r", found, TABLE)
    assert counted(bench) == {"no_room": 3, "refused": 1}
    if found:
        (plan,) = bench.step().loads
        bench.arrive(plan)
    assert told(bench) == {"no_room": 3, "refused": 1}


def test_asking_again_counts_what_came_of_it_alone(bench: Bench) -> None:
    lookup = bench.add(blocks=8)
    bench.manager.send(LookupReply(lookup=lookup.lookup, no_room=8))
    assert bench.leader.matched("r", 0) == Answer()
    bench.clock.advance(2.0)
    assert bench.leader.matched("r", 0).later
    ended, again = bench.manager.said()
    assert ended == Release(lookup=lookup.lookup), "nothing is counted of the first"
    assert isinstance(again, Lookup)
    bench.answer(again, 8)
    assert bench.leader.matched("r", 0) == Answer(blocks=8)
    bench.leader.allocated("r", 8, TABLE)
    assert counted(bench) == {}


def test_a_run_whose_beginning_the_device_has_dropped(bench: Bench) -> None:
    lookup = bench.add(on_device=7)
    for attempt in range(ATTEMPTS_MAX - 1):
        bench.answer(lookup, 1)
        assert bench.leader.matched("r", 6 - attempt).later
        lookup = bench.manager.said()[-1]
    bench.answer(lookup, 3)
    assert bench.leader.matched("r", 0) == Answer()
    bench.leader.allocated("r", 0, ())
    assert counted(bench) == told(bench) == {"stale": 3}


def test_a_session_that_ended(bench: Bench) -> None:
    bench.promise(5)
    bench.manager.die()
    bench.step()
    assert bench.leader.matched("r", 0) == Answer()
    bench.leader.allocated("r", 0, ())
    assert counted(bench) == {"stale": 5}
    bench.reconnect()
    assert told(bench) == {}, "the manager that knew of it is gone"


def test_a_session_that_ended_before_a_load_did(bench: Bench) -> None:
    plan = bench.load(5)
    bench.manager.die()
    bench.step()
    bench.arrive(plan, set(plan.device_blocks[3:]))
    assert counted(bench) == {"stale": 2}


@pytest.mark.parametrize(
    ("ready", "final", "reason"), [(5, True, "failed"), (3, True, "refused"), (3, False, "deadline")]
)
def test_a_load_that_did_not_bring_all(bench: Bench, ready: int, final: bool, reason: str) -> None:
    plan = bench.load(5, ready=1, disk=4)
    bench.manager.send(Progress(lookup=plan.lookup, ready=ready, final=final))
    bench.arrive(plan, set(plan.device_blocks[3:]))
    assert counted(bench) == told(bench) == {reason: 2}
    assert bench.leader.lookups.failed_blocks == 2


def test_what_an_engine_did_not_take(bench: Bench) -> None:
    bench.promise(5)
    bench.leader.allocated("r", 4, TABLE)
    assert counted(bench) == {"unused": 1}


def test_requests_that_go_lose_nothing(bench: Bench) -> None:
    bench.promise(5)
    bench.leader.finished("r")
    assert told(bench) == {}
    bench.add("s")
    bench.leader.finished("s")
    assert told(bench) == {}
    bench.promise(5, request="t")
    bench.clock.advance(LEASE_S)
    assert bench.leader.matched("t", 0).later, "asked again"
    assert (counted(bench), told(bench)) == ({}, {})


# ---- how long an answer is waited for


def test_an_answer_may_take_as_long_as_it_can_save(bench: Bench) -> None:
    """A manager on a processor that others use answered after 0.28 to 0.47 s, where computing took 0.46 s."""
    bench.leader.cost.prefilled(1000, 10.0)  # 0.04 s a block
    lookup = bench.add(blocks=12)
    bench.clock.advance(0.47)
    assert bench.leader.matched("r", 0).later
    bench.answer(lookup, 12)
    assert bench.leader.matched("r", 0) == Answer(blocks=12)


def test_no_answer_is_waited_for_longer_than_computing_takes(bench: Bench) -> None:
    bench.leader.cost.prefilled(1000, 10.0)
    bench.add(blocks=12)
    bench.clock.advance(12 * 0.04)
    assert bench.leader.matched("r", 0) == Answer()


def test_however_long_computing_takes_waiting_has_an_end(bench: Bench) -> None:
    bench.leader.cost.prefilled(1000, 1000.0)
    bench.add(blocks=12)
    bench.clock.advance(REPLY_DEADLINE_S_MAX)
    assert bench.leader.matched("r", 0) == Answer()


def test_a_manager_that_was_stopped_costs_much_once(bench: Bench) -> None:
    bench.leader.cost.prefilled(1000, 1000.0)
    first = bench.add(blocks=12)
    second = bench.add("s", blocks=12)
    bench.clock.advance(REPLY_DEADLINE_S_MAX)
    assert bench.leader.matched("r", 0) == Answer()
    bench.add("t", blocks=12)
    assert bench.leader.matched("t", 0).later
    bench.clock.advance(REPLY_DEADLINE_S)
    assert bench.leader.matched("s", 0) == bench.leader.matched("t", 0) == Answer()
    bench.answer(first, 0)
    bench.answer(second, 0)
    for request in ("r", "s", "t"):
        bench.leader.allocated(request, 0, ())
    bench.step()
    bench.manager.said()
    bench.add("u", blocks=12)
    bench.clock.advance(2 * REPLY_DEADLINE_S)
    assert bench.leader.matched("u", 0).later, "it is heard again"


def pass_unanswered(bench: Bench, count: int) -> list[Lookup]:
    """So many requests, one after the other, whose lookups are not answered in time; each waits."""
    asked = []
    for number in range(count):
        asked.append(bench.add(f"unanswered {number}"))
        assert bench.leader.matched(f"unanswered {number}", 0).later
        bench.clock.advance(REPLY_DEADLINE_S)
        assert bench.leader.matched(f"unanswered {number}", 0) == Answer()
        bench.leader.allocated(f"unanswered {number}", 0, ())
        bench.manager.said()
    return asked


def test_a_manager_that_answers_nothing_is_waited_for_three_times(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_unanswered(bench, UNANSWERED_MAX)
    waits: list[float] = []
    monkeypatch.setattr(Channel, "wait", lambda channel, timeout_s: waits.append(timeout_s))
    for number in range(100):
        lookup = bench.add(str(number))
        assert bench.leader.matched(str(number), 0) == Answer(), (
            "it is asked, and nothing waits for the answer"
        )
        bench.leader.allocated(str(number), 0, ())
        bench.step({str(number): 8})
        bench.leader.finished(str(number))
        bench.step(idle=True)
        bench.manager.said()
    assert waits == []
    bench.answer(lookup, 0)
    bench.step()
    bench.manager.said()
    bench.add("heard again")
    assert bench.leader.matched("heard again", 0).later
    assert waits


def test_a_new_session_has_not_been_silent(bench: Bench) -> None:
    pass_unanswered(bench, UNANSWERED_MAX)
    bench.manager.die()
    bench.step()
    bench.reconnect()
    bench.add()
    assert bench.leader.matched("r", 0).later


# ---- disk without host


def test_what_passes_through_a_staging_area_is_loaded_from_disk(bench: Bench) -> None:
    """It was still there when it was asked for: no tier of its own, and nobody set one up."""
    bench.manager.send(
        Ready(ready=True, epoch=7, fingerprint=FINGERPRINT, lease_s=LEASE_S, tiers={"disk": 100})
    )
    bench.step()
    plan = bench.load(5, disk=2)
    assert bench.leader.promised_sources("r", 5) == bytes([Tier.DISK] * 5)
    bench.manager.send(Ready(ready=False, epoch=7))
    bench.arrive(plan)
    assert bench.leader.lookups.loaded_blocks == {Tier.HOST: 0, Tier.DISK: 5, Tier.REMOTE: 0}

"""The leader without a manager, with one that goes and comes, and what it asks and promises."""

from __future__ import annotations

import logging

import pytest

from kvbm.block import KEY_BYTES, Tier
from kvbm.clock import ManualClock
from kvbm.framing import encode
from kvbm.hashing import join_keys, split_keys
from kvbm.leader.leader import Leader
from kvbm.leader.link import ManagerLink
from kvbm.leader.patience import ARRIVAL_DEADLINE_S, ATTEMPTS_MAX, REPLY_DEADLINE_S
from kvbm.leader.tracked import Answer, Scheduled
from kvbm.protocol import PROTOCOL_VERSION, Finished, Hello, Lookup, Progress, Refused, Release, Reset
from kvbm.step_plan import StepPlan, StepReport
from rigs.leader import HASHES, LEASE_S, TABLE, Bench, ScriptedManager, keys


def known(bench: Bench, tier: Tier, seconds: float) -> None:
    """Loads of one block, enough to be believed."""
    for _ in range(3):
        bench.leader.cost.loaded(bytes([tier]), seconds)


# ---- without a manager


def test_without_a_manager_everything_is_a_miss() -> None:
    manager = ScriptedManager()
    manager.up = False
    hello = Hello(version=PROTOCOL_VERSION, role="leader", engine="e")
    leader = Leader(manager, hello, 4, True, ManualClock())  # type: ignore[arg-type]
    assert not leader.ready
    leader.request_added("r", HASHES, b"", 0)
    assert leader.matched("r", 0) == Answer()
    assert leader.promised_sources("r", 3) == b""
    leader.allocated("r", 0, ())
    assert leader.step([Scheduled("r", 4, lambda: TABLE)], ["r"], 64, False) == StepPlan()
    assert leader.step([], [], 0, True) == StepPlan(idle=True)
    leader.updated(None, ["r"], set())
    leader.updated(StepReport(stored={1: (1, (), 0.0)}, loaded={"x": 1.0}), ["x"], {3})
    leader.finished("r")
    leader.finished("never seen")
    assert leader.reset()
    leader.close()
    assert manager.attempts > 1


def test_unready_means_nothing_is_asked(bench: Bench) -> None:
    bench.manager.ready(False)
    bench.step()
    bench.leader.request_added("r", HASHES[:4], b"", 0)
    assert bench.leader.matched("r", 0) == Answer()
    assert bench.step({"r": 4}).stores == ()
    assert bench.manager.said() == []
    bench.manager.ready()
    bench.step()
    assert bench.leader.matched("r", 0).later
    assert [type(m) for m in bench.manager.said()] == [Lookup], "it is asked as soon as somebody answers"


def test_a_refusal_is_said_once_and_survived(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        bench.manager.send(Refused(reason="user 5 cannot be served"))
        bench.manager.close()
        bench.step()
        bench.step()
        bench.step()
    assert sum("user 5 cannot be served" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", encode(Reset())])
def test_garbage_from_the_manager_ends_the_session(bench: Bench, garbage: bytes) -> None:
    bench.promise()
    bench.manager.send_raw(garbage)
    bench.manager.up = False
    bench.step()
    assert not bench.leader.ready
    assert bench.leader.matched("r", 0) == Answer()
    bench.reconnect()


def test_after_a_reconnect_it_hits_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench.manager.die()
    bench.step()
    assert not bench.leader.ready
    bench.leader.request_added("r", HASHES[:8], b"", 0)
    bench.reconnect()
    assert bench.leader.matched("r", 0).later
    (lookup,) = bench.manager.said()
    bench.answer(lookup, 3)
    assert bench.leader.matched("r", 0) == Answer(blocks=3)
    assert [r.getMessage() for r in caplog.records if "manager lost" in r.getMessage()]


def test_a_request_whose_answer_was_lost_is_asked_again_of_the_next_manager(bench: Bench) -> None:
    for request, answered in (("unanswered", False), ("found", True), ("not found", True)):
        lookup = bench.add(request)
        if answered:
            bench.answer(lookup, 3 if request == "found" else 0)
    bench.manager.die()
    bench.step()
    for request in list(bench.leader.requests):
        assert bench.leader.matched(request, 0) == Answer()
    bench.reconnect()
    for request in list(bench.leader.requests):
        assert bench.leader.matched(request, 0).later
        (again,) = bench.manager.said()
        bench.answer(again, 4)
        assert bench.leader.matched(request, 0) == Answer(blocks=4)


def test_a_request_that_found_nothing_while_a_rank_was_missing_is_asked_again(bench: Bench) -> None:
    bench.answer(bench.add("begun"), 0)
    bench.step({"begun": 1})
    bench.manager.said()
    early, found, held = (bench.add(name) for name in ("early", "found", "held"))
    bench.manager.ready(False)
    bench.answer(early, 0)  # the manager answers so when a rank is missing
    bench.answer(held, 5)
    bench.step()
    bench.manager.ready()
    bench.step()
    bench.manager.said()
    assert bench.leader.matched("early", 0).later
    (again,) = bench.manager.said()
    bench.answer(again, 4)
    assert bench.leader.matched("early", 0) == Answer(blocks=4)
    assert bench.leader.matched("held", 0) == Answer(blocks=5), "its lease holds"
    assert bench.leader.matched("found", 0).later, "its answer is on its way"
    assert bench.leader.matched("begun", 0) == Answer()
    assert bench.manager.said() == []
    bench.answer(found, 2)
    assert bench.leader.matched("found", 0) == Answer(blocks=2)


# ---- a lookup


def test_a_lookup_goes_out_with_the_request(bench: Bench) -> None:
    lookup = bench.add(blocks=6, on_device=2)
    assert split_keys(lookup.keys) == keys(6)
    assert lookup.skip == 2
    assert bench.leader.matched("r", 2).later
    bench.answer(lookup, 3)
    assert bench.leader.matched("r", 2) == Answer(blocks=3)
    assert bench.leader.matched("r", 3) == Answer(blocks=2), "the device has more now"
    assert bench.leader.matched("r", 5) == Answer()
    assert bench.leader.matched("r", 9) == Answer()
    assert bench.manager.said() == []


def test_a_request_without_full_blocks_asks_nothing(bench: Bench) -> None:
    bench.leader.request_added("r", [], b"", 0)
    bench.leader.request_added("s", HASHES[:2], b"", 2)
    assert bench.leader.matched("r", 0) == bench.leader.matched("s", 2) == Answer()
    assert bench.manager.said() == []


def test_extras_change_every_key(bench: Bench) -> None:
    bench.leader.request_added("r", HASHES[:3], b"adapter", 0)
    (lookup,) = bench.manager.said()
    assert split_keys(lookup.keys) == keys(3, b"adapter")
    assert not set(keys(3)) & set(keys(3, b"adapter"))


def test_a_reply_that_does_not_come_is_not_waited_for(bench: Bench) -> None:
    lookup = bench.add()
    bench.clock.advance(REPLY_DEADLINE_S / 2)
    assert bench.leader.matched("r", 0).later
    bench.clock.advance(REPLY_DEADLINE_S)
    assert bench.leader.matched("r", 0) == Answer()
    assert bench.leader.matched("r", 0) == Answer()
    bench.leader.allocated("r", 0, ())
    bench.answer(lookup, 4)
    bench.step()
    lease, late = bench.manager.said()
    assert lease == Release(lookup=lookup.lookup), "given back before the answer comes"
    assert late == Release(lookup=lookup.lookup, answer_s=1.5 * REPLY_DEADLINE_S, unloaded={"deadline": 4}), (
        "an answer that came too late is the one whose time matters most"
    )


def test_how_long_an_answer_took_is_told_also_where_nothing_was_found(bench: Bench) -> None:
    lookup = bench.add()
    bench.clock.advance(REPLY_DEADLINE_S / 2)
    bench.answer(lookup, 0)
    assert bench.leader.matched("r", 0) == Answer()
    bench.leader.allocated("r", 0, ())
    bench.leader.finished("r")
    assert bench.manager.said() == [Release(lookup=lookup.lookup, answer_s=REPLY_DEADLINE_S / 2)]


def test_the_manager_hears_how_much_a_request_generated(bench: Bench) -> None:
    lookup = bench.add(blocks=5)
    bench.leader.finished("r", output_tokens=321)
    bench.manager.said()
    assert bench.manager.ended == [Finished(key=lookup.keys[-KEY_BYTES:], output_tokens=321)]


def test_nothing_is_said_of_the_end_of_a_request_that_was_never_looked_up(bench: Bench) -> None:
    bench.leader.request_added("r", [], b"", 0)
    bench.leader.finished("r", output_tokens=321)
    assert bench.manager.said() == []
    assert bench.manager.ended == []


def test_a_lookup_that_left_out_what_the_device_lost_is_asked_again(bench: Bench) -> None:
    lookup = bench.promise(blocks=3, computed=4)
    assert bench.leader.matched("r", 2).later
    released, again = bench.manager.said()
    assert released == Release(lookup=lookup.lookup)
    assert again.skip == 2
    assert (lookup.again, again.again) == (False, True)
    assert again.lookup != lookup.lookup
    bench.answer(again, 5)
    assert bench.leader.matched("r", 2) == Answer(blocks=5)


def test_an_answer_that_comes_while_it_is_waited_for_may_leave_out_what_the_device_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.step()  # a step begins with time to wait
    lookup = bench.add(on_device=4)
    link_wait = ManagerLink.wait

    def answered_meanwhile(link: ManagerLink, timeout_s: float) -> bool:
        bench.answer(lookup, 3)
        return link_wait(link, timeout_s)

    monkeypatch.setattr(ManagerLink, "wait", answered_meanwhile)
    assert bench.leader.matched("r", 2).later
    released, again = bench.manager.said()
    assert released == Release(lookup=lookup.lookup)
    assert again.skip == 2


def test_asking_again_has_an_end(bench: Bench) -> None:
    lookup = bench.add(on_device=7)
    for attempt in range(ATTEMPTS_MAX - 1):
        bench.answer(lookup, 1)
        assert bench.leader.matched("r", 6 - attempt).later
        lookup = bench.manager.said()[-1]
    bench.answer(lookup, 1)
    assert bench.leader.matched("r", 0) == Answer()
    assert bench.manager.said() == []


def test_a_lease_that_is_about_to_end_is_renewed(bench: Bench) -> None:
    lookup = bench.promise()
    bench.clock.advance(LEASE_S - 10.0)
    assert bench.leader.matched("r", 0).later
    released, again = bench.manager.said()
    assert released == Release(lookup=lookup.lookup)
    bench.answer(again, 5)
    assert bench.leader.matched("r", 0) == Answer(blocks=5)


def test_an_engine_that_recomputes_is_promised_what_is_on_its_way(bench: Bench) -> None:
    bench.promise(blocks=5, ready=2, disk=3)


def test_what_is_known_to_have_failed_is_not_promised(bench: Bench) -> None:
    lookup = bench.add()
    bench.answer(lookup, 5, ready=1, disk=4)
    bench.manager.send(Progress(lookup=lookup.lookup, ready=2, final=True))
    assert bench.leader.matched("r", 0) == Answer(blocks=2)
    bench.leader.allocated("r", 2, TABLE)
    (plan,) = bench.step().loads
    assert (plan.slots, plan.ready) == ((0, 1), 2)


def test_an_engine_that_cannot_recompute_is_promised_only_what_is_there() -> None:
    bench = Bench(promise_early=False)
    lookup = bench.add()
    bench.answer(lookup, 5, ready=2, disk=3)
    assert bench.leader.matched("r", 0).later
    bench.manager.send(Progress(lookup=lookup.lookup, ready=4, final=False))
    assert bench.leader.matched("r", 0).later
    bench.clock.advance(ARRIVAL_DEADLINE_S)
    assert bench.leader.matched("r", 0) == Answer(blocks=4), "it has waited long enough"
    second = bench.add("s")
    bench.answer(second, 5, ready=2, disk=3)
    bench.manager.send(Progress(lookup=second.lookup, ready=3, final=True))
    assert bench.leader.matched("s", 0) == Answer(blocks=3)
    bench.leader.close()


def test_a_request_that_ends_before_its_answer_gives_its_lease_back_at_once(bench: Bench) -> None:
    """With no request left the engine takes no step: what waited for one would stay pinned until the lease ends."""
    lookup = bench.add()
    bench.leader.finished("r")
    assert bench.manager.said() == [Release(lookup=lookup.lookup)]
    bench.answer(lookup, 5)
    bench.step()
    assert bench.manager.said() == []


def test_loading_that_is_slower_than_computing_is_left_out(bench: Bench) -> None:
    bench.leader.cost.prefilled(1000, 0.001)
    known(bench, Tier.HOST, 10.0)
    lookup = bench.add()
    bench.answer(lookup, 5)
    assert bench.leader.matched("r", 0) == Answer()
    bench.leader.allocated("r", 0, ())
    assert bench.manager.said() == [Release(lookup=lookup.lookup, unloaded={"cost": 5})]


def test_of_a_run_the_part_that_pays_is_loaded(bench: Bench) -> None:
    """8 ms to compute a block here, 1 to load one from host memory, 20 from disk."""
    bench.leader.cost.prefilled(1000, 2.0)
    known(bench, Tier.HOST, 0.001)
    known(bench, Tier.DISK, 0.02)
    lookup = bench.add(on_device=1)
    bench.answer(lookup, 6, disk=2)
    assert bench.leader.matched("r", 1) == Answer(blocks=4)
    bench.leader.allocated("r", 4, TABLE)
    (plan,) = bench.step().loads
    assert plan.device_blocks == tuple(TABLE[1:5])
    bench.arrive(plan)
    assert bench.manager.said() == [
        Release(lookup=lookup.lookup, loaded=4, seconds=0.5, unloaded={"cost": 2}, prefill_s=4 * 0.008)
    ]


def test_how_deep_a_step_computed_counts(bench: Bench) -> None:
    bench.leader.updated(None, (), set())  # the bench's own first step
    for tokens, position, seconds in ((1000, 500.0, 1.0), (1000, 10_500.0, 2.0)):
        bench.leader.step((), (), tokens, False, position)
        bench.clock.advance(seconds)
        bench.leader.updated(None, (), set())
    shallow, deep = bench.leader.cost.prefill_s(1), bench.leader.cost.prefill_s(1, 2625)
    assert shallow == pytest.approx(4 * 0.95e-3, rel=1e-3)
    assert deep == pytest.approx(4 * 2e-3, rel=1e-3)


# ---- a walk


def test_joined_keys_are_the_requests_own(bench: Bench) -> None:
    hashes = HASHES[:2]
    bench.leader.request_added("r", hashes, b"", 0)
    (lookup,) = bench.manager.said()
    assert lookup.keys == join_keys(keys(2))
    hashes.append(HASHES[2])  # the engine's list grows as tokens come
    bench.step({"r": 3})
    (reserve,) = bench.manager.said()
    assert split_keys(reserve.keys) == keys(3)

"""An engine over two nodes: what both managers hold is a hit, what both give slots for is stored, and without one of
them nothing is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbm.leader.nodes import LOADED_S, PROMISED_S
from kvbm.leader.tracked import Answer
from kvbm.protocol import (
    HELD,
    REFUSED,
    Announce,
    Commit,
    Finished,
    Hello,
    Lookup,
    Progress,
    Ready,
    Release,
    RemovedBlocks,
    Reserve,
    Reset,
    Shorten,
    StoredRun,
    TierEvents,
)
from kvbm.step_plan import NO_EPOCH, NodeSlots, StepPlan
from rigs.leader import HASHES, TABLE
from rigs.nodes import NodesBench


@pytest.fixture
def bench() -> Iterator[NodesBench]:
    bench = NodesBench()
    bench.all_ready()
    yield bench
    bench.close()


@pytest.fixture
def fresh() -> Iterator[NodesBench]:
    """None of whose managers is ready."""
    bench = NodesBench()
    yield bench
    bench.close()


# ---- who is there


def test_there_is_a_cache_when_all_managers_have_their_ranks(fresh: NodesBench) -> None:
    fresh.ready(1)
    fresh.step()
    assert not fresh.leader.ready
    fresh.ready(0)
    fresh.step()
    assert fresh.leader.ready
    assert fresh.leader.tiers == {"host": 99}
    assert fresh.leader.block_bytes == 2 * 4096


@pytest.mark.parametrize(
    "said",
    [{"part": 0}, {"part_count": 3}, {"fingerprint": bytes(32)}, {"ready": False}],
    ids=["the same part", "a part of more", "another namespace", "a rank is missing"],
)
def test_managers_that_do_not_fit_are_no_cache(fresh: NodesBench, said: dict[str, object]) -> None:
    fresh.ready(0)
    fresh.ready(1, **said)  # type: ignore[arg-type]
    fresh.step()
    assert not fresh.leader.ready


def test_managers_may_be_named_in_any_order(fresh: NodesBench) -> None:
    """The parts are the engine's: plans have them in their order."""
    fresh.ready(0, part=1)
    fresh.ready(1, part=0)
    fresh.step()
    plan = fresh.load("r", 3, 3)
    assert [node.epoch for node in plan.nodes] == [71, 70]


def test_all_ranks_at_one_of_the_managers_need_no_other(fresh: NodesBench) -> None:
    fresh.ready(1, part=0, part_count=1)
    fresh.step()
    assert fresh.leader.ready
    fresh.leader.request_added("r", HASHES[:4], b"", 0)
    assert fresh.said(0, Lookup) == []
    (lookup,) = fresh.said(1, Lookup)
    fresh.answer(1, lookup.lookup, 4)
    assert fresh.matched() == Answer(blocks=4)
    fresh.leader.allocated("r", 4, TABLE)
    (plan,) = fresh.step().loads
    assert (plan.epoch, plan.slots, plan.nodes) == (71, (100, 101, 102, 103), ())


# ---- hits


def test_a_hit_is_what_both_hold_and_the_rest_is_given_back(bench: NodesBench) -> None:
    number = bench.ask()
    bench.answer(0, number, 5)
    assert bench.matched() == Answer(later=True)
    bench.answer(1, number, 3)
    assert bench.matched() == Answer(blocks=3)
    assert bench.said(0, Shorten) == [Shorten(lookup=number, blocks=3)]
    assert bench.said(1, Shorten) == []
    bench.leader.allocated("r", 3, TABLE)
    (plan,) = bench.step().loads
    assert plan.nodes == (
        NodeSlots(epoch=70, slots=(0, 1, 2), generations=(0, 1, 2)),
        NodeSlots(epoch=71, slots=(100, 101, 102), generations=(1000, 1001, 1002)),
    )
    second = plan.on_node(1)
    assert (second.epoch, second.slots, second.generations) == (71, (100, 101, 102), (1000, 1001, 1002))
    assert second.device_blocks == plan.device_blocks == tuple(TABLE[:3])


def test_a_miss_of_one_is_a_miss(bench: NodesBench) -> None:
    number = bench.ask()
    bench.answer(0, number, 0)
    bench.answer(1, number, 6)
    assert bench.matched() == Answer()
    assert bench.said(1, Shorten) == [Shorten(lookup=number, blocks=0)]


def test_a_hit_is_as_near_as_the_farther_of_its_parts(bench: NodesBench) -> None:
    bench.leader.cost.prefilled(100, 100.0)
    number = bench.ask()
    bench.answer(0, number, 3, sources=b"\2\3\2", arrival_s=0.1, ready=1)
    bench.answer(1, number, 4, sources=b"\2\2\3\3", arrival_s=0.2, ready=2)
    assert bench.matched() == Answer(blocks=3)
    assert bench.leader.lookups._by_request["r"].sources == b"\2\3\3"
    assert bench.leader.lookups._by_request["r"].ready == 1
    assert bench.leader.lookups._by_request["r"].arrives_s == pytest.approx(bench.clock() + 0.2)


def test_a_load_is_released_at_both(bench: NodesBench) -> None:
    plan = bench.load("r", 5, 3)
    bench.leader.updated(None, ["r"], set())
    for node in (0, 1):
        (release,) = bench.said(node, Release)
        assert (release.lookup, release.loaded) == (plan.lookup, 3)
    assert len(bench.leader.lookups) == 0
    assert bench.leader._link._lookups == {}  # type: ignore[attr-defined]


def test_a_request_that_goes_before_both_have_answered_leaves_nothing(bench: NodesBench) -> None:
    number = bench.ask()
    bench.answer(0, number, 5)
    bench.step()
    bench.leader.finished("r")
    assert [len(bench.said(node, Release)) for node in (0, 1)] == [1, 1]
    bench.answer(1, number, 5)
    bench.step()
    assert bench.leader._link._lookups == {}  # type: ignore[attr-defined]


def test_blocks_on_their_way_are_there_when_they_are_at_both(bench: NodesBench) -> None:
    number = bench.ask()
    bench.answer(0, number, 4, ready=1)
    bench.answer(1, number, 4, ready=0)
    search = bench.leader.lookups._by_request["r"]

    def comes(node: int, ready: int, final: bool) -> tuple[int, bool]:
        bench.managers[node].send(Progress(lookup=number, ready=ready, final=final))
        bench.step()
        return search.ready, search.final

    bench.step()
    assert comes(0, 4, True) == (0, False)
    assert comes(1, 2, False) == (2, False)
    assert comes(1, 3, True) == (3, True)


def test_what_one_will_not_get_the_other_is_not_waited_for(bench: NodesBench) -> None:
    number = bench.ask()
    bench.answer(0, number, 4, ready=2)
    bench.answer(1, number, 4, ready=1)
    bench.managers[1].send(Progress(lookup=number, ready=1, final=True))
    bench.step()
    search = bench.leader.lookups._by_request["r"]
    assert (search.ready, search.final) == (1, True)


def test_a_silent_manager_is_not_waited_for(bench: NodesBench) -> None:
    """One that answers cannot speak for the other."""
    bench.step()
    number = bench.ask()
    bench.answer(0, number, 8)
    assert bench.matched() == Answer(later=True)
    bench.clock.advance(5.0)
    bench.managers[0].send(Progress(lookup=number, ready=8, final=True))
    assert bench.matched() == Answer()


# ---- stores


def test_a_block_is_stored_where_both_gave_a_slot(bench: NodesBench) -> None:
    bench.leader.request_added("r", HASHES[:8], b"", 0)
    store = bench.reserved(complete=4)
    bench.grant(0, store, [10, 11, 12, 13])
    bench.grant(1, store, [20, 21, REFUSED, REFUSED])
    (plan,) = bench.step().stores
    assert plan.device_blocks == tuple(TABLE[:2])
    here, there = plan.on_node(0), plan.on_node(1)
    assert (here.epoch, here.slots, here.generations) == (70, (10, 11), (7010, 7011))
    assert (there.epoch, there.slots, there.generations) == (71, (20, 21), (7020, 7021))
    bench.report(store)
    assert bench.said(0, Commit)[0].failed == (2, 3)
    assert bench.said(1, Commit)[0].failed == ()


def test_a_block_that_one_holds_is_copied_at_the_other_alone(bench: NodesBench) -> None:
    """Else what a manager lost would never be stored again, as long as the other keeps its part."""
    bench.leader.request_added("r", HASHES[:8], b"", 0)
    store = bench.reserved(complete=3)
    bench.grant(0, store, [HELD, HELD, 12])
    bench.grant(1, store, [HELD, 21, 22])
    (plan,) = bench.step().stores
    assert plan.device_blocks == tuple(TABLE[1:3])
    here, there = plan.on_node(0), plan.on_node(1)
    assert (here.slots, here.device_blocks) == ((12,), (TABLE[2],))
    assert (there.slots, there.device_blocks) == ((21, 22), (TABLE[1], TABLE[2]))
    assert here.positions == there.positions == (0, 1)
    bench.report(store, failed=(1,))
    assert bench.said(0, Commit)[0].failed == (0,)
    assert bench.said(1, Commit)[0].failed == (1,)


def test_slots_that_are_of_no_use_go_back_at_once(bench: NodesBench) -> None:
    bench.leader.request_added("r", HASHES[:8], b"", 0)
    store = bench.reserved(complete=2)
    bench.grant(0, store, [10, 11])
    bench.grant(1, store, [REFUSED, REFUSED])
    assert bench.step().stores == ()
    assert [commit.failed for commit in bench.said(0, Commit)] == [(0, 1)]
    assert bench.said(1, Commit) == []
    assert len(bench.leader.stores) == 0


def test_a_store_that_is_given_up_is_given_up_at_both(bench: NodesBench) -> None:
    bench.leader.request_added("r", HASHES[:8], b"", 0)
    store = bench.reserved(complete=2)
    bench.grant(0, store, [10, 11])
    bench.step()
    bench.leader.weights_changed()
    for node in (0, 1):
        assert [commit.failed for commit in bench.said(node, Commit)] == [(0, 1)]
    bench.grant(1, store, [20, 21])
    assert bench.step().stores == ()


# ---- one of them goes


def test_without_one_nothing_is_asked_and_requests_go_on(bench: NodesBench) -> None:
    number = bench.ask()
    bench.answer(0, number, 5)
    bench.answer(1, number, 5)
    assert bench.matched() == Answer(blocks=5)
    bench.managers[1].die()
    assert bench.matched() == Answer()
    assert not bench.leader.ready
    bench.leader.request_added("s", HASHES[:8], b"", 0)
    assert bench.matched("s") == Answer()
    bench.step({"r": 8})
    assert bench.said(0, Lookup) == bench.said(0, Reserve) == []


def test_the_others_sessions_begin_anew_and_hits_come_back(bench: NodesBench) -> None:
    """What they hold for questions of before ends with those."""
    bench.leader.request_added("r", HASHES[:8], b"", 0)
    bench.reserved(complete=4)
    bench.managers[1].die()
    bench.step()
    bench.clock.advance(PROMISED_S)
    bench.step()
    bench.step()
    assert [type(message) for message in bench.managers[0].said()] == [Hello]
    bench.managers[1].up, bench.managers[1].epoch = True, 99
    bench.clock.advance(10.0)
    bench.step()
    bench.step()
    bench.ready(0)
    bench.ready(1)
    bench.step()
    assert bench.leader.ready
    assert [node.epoch for node in bench.load("s", 2, 2).nodes] == [70, 99]


def test_what_was_found_before_one_went_is_asked_anew(bench: NodesBench) -> None:
    number = bench.ask()
    for node in (0, 1):
        bench.answer(node, number, 8)
    assert bench.matched() == Answer(blocks=8)
    bench.managers[1].die()
    bench.step()
    bench.managers[1].up = True
    for _ in range(3):
        bench.clock.advance(PROMISED_S)
        bench.step()
    bench.all_ready()
    assert bench.matched() == Answer(later=True)
    assert [len(bench.said(node, Lookup)) for node in (0, 1)] == [1, 1]


def test_a_load_that_runs_keeps_the_others_leases_for_a_while(bench: NodesBench) -> None:
    bench.load("r", 5, 5)
    connection = bench.managers[0]._connection
    bench.managers[1].die()
    bench.step()
    bench.clock.advance(LOADED_S - 1.0)
    bench.step()
    assert bench.managers[0]._connection is connection
    assert bench.said(0, Hello) == []
    bench.clock.advance(1.0)
    bench.step()
    bench.step()
    assert bench.managers[0]._connection is not connection


def test_a_load_that_was_promised_before_names_what_was_promised(bench: NodesBench) -> None:
    """Its ranks still map the memory of the manager that died; later nothing is known of it, and the load fails."""
    number = bench.ask()
    bench.answer(0, number, 5)
    bench.answer(1, number, 5)
    assert bench.matched() == Answer(blocks=5)
    bench.managers[1].die()
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step().loads
    assert [(node.epoch, len(node.slots)) for node in plan.nodes] == [(70, 5), (71, 5)]


def test_a_load_of_nothing_that_is_known_fails_on_every_node(bench: NodesBench) -> None:
    bench.leader.request_added("r", HASHES[:8], b"", 0)
    bench.leader.allocated("r", 3, TABLE)
    plan = bench.step()
    for node in (0, 1):
        assert [load.epoch for load in plan.on_node(node).loads] == [NO_EPOCH]


def test_a_rank_that_goes_and_comes_back_costs_no_session(bench: NodesBench) -> None:
    bench.ready(1, ready=False)
    bench.step()
    assert not bench.leader.ready
    bench.ready(1)
    bench.step()
    assert bench.leader.ready
    assert bench.said(0, Hello) == []


# ---- the rest


def test_a_reset_and_an_end_are_told_to_both(bench: NodesBench) -> None:
    number = bench.ask()
    for node in (0, 1):
        bench.answer(node, number, 0)
    bench.step()
    bench.leader.finished("r", 5)
    bench.leader.reset()
    for manager in bench.managers:
        kinds = [type(message) for message in manager.said()]
        assert kinds.count(Reset) == 1
        assert manager.ended == [Finished(key=HASHES[7], output_tokens=5)]


def test_a_plan_without_tasks_is_the_same_for_all() -> None:
    plan = StepPlan(idle=True)
    assert plan.on_node(1) is plan


def test_blocks_are_announced_when_both_have_them() -> None:
    bench = NodesBench(announces=True)
    bench.all_ready()
    assert [bench.said(node, Announce) for node in (0, 1)] == [[Announce()]] * 2

    def run(first: int, end: int) -> StoredRun:
        tokens = b"".join(bytes([i]) * 16 for i in range(first, end))
        before = HASHES[first - 1] if first else b""
        return StoredRun(2, b"".join(HASHES[first:end]), before, tokens)

    bench.managers[0].send(TierEvents(stored=(run(0, 6),), complete=True))
    bench.step()
    assert bench.leader.announced.take() == []
    bench.managers[1].send(TierEvents(stored=(run(2, 4), run(5, 8)), complete=True))
    bench.step()
    assert bench.leader.announced.take() == [run(2, 4), run(5, 6)]
    bench.managers[0].send(TierEvents(removed=(RemovedBlocks(2, HASHES[0] + HASHES[3]),)))
    bench.step()
    assert bench.leader.announced.take() == [RemovedBlocks(2, HASHES[3])]
    bench.managers[0].send(TierEvents(stored=(run(3, 4),)))
    bench.step()
    assert bench.leader.announced.take() == [run(3, 4)]
    bench.close()


def test_a_manager_with_some_of_the_ranks_is_of_no_use_alone(caplog: pytest.LogCaptureFixture) -> None:
    from rigs.leader import Bench

    bench = Bench(rank_count=2)
    bench.manager.send(Ready(ready=True, epoch=7, part_count=2))
    bench.step()
    assert not bench.leader.ready
    (line,) = [record.getMessage() for record in caplog.records]
    assert "DYN_KVBM_NODE_MANAGERS" in line

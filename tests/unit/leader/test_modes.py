"""When copies may run: loads beside the forward pass, stores at the last moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvbm.block import BlockKey
from kvbm.hashing import split_keys
from kvbm.leader.lazy import Unsaved
from kvbm.leader.tracked import Answer, Scheduled
from kvbm.protocol import Commit, Reserve
from kvbm.step_plan import LoadPlan, StepReport
from rigs.leader import TABLE, Bench, ScriptedDevice, keys

# ---- layer by layer


def promised(bench: Bench, before_tail: int, **reply: Any) -> Answer:
    lookup = bench.add()
    bench.answer(lookup, 5, **reply)
    return bench.leader.matched("r", 0, before_tail)


@pytest.mark.parametrize(
    ("before_tail", "reply", "layerwise"),
    [
        (5, {}, True),
        (9, {}, True),
        (4, {}, False),
        (9, {"ready": 3}, False),
        (9, {"ready": 5, "disk": 2}, True),
    ],
    ids=["a tail", "a long tail", "nothing left to compute", "not all there", "came from disk"],
)
def test_which_loads_run_beside_the_forward_pass(
    make_bench: Callable[..., Bench], before_tail: int, reply: dict[str, int], layerwise: bool
) -> None:
    bench = make_bench(layerwise=True, device=ScriptedDevice())
    assert promised(bench, before_tail, **reply) == Answer(blocks=5, layerwise=layerwise)
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step().loads
    assert plan.layerwise == layerwise
    assert not layerwise or plan.ready == len(plan.slots)


def test_a_load_that_others_want_too_is_confirmed_before_their_step(
    make_bench: Callable[..., Bench],
) -> None:
    """Beside its own forward pass it would keep them waiting for that pass as well."""
    bench = make_bench(layerwise=True, device=ScriptedDevice())
    bench.add("other")
    assert promised(bench, 9) == Answer(blocks=5)
    bench.leader.finished("other")
    assert bench.leader.matched("r", 0, 9) == Answer(blocks=5, layerwise=True)


def test_no_load_runs_beside_it_by_default(make_bench: Callable[..., Bench]) -> None:
    assert promised(make_bench(), 9) == Answer(blocks=5)


def loading(bench: Bench) -> LoadPlan:
    assert promised(bench, 9).layerwise
    bench.leader.allocated("r", 5, TABLE)
    (plan,) = bench.step({"r": 6}).loads
    return plan


def test_the_ranks_report_its_end(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(layerwise=True, device=ScriptedDevice())
    plan = loading(bench)
    bench.manager.said()
    bench.leader.updated(StepReport(loaded={"r": 0.25}), (), set())
    (release,) = bench.manager.said()
    assert (release.lookup, release.loaded, release.failed) == (plan.lookup, 5, 0)
    bench.leader.updated(StepReport(loaded={"r": 0.25}), (), set())
    assert bench.manager.said() == []


def test_nothing_computed_on_a_failed_layer_is_kept(make_bench: Callable[..., Bench]) -> None:
    """Neither of this request nor of others of that step; and all of it is offered again."""
    device = ScriptedDevice()
    bench = make_bench(layerwise=True, device=device)
    bench.add("other")
    planned = bench.store("other")
    plan = loading(bench)
    (reserve,) = [message for message in bench.manager.said() if isinstance(message, Reserve)]
    bench.leader.updated(StepReport(loaded={"r": 0.25}), (), {plan.device_blocks[1]})
    assert device.holds == {}, "nor may anybody find it on the device"
    given_up = [message for message in bench.manager.said() if isinstance(message, Commit)]
    assert [(commit.store, len(commit.failed)) for commit in given_up] == [(reserve.store, 6)]
    bench.report(planned)
    (commit,) = bench.manager.said()
    assert commit.failed == (0, 1, 2, 3)
    assert bench.step({"r": 6, "other": 4}).stores == ()
    again = [message for message in bench.manager.said() if isinstance(message, Reserve)]
    assert [split_keys(message.keys) for message in again] == [keys(6), keys(4)]


def test_no_other_request_reads_blocks_that_are_not_confirmed(make_bench: Callable[..., Bench]) -> None:
    """The engine shares blocks as soon as it has made room for them. If they fail, only their own request is told."""
    bench = make_bench(layerwise=True, device=ScriptedDevice())
    loading(bench)
    bench.manager.said()
    bench.answer(bench.add("twin", on_device=5), 1)
    assert bench.leader.matched("twin", 5, 9).later, "it found blocks that are being loaded"
    bench.answer(bench.add("apart"), 5)
    assert not bench.leader.matched("apart", 0, 9).later, "it loads its own"
    bench.leader.request_added("stranger", [bytes([200 + i]) * 32 for i in range(8)], b"", 5)
    (lookup,) = bench.manager.said()
    bench.answer(lookup, 1)
    assert not bench.leader.matched("stranger", 5, 9).later
    bench.leader.finished("r")
    assert bench.leader.matched("twin", 5, 9).later, "though it was aborted, its blocks may be found"
    bench.manager.ready(False)
    assert bench.leader.matched("twin", 5, 9).later, "nor does the manager's end confirm them"
    bench.manager.ready()
    bench.step()
    bench.manager.said()
    bench.add("r")  # a client may use the name again
    bench.leader.updated(StepReport(loaded={"r": 0.25}), (), set())
    assert not bench.leader.matched("twin", 5, 9).later


def test_a_failed_load_that_no_forward_pass_has_read_costs_only_itself(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    bench.add("other")
    planned = bench.store("other")
    plan = bench.load()
    bench.manager.said()
    bench.arrive(plan, invalid={plan.device_blocks[0]})
    bench.manager.said()
    bench.report(planned)
    (commit,) = bench.manager.said()
    assert commit.failed == ()


# ---- lazy


@pytest.fixture
def engine() -> ScriptedDevice:
    return ScriptedDevice()


def full(bench: Bench, engine: ScriptedDevice, request: str = "r", blocks: int = 4) -> None:
    """A request has computed so many blocks and ended."""
    bench.add(request)
    assert bench.step({request: blocks}).stores == ()
    assert bench.manager.said() == [], "nothing is stored for being full"
    bench.leader.finished(request)


def leave(bench: Bench, engine: ScriptedDevice, *blocks: int) -> list[Reserve]:
    """These blocks come next: what the leader asks slots for."""
    engine.free = list(blocks)
    bench.step()
    return [message for message in bench.manager.said() if isinstance(message, Reserve)]


def test_a_block_is_stored_when_it_is_about_to_go_with_what_lies_before_it(
    make_bench: Callable[..., Bench], engine: ScriptedDevice
) -> None:
    bench = make_bench(lazy=True, device=engine)
    full(bench, engine)
    assert leave(bench, engine, 139) == []
    (reserve,) = leave(bench, engine, TABLE[2])
    assert split_keys(reserve.keys) == keys(3), "a block without its prefix is worth nothing"
    bench.grant(reserve)
    engine.free = []
    plan = bench.step()
    assert [store.device_blocks for store in plan.stores] == [tuple(TABLE[:3])]
    assert plan.released == (), "not handed out before the next step"
    assert bench.step().released == (reserve.store,)
    (rest,) = leave(bench, engine, TABLE[3])
    assert (rest.parent, split_keys(rest.keys)) == (keys(4)[2], [keys(4)[3]])


def test_a_block_that_went_meanwhile_is_not_committed(
    make_bench: Callable[..., Bench], engine: ScriptedDevice
) -> None:
    bench = make_bench(lazy=True, device=engine)
    full(bench, engine)
    (reserve,) = leave(bench, engine, TABLE[3])
    bench.grant(reserve)
    engine.holds[TABLE[1]] = "something else"
    engine.free = []
    (plan,) = bench.step().stores
    bench.report(plan)
    (commit,) = bench.manager.said()
    assert commit.failed == (1,)


def test_a_block_that_is_named_before_its_bytes_are_there_is_not_committed(
    make_bench: Callable[..., Bench], engine: ScriptedDevice
) -> None:
    """It was handed out, and comes back for the same content: named so already, computed only in this step."""
    bench = make_bench(lazy=True, device=engine)
    full(bench, engine)
    (reserve,) = leave(bench, engine, TABLE[3])
    bench.grant(reserve)
    engine.free = []
    entry = Scheduled("s", 4, lambda: TABLE[:4], written_from=2)
    (plan,) = bench.leader.step([entry], (), 0, idle=False).stores
    bench.report(plan)
    commits = [message for message in bench.manager.said() if isinstance(message, Commit)]
    assert [commit.failed for commit in commits] == [(2, 3)]


def test_when_all_went_nothing_is_copied(make_bench: Callable[..., Bench], engine: ScriptedDevice) -> None:
    bench = make_bench(lazy=True, device=engine)
    full(bench, engine)
    (reserve,) = leave(bench, engine, TABLE[3])
    bench.grant(reserve)
    engine.holds.clear()
    engine.free = []
    assert bench.step().stores == ()
    (commit,) = bench.manager.said()
    assert (commit.store, commit.failed) == (reserve.store, (0, 1, 2, 3))


def test_after_a_reset_nothing_of_before_is_stored(
    make_bench: Callable[..., Bench], engine: ScriptedDevice
) -> None:
    bench = make_bench(lazy=True, device=engine)
    full(bench, engine)
    bench.manager.die()
    bench.leader.reset()
    bench.reconnect()
    assert leave(bench, engine, *TABLE) == []


def noted(engine: ScriptedDevice, chain: str, blocks: Sequence[int], unsaved: Unsaved) -> list[BlockKey]:
    names = [BlockKey(f"{chain}{i}".encode().ljust(32)) for i in range(len(blocks))]
    unsaved.note(None, names, blocks)
    return names


def test_a_chain_broken_in_its_middle_is_stored_from_there(engine: ScriptedDevice) -> None:
    unsaved = Unsaved(engine)
    names = noted(engine, "a", [100, 101, 102, 103], unsaved)
    engine.holds[101] = "something else"
    engine.free = [103]
    (chain,) = unsaved.leaving(8, 8)
    assert (chain.parent, chain.keys, chain.device_blocks) == (names[1], names[2:], [102, 103])


def test_a_block_that_two_requests_share_is_stored_once(engine: ScriptedDevice) -> None:
    unsaved = Unsaved(engine)
    noted(engine, "a", [100, 101], unsaved)
    noted(engine, "a", [100, 101], unsaved)
    engine.free = [101, 100]
    (chain,) = unsaved.leaving(8, 8)
    assert chain.device_blocks == [100, 101]
    assert unsaved.leaving(8, 8) == []


def test_it_holds_no_more_than_the_device_has_blocks(engine: ScriptedDevice) -> None:
    unsaved = Unsaved(engine)
    for turn in range(50):
        for block in TABLE:
            engine.holds[block] = (turn, block)
        noted(engine, f"turn {turn} ", TABLE, unsaved)
    assert len(unsaved) == len(TABLE)
    engine.free = list(TABLE)
    assert sum(len(chain.keys) for chain in unsaved.leaving(1000, 1000)) == len(TABLE)
    assert len(unsaved) == 0


def test_a_step_stores_no_more_than_its_share(engine: ScriptedDevice) -> None:
    unsaved = Unsaved(engine)
    for block in TABLE:
        noted(engine, f"single {block} ", [block], unsaved)
    engine.free = list(TABLE)
    assert len(unsaved.leaving(1000, 8)) == 8
    assert len(unsaved.leaving(1000, 1000)) == len(TABLE) - 8


def test_a_block_that_holds_nothing_to_find_again_is_not_noted(engine: ScriptedDevice) -> None:
    unsaved = Unsaved(engine)
    del engine.holds[100]
    noted(engine, "a", [100, 101], unsaved)
    assert len(unsaved) == 1

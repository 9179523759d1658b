"""A rank's worker against a real server: every block it reports as loaded has the right bytes."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from typing import Any

import pytest

from kvbm.client.channel import readable_among
from kvbm.protocol import (
    Fence,
    FenceDone,
    LookupReply,
    Message,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
)
from kvbm.step_plan import LoadPlan, StepPlan, StepReport
from kvbm.worker import loading
from kvbm.worker.jobs import FinishedLoad
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS
from rigs.mover import Rank, on_disk

PIECE_BLOCKS = 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "FIRST_PIECE_BYTES", PIECE_BLOCKS * 4096)


# ---- as it should be


def test_what_was_stored_comes_back_into_other_blocks(rank: Rank) -> None:
    rank.put_in(18)
    plan = rank.lookup(18)
    assert (plan.ready, len(plan.slots)) == (18, 18)
    assert len(plan.slots) > PIECE_BLOCKS
    load = rank.run_load(plan)
    assert (load.request, load.failed) == (plan.request, ())
    rank.judge(plan, ())
    assert rank.worker.report() == StepReport(loaded={plan.request: load.seconds})
    assert rank.worker.report() is None


def test_blocks_that_arrive_later_are_loaded_as_they_come(
    make_rank: Callable[..., Rank], below: FakeTier
) -> None:
    rank = on_disk(make_rank, below, 5)
    plan = rank.lookup(5)
    assert plan.ready == 0
    rank.worker.load(StepPlan(loads=(plan,)))
    below.release(2)
    rank.bench.until(lambda: rank.shows(21, 20.0))
    assert not rank.shows(22, 30.0)
    assert rank.worker.finished(StepPlan()) == []
    below.release()
    assert rank.finish().failed == ()
    rank.judge(plan, ())


def test_a_run_that_starts_in_its_middle(make_rank: Callable[..., Rank], below: FakeTier) -> None:
    """The device has the first blocks already: `offset` counts from the lookup's first."""
    rank = on_disk(make_rank, below, 5)
    whole = rank.lookup(5)
    plan = LoadPlan(
        request="r",
        lookup=whole.lookup,
        epoch=whole.epoch,
        slots=whole.slots[2:],
        generations=whole.generations[2:],
        device_blocks=(30, 31, 32),
        offset=2,
        ready=0,
    )
    rank.worker.load(StepPlan(loads=(plan,)))
    below.release(2)
    rank.bench.step()
    below.release()
    assert rank.finish().failed == ()
    assert [rank.shows(30 + i, 10.0 * (3 + i)) for i in range(3)] == [True] * 3


def test_stores_go_before_loads_and_several_loads_all_end(rank: Rank) -> None:
    rank.put_in(6)
    first, second = rank.lookup(4), rank.lookup(6)
    store = rank.reserve(6, 1, [7])
    rank.paint(7, 70.0)
    rank.worker.load(StepPlan(loads=(first,)))
    rank.worker.store(StepPlan(stores=(store,)))
    rank.worker.load(StepPlan(loads=(second,)))
    done: list[FinishedLoad] = []
    rank.bench.until(lambda: done.extend(rank.worker.finished(StepPlan())) or len(done) == 2)
    assert {load.request: load.failed for load in done} == {first.request: (), second.request: ()}
    rank.judge(second, ())


# ---- a slot that is not what it was


@pytest.mark.parametrize("changed", [0, 1, 5, PIECE_BLOCKS - 1, PIECE_BLOCKS, PIECE_BLOCKS + 1])
def test_a_slot_that_changed_hands_before_the_copy_fails_from_there(rank: Rank, changed: int) -> None:
    """And what lies before it really is copied."""
    rank.put_in(18)
    plan = rank.lookup(18)
    rank.bench.space().arena.invalidate(plan.slots[changed])
    load = rank.run_load(plan)
    assert load.failed == plan.device_blocks[changed:]
    rank.judge(plan, load.failed)


def test_a_slot_that_changes_hands_under_the_copy_fails(rank: Rank) -> None:
    rank.put_in(6)
    plan = rank.lookup(6)
    copier = rank.copier
    load_pairs = copier.begin_load

    def overtaken(pairs: Any, after: Any = None) -> Any:
        copying = load_pairs(pairs, after)
        rank.bench.space().arena.invalidate(plan.slots[3])
        return copying

    copier.begin_load = overtaken
    load = rank.run_load(plan)
    assert load.failed == plan.device_blocks[3:]
    rank.judge(plan, load.failed)


def test_an_evicted_lease_is_noticed(rank: Rank) -> None:
    """The lease ran out, the slots went to other blocks, and only then the load begins."""
    rank.put_in(4)
    plan = rank.lookup(4)
    rank.leader.send(Release(lookup=plan.lookup))
    rank.leader.send(Reset())
    rank.leader.expect(ResetReply)
    rank.leader.send(Reserve(store=900, parent=b"", keys=b"".join(KEYS[100:140])))
    rank.leader.expect(ReserveReply)
    assert rank.run_load(plan).failed == plan.device_blocks


@pytest.mark.swallows("^RuntimeError: device-side error$")
def test_a_copy_that_fails_fails_its_blocks(rank: Rank) -> None:
    rank.put_in(PIECE_BLOCKS + 2)
    plan = rank.lookup(PIECE_BLOCKS + 2)
    copier = rank.copier
    load_pairs, calls = copier.begin_load, []

    def fails_second(pairs: Any, after: Any = None) -> Any:
        calls.append(len(pairs))
        if len(calls) == 2:
            raise RuntimeError("device-side error")
        return load_pairs(pairs, after)

    copier.begin_load = fails_second
    load = rank.run_load(plan)
    assert load.failed == plan.device_blocks[PIECE_BLOCKS:]
    rank.judge(plan, load.failed)


def test_a_block_that_does_not_arrive_fails_with_all_behind_it(
    make_rank: Callable[..., Rank], below: FakeTier
) -> None:
    rank = on_disk(make_rank, below, 5)
    disk = rank.bench.space().disk
    assert disk is not None
    below.medium.corrupt(disk.pool.find(KEYS[2]))  # type: ignore[arg-type]
    plan = rank.lookup(5)
    rank.worker.load(StepPlan(loads=(plan,)))
    below.release()
    load = rank.finish()
    assert load.failed == plan.device_blocks[2:]
    rank.judge(plan, load.failed)


def test_a_lookup_that_nobody_knows_fails(rank: Rank) -> None:
    rank.put_in(2)
    plan = rank.lookup(2)
    fields = {field: getattr(plan, field) for field in plan.__struct_fields__}
    load = rank.run_load(LoadPlan(**{**fields, "lookup": 4711, "ready": 0}))
    assert load.failed == plan.device_blocks


def test_a_load_that_stalls_is_ended(
    make_rank: Callable[..., Rank], below: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = on_disk(make_rank, below, 3)
    plan = rank.lookup(3)
    monkeypatch.setattr(loading, "LOAD_STALL_S", -1.0)
    load = rank.run_load(plan)
    assert load.failed == plan.device_blocks


# ---- small things


def test_descriptors_above_a_thousand_can_be_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("no such descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    event = os.eventfd(0)
    high = 1100
    os.dup2(event, high)
    try:
        assert readable_among([high], 0.0) == []
        os.eventfd_write(event, 1)
        assert readable_among([high, event], 1.0) == [high, event]
    finally:
        os.close(high)
        os.close(event)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_reports_of_ranks_merge() -> None:
    one = StepReport(stored={1: (1, (0,), 0.5), 2: (1, (), 0.1)}, loaded={"a": 1.0})
    two = StepReport(stored={1: (1, (2,), 0.25)}, loaded={"a": 0.5, "b": 2.0})
    assert one.merge(two) == StepReport(
        stored={1: (2, (0, 2), 0.5), 2: (1, (), 0.1)}, loaded={"a": 1.0, "b": 2.0}
    )
    assert isinstance(one, StepReport)
    assert not isinstance(one, Message)
    assert {Fence, FenceDone, LookupReply} <= set(Message.__subclasses__())

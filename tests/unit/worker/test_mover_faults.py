"""A rank's worker when stores come late, copies fail and the manager goes: every job is answered, no slot spoilt."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm.client.channel import Channel
from kvbm.errors import KvbmError
from kvbm.protocol import Commit, Ready
from kvbm.step_plan import LoadPlan, StepPlan, StepReport, StorePlan
from kvbm.worker import mover as mover_module
from kvbm.worker.jobs import FinishedLoad, StoreJob
from kvbm.worker.mapping import Mapping
from rigs.fake_tier import FakeTier
from rigs.manager import DEADLINE_S, ManagerBench
from rigs.mover import Rank, on_disk

# ---- stores


def test_a_store_of_another_life_is_not_begun(rank: Rank) -> None:
    plan = rank.reserve(0, 2, [0, 1])
    before = [bytes(rank.bench.space().arena.slot_views(slot)[0]) for slot in plan.slots]
    fields = {field: getattr(plan, field) for field in plan.__struct_fields__}
    rank.paint(0, 1.0)
    assert rank.run_store(StorePlan(**{**fields, "epoch": plan.epoch + 1})) == (0, 1)
    assert [bytes(rank.bench.space().arena.slot_views(slot)[0]) for slot in plan.slots] == before


def test_a_store_whose_reservation_has_ended_is_not_begun(rank: Rank) -> None:
    """Its slot is another block's now, and that block's bytes stay what they are."""
    rank.paint(0, 1.0)
    stale = rank.reserve(0, 1, [0])
    rank.leader.send(Commit(store=stale.store, failed=(0,)))
    rank.paint(1, 10.0)
    fresh = rank.reserve(0, 1, [1])
    assert fresh.slots == stale.slots
    assert rank.run_store(fresh) == ()
    rank.leader.send(Commit(store=fresh.store))
    assert rank.run_store(stale) == (0,)
    plan = rank.lookup(1)
    assert rank.run_load(plan).failed == ()
    rank.judge(plan, ())


def test_a_fence_is_answered_and_its_stores_do_not_begin(rank: Rank) -> None:
    plan = rank.reserve(0, 2, [0, 1])
    rank.leader.close()
    rank.bench.until(lambda: rank.bench.space().host_pool.counts().filling == 0, "the fence is not answered")
    rank.leader = rank.bench.leader()
    rank.leader.expect(Ready)
    assert rank.run_store(plan) == (0, 1)


def test_a_store_that_runs_is_finished_before_a_fence_is_answered(rank: Rank) -> None:
    plan = rank.reserve(0, 1, [0])
    copier = rank.copier
    begun, go_on, store_pairs = threading.Event(), threading.Event(), copier.begin_store

    def slow(pairs: Any, after: Any = None) -> Any:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return store_pairs(pairs, after)

    copier.begin_store = slow
    engine = threading.Thread(target=rank.worker.store, args=(StepPlan(stores=(plan,)),))
    engine.start()
    assert begun.wait(DEADLINE_S)
    rank.leader.close()
    rank.bench.step(10)
    assert rank.bench.space().host_pool.counts().filling == 1, "it may still write there"
    go_on.set()
    engine.join()
    rank.bench.until(lambda: rank.bench.space().host_pool.counts().filling == 0)


def test_a_fenced_store_that_is_not_begun_leaves_the_slot_alone(rank: Rank) -> None:
    """The whole order of events: fence, slot given to another block, late plan, and nothing is overwritten."""
    late = rank.reserve(0, 1, [0])
    rank.paint(0, 666.0)
    rank.leader.close()
    rank.bench.until(lambda: rank.bench.space().host_pool.counts().filling == 0)
    rank.leader = rank.bench.leader()
    rank.leader.expect(Ready)
    rank.put_in(1)
    rank.paint(0, 666.0)
    assert rank.run_store(late) == (0,)
    plan = rank.lookup(1)
    assert plan.slots == late.slots
    assert rank.run_load(plan).failed == ()
    rank.judge(plan, ())


def test_an_abandoned_store_is_reported_as_failed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = rank.reserve(0, 1, [0])
    copier = rank.copier
    go_on, store_pairs = threading.Event(), copier.begin_store

    def slow(pairs: Any, after: Any = None) -> Any:
        assert go_on.wait(DEADLINE_S)
        return store_pairs(pairs, after)

    copier.begin_store = slow
    monkeypatch.setattr("kvbm.worker.worker.STORE_TIMEOUT_S", 0.01)
    rank.worker.store(StepPlan(stores=(plan,)))
    assert rank.worker.report() is None, "the slots are not let go of yet"
    go_on.set()
    reports: list[StepReport] = []
    rank.bench.until(lambda: (report := rank.worker.report()) is not None and not reports.append(report))
    assert reports[0].stored[plan.store][1] == (0,)


@pytest.mark.swallows("out of range|CUDA error|a defect")
@pytest.mark.parametrize(
    "error", [KvbmError("out of range"), RuntimeError("CUDA error"), KeyError("a defect")]
)
def test_a_store_that_raises_is_reported_and_the_thread_lives(
    make_rank: Callable[..., Rank], error: Exception
) -> None:
    rank = make_rank()
    copier = rank.copier
    store_pairs = copier.begin_store

    def fails(pairs: Any, after: Any = None) -> Any:
        copier.begin_store = store_pairs
        raise error

    copier.begin_store = fails
    first, second = rank.reserve(0, 2, [0, 1]), rank.reserve(2, 1, [2])
    rank.worker.store(StepPlan(stores=(first, second)))
    report = rank.worker.report()
    assert report is not None
    assert {number: failed for number, (_, failed, _) in report.stored.items()} == {
        first.store: (0, 1),
        second.store: (),
    }


@pytest.mark.swallows("^KeyError: 'a defect that names blocks")
def test_stores_that_fail_over_and_over_are_logged_once_and_then_counted(
    make_rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    rank = make_rank()

    def fails(pairs: Any, after: Any = None) -> Any:
        raise KeyError(f"a defect that names blocks {pairs}")

    rank.copier.begin_store = fails
    for i in range(11):
        assert rank.run_store(rank.reserve(i, 1, [i % 4])) == (0,)
    rank.worker.close()
    logged = [record for record in caplog.records if "failed" in record.getMessage()]
    assert [bool(record.exc_info) for record in logged] == [True, False, False, False, False]
    assert logged[0].getMessage() == "store of 1 blocks failed"
    assert [record.getMessage().partition(";")[0] for record in logged[1:]] == [
        f"store failed {count} times by now, {count} blocks" for count in (2, 4, 8, 11)
    ]


def test_a_replica_stores_nothing_and_says_so(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank(stores_here=False)
    plan = rank.reserve(0, 2, [0, 1])
    before = bytes(rank.bench.space().arena.slot_views(plan.slots[0])[0])
    rank.paint(0, 5.0)
    assert rank.run_store(plan) == ()
    assert bytes(rank.bench.space().arena.slot_views(plan.slots[0])[0]) == before
    rank.worker.store(StepPlan())
    assert rank.worker.report() is None


# ---- the manager goes and comes


def test_without_a_manager_jobs_fail_at_once(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.stop_manager()
    rank.worker.start()
    store = StorePlan(store=1, epoch=1, slots=(0,), generations=(0,), device_blocks=(0,))
    assert rank.run_store(store) == (0,)
    load = LoadPlan(
        request="r", lookup=1, epoch=1, slots=(0,), generations=(0,), device_blocks=(20,), offset=0, ready=1
    )
    assert rank.run_load(load).failed == (20,)
    rank.close()


def test_a_manager_that_goes_while_blocks_are_on_their_way(
    make_rank: Callable[..., Rank], below: FakeTier
) -> None:
    """Blocks that had arrived are loaded from memory that nobody overwrites any more; the rest fails."""
    rank = on_disk(make_rank, below, 5)
    plan = rank.lookup(5)
    below.release(2)
    rank.bench.step()
    rank.worker.load(StepPlan(loads=(plan,)))
    rank.bench.until(lambda: rank.shows(21, 20.0))
    rank.stop_manager()
    load = rank.finish()
    assert load.failed == plan.device_blocks[2:]
    rank.judge(plan, load.failed)


def test_what_was_ready_is_loaded_though_the_manager_is_dead(rank: Rank) -> None:
    rank.put_in(4)
    plan = rank.lookup(4)
    rank.stop_manager()
    assert rank.run_load(plan).failed == ()
    rank.judge(plan, ())


def test_nothing_is_stored_without_a_session(rank: Rank) -> None:
    """No fence could reach it: the memory may be anybody's."""
    plan = rank.reserve(0, 1, [0])
    rank.stop_manager()
    rank.await_lost_session()
    assert rank.run_store(plan) == (0,)
    job = StoreJob((plan,), rank.mover.mark())
    rank.mover.put(job)
    assert job.begun.wait(DEADLINE_S)
    assert rank.mover.stores.get(timeout=DEADLINE_S).failed == (0,), "nor by the thread, should it be asked"


def test_it_comes_back_by_itself_and_old_plans_mean_nothing(rank: Rank) -> None:
    rank.put_in(3)
    old_load, old_store = rank.lookup(3), rank.reserve(3, 1, [3])
    rank.stop_manager()
    rank.start_manager()
    assert rank.run_load(old_load).failed == old_load.device_blocks
    assert rank.run_store(old_store) == (0,)
    rank.put_in(3)
    plan = rank.lookup(3)
    assert rank.run_load(plan).failed == ()
    rank.judge(plan, ())


def test_an_engine_that_cannot_be_told_of_a_failure_loads_from_the_memory_of_its_promise(
    make_rank: Callable[..., Rank],
) -> None:
    """It was promised blocks by one life of the manager, and they are loaded in the next one."""
    rank = make_rank(reports=True)
    rank.put_in(10)
    plan = rank.lookup(10)
    rank.stop_manager()
    rank.start_manager()
    for block in plan.device_blocks:
        rank.paint(block, -1.0)
    done = load_now(rank, plan)
    assert [load.failed for load in done] == [()]
    rank.judge(plan, ())
    rank.mover._earlier.close()
    (late,) = load_now(rank, plan, timeout_s=0.01)
    assert late.failed == plan.device_blocks, "its time is over"


def load_now(rank: Rank, plan: LoadPlan, timeout_s: float = 20.0) -> list[FinishedLoad]:
    return rank.worker.load_now(StepPlan(loads=(plan,)), timeout_s)


def test_jobs_marked_for_an_earlier_mapping_do_not_run_on_a_later_one(rank: Rank) -> None:
    """The mark orders a copy behind the engine's work: without one of this mapping there is no order."""
    plan = rank.reserve(0, 1, [0])
    mark = rank.mover.mark()
    assert mark is not None
    rank.mover.mark = lambda: None  # type: ignore[method-assign]
    assert rank.run_store(plan) == (0,)
    stranger = object.__new__(Mapping)
    rank.mover.mark = lambda: mark._replace(mapping=stranger)  # type: ignore[method-assign]
    assert rank.run_store(plan) == (0,)
    del rank.mover.mark
    assert rank.run_store(plan) == ()


@pytest.mark.swallows(r"^OSError: \[Errno 12\] no memory$")
def test_a_mapping_that_cannot_be_made_costs_the_cache_not_the_engine(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank.put_in(2)
    old = rank.lookup(2)
    monkeypatch.setattr(mover_module, "ADOPT_RETRY_S", 0.0)
    make_mapping = rank.make_mapping
    refusals: list[int] = []

    def refuse(welcome: Any, fds: list[int]) -> Mapping:
        refusals.append(1)
        if len(refusals) <= 2:
            for fd in fds:
                os.close(fd)
            raise OSError(errno.ENOMEM, "no memory")
        return make_mapping(welcome, fds)

    rank.make_mapping = refuse  # type: ignore[method-assign]
    rank.stop_manager()
    rank.bench = ManagerBench(rank.directory, **rank.settings)
    rank.closed = False
    rank.leader = rank.bench.leader()
    rank.bench.until(lambda: refusals)  # by now it may have tried again
    assert rank.run_load(old).failed == old.device_blocks
    rank.await_new_session()
    rank.leader.take()
    rank.put_in(2)
    plan = rank.lookup(2)
    assert rank.run_load(plan).failed == ()
    rank.judge(plan, ())
    caplog.clear()


@pytest.mark.swallows("^KeyError: 'a defect'$")
def test_a_defect_fails_what_is_open_and_the_thread_goes_on(
    make_rank: Callable[..., Rank],
    below: FakeTier,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = on_disk(make_rank, below, 3)
    plan = rank.lookup(3)
    rank.worker.load(StepPlan(loads=(plan,)))
    receive, broken = Channel.receive, rank.mappings[-1]

    def fails(channel: Channel) -> Any:
        if threading.current_thread().name != "kvbm-mover":
            return receive(channel)
        monkeypatch.setattr(Channel, "receive", receive)
        raise KeyError("a defect")

    monkeypatch.setattr(Channel, "receive", fails)
    below.release()
    load = rank.finish()
    rank.judge(plan, load.failed)
    assert "open loads are recomputed" in caplog.text
    rank.bench.until(
        lambda: rank.mover.connected and rank.mappings[-1] is not broken, "it does not come back"
    )
    rank.leader.take()
    plan = rank.lookup(3)
    below.release()
    assert rank.run_load(plan).failed == ()


def test_stopping_ends_every_job(make_rank: Callable[..., Rank], below: FakeTier) -> None:
    rank = on_disk(make_rank, below, 3)
    plan = rank.lookup(3)
    rank.worker.load(StepPlan(loads=(plan,)))
    rank.worker.close()
    (load,) = rank.worker.finished(StepPlan())
    assert load.failed == plan.device_blocks

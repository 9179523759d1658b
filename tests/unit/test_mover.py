"""A rank's worker against a real server: every block it reports as loaded has the right bytes, whatever goes wrong.

The mover runs in its own thread; the test's thread is the manager and the engine.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbm.channel import Channel, readable_among
from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable
from kvbm.launch import ManagerAddress, ManagerFinder
from kvbm.layout import BlockLayout
from kvbm.protocol import (
    Commit,
    Fence,
    FenceDone,
    LoadPlan,
    LookupReply,
    Message,
    Ready,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
    StepPlan,
    StepReport,
    StorePlan,
)
from kvbm.testing.fake_tier import FakeMedium, FakeTier
from kvbm.transfer import DeviceCache
from kvbm.worker import mover as mover_module
from kvbm.worker.mapping import Mapping
from kvbm.worker.mover import PIECE_BLOCKS, FinishedLoad
from kvbm.worker.worker import Worker
from unit.manager_bench import DEADLINE_S, KEYS, OTHER, Client, ManagerBench

DEVICE_BLOCKS = 48
SHAPE = (DEVICE_BLOCKS, 2, 4, 8)


class Rank:
    """A worker, its device memory, and the manager that it is attached to."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.tensors = {name: torch.zeros(SHAPE) for name in ("layer.0", "layer.1")}
        cache = DeviceCache.from_tensors(self.tensors, DEVICE_BLOCKS)
        self.layout = BlockLayout(block_tokens=4, shard_bytes=cache.shard_bytes)
        self.directory = directory
        self.settings = {"host_blocks": 40, **settings}
        self.bench = ManagerBench(directory, **self.settings)
        address = ManagerAddress(socket_path=self.bench.path, private=False)
        finder = ManagerFinder(address, self.bench.settings, {}, time.monotonic)
        self.hello = self.bench.worker_hello(layout=self.layout)
        self.worker = Worker(finder, self.hello, cache)
        self.mover = self.worker._mover
        self.leader: Client = self.bench.leader()
        self.numbers = iter(range(1, 1000))
        self.closed = False

    def attach(self) -> None:
        """Join, and start to serve."""
        done: list[BaseException | None] = []

        def join() -> None:
            try:
                self.worker.attach(DEADLINE_S)
                done.append(None)
            except Exception as error:
                done.append(error)

        thread = threading.Thread(target=join)
        thread.start()
        self.bench.until(lambda: done)
        thread.join()
        if done[0] is not None:
            raise done[0]
        self.worker.start()
        assert self.leader.expect(Ready).ready

    # ---- device memory

    def paint(self, block: int, value: float) -> None:
        """Bytes that only this value has."""
        for i, tensor in enumerate(self.tensors.values()):
            tensor[block] = value + i + torch.arange(tensor[block].numel()).reshape(tensor[block].shape) / 1000

    def shows(self, block: int, value: float) -> bool:
        expected = [
            value + i + torch.arange(64).reshape(2, 4, 8) / 1000 for i in range(len(self.tensors))
        ]
        return all(
            torch.equal(tensor[block], want)
            for tensor, want in zip(self.tensors.values(), expected, strict=True)
        )

    # ---- stores

    def reserve(self, first: int, count: int, device_blocks: list[int]) -> StorePlan:
        number = next(self.numbers)
        parent = KEYS[first - 1] if first else b""
        self.leader.send(Reserve(store=number, parent=parent, keys=b"".join(KEYS[first : first + count])))
        reply = self.leader.expect(ReserveReply)
        return StorePlan(
            store=number,
            epoch=self.bench.server.epoch,
            slots=reply.slots,
            generations=reply.generations,
            device_blocks=tuple(device_blocks),
        )

    def run_store(self, plan: StorePlan) -> tuple[int, ...]:
        """Carry the plan out; the positions that failed."""
        self.worker.store(StepPlan(stores=(plan,)))
        report = self.worker.report()
        assert report is not None
        ranks, failed, _ = report.stored[plan.store]
        assert ranks == 1
        return failed

    def put_in(self, count: int) -> None:
        """Blocks 0 … count-1 of the prompt are in host memory, painted 1, 2, …"""
        for block in range(count):
            self.paint(block, 10.0 * (block + 1))
        plan = self.reserve(0, count, list(range(count)))
        assert self.run_store(plan) == ()
        self.leader.send(Commit(store=plan.store))

    # ---- loads

    def lookup(self, count: int) -> LoadPlan:
        """A plan that loads the prompt's blocks into device blocks 20, 21, …"""
        number = next(self.numbers)
        found = self.leader.lookup(number, KEYS[:count])
        return LoadPlan(
            request=f"r{number}",
            lookup=number,
            epoch=self.bench.server.epoch,
            slots=found.slots,
            generations=found.generations,
            device_blocks=tuple(range(20, 20 + len(found.slots))),
            offset=0,
            ready=found.ready,
        )

    def run_load(self, plan: LoadPlan) -> FinishedLoad:
        self.worker.load(StepPlan(loads=(plan,)))
        return self.finish()

    def finish(self) -> FinishedLoad:
        done: list[FinishedLoad] = []

        def over() -> bool:
            done.extend(self.worker.finished(StepPlan()))
            return bool(done)

        if self.closed:
            end_s = time.monotonic() + DEADLINE_S
            while not over():
                assert time.monotonic() < end_s, "the load never ended"
                time.sleep(0.002)
        else:
            self.bench.until(over, "the load never ended")
        (load,) = done
        return load

    def judge(self, plan: LoadPlan, failed: tuple[int, ...]) -> None:
        """These failed, and every other block is the right one."""
        assert failed == plan.device_blocks[len(plan.device_blocks) - len(failed) :]
        for i, block in enumerate(plan.device_blocks):
            if block not in failed:
                assert self.shows(block, 10.0 * (i + 1)), f"block {i} was reported as loaded"

    # ---- the manager

    def stop_manager(self) -> None:
        self.closed = True
        self.bench.open = False
        self.bench.server.close(keep=True)
        os.unlink(self.bench.path)

    def start_manager(self) -> None:
        """Another life of it, and the worker comes back by itself."""
        self.bench = ManagerBench(self.directory, **self.settings)
        self.closed = False
        self.leader = self.bench.leader()
        self.bench.until(lambda: self.bench.server.engine_count == 1, "the worker did not come back")
        assert self.leader.expect(Ready).ready
        epoch = self.bench.server.epoch
        self.bench.until(lambda: self.mover._mapping is not None and self.mover._mapping.epoch == epoch)

    def close(self) -> None:
        self.worker.close()
        assert not self.mover._thread.is_alive()
        self.bench.check()
        self.bench.close()


@pytest.fixture
def media() -> Iterator[list[FakeMedium]]:
    """Closed after the managers that use them."""
    media: list[FakeMedium] = []
    yield media
    for medium in media:
        medium.close()


@pytest.fixture
def make(tmp_path: Path, media: list[FakeMedium]) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def build(**settings: Any) -> Rank:
        ranks.append(Rank(tmp_path, **settings))
        ranks[-1].attach()
        return ranks[-1]

    yield build
    for rank in ranks:
        rank.close()


@pytest.fixture
def rank(make: Callable[..., Rank], caplog: pytest.LogCaptureFixture) -> Iterator[Rank]:
    """A rank whose mover must not meet a defect of its own."""
    yield make()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def below(media: list[FakeMedium], monkeypatch: pytest.MonkeyPatch) -> FakeTier:
    """What the manager opens when it opens a disk tier."""
    media.append(FakeMedium(BlockLayout(block_tokens=4, shard_bytes=512), 40))
    tier = FakeTier(media[0], pending_limit=40)
    monkeypatch.setattr("kvbm.manager.assembly.open_disk_tier", lambda *args, **options: tier)
    return tier


def on_disk(make: Callable[..., Rank], below: FakeTier, count: int) -> Rank:
    """A rank whose blocks are below host memory only."""
    rank = make(disk_blocks=40, disk_offload_filter=False)
    rank.put_in(count)
    rank.bench.until(lambda: below.release() + len(below.medium.entries) == count)
    rank.bench.step()
    rank.leader.send(Reset(tier="host"))
    assert rank.leader.expect(ResetReply).dropped == count
    return rank


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
    make: Callable[..., Rank], below: FakeTier
) -> None:
    rank = on_disk(make, below, 5)
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


def test_a_run_that_starts_in_its_middle(make: Callable[..., Rank], below: FakeTier) -> None:
    """The device has the first blocks already: `offset` counts from the lookup's first."""
    rank = on_disk(make, below, 5)
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
    assert rank.worker.finished(StepPlan()) == []
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
    copier = rank.mover._mapping.copier  # type: ignore[union-attr]
    load_pairs = copier.load

    def overtaken(pairs: Any, after: Any = None) -> None:
        load_pairs(pairs, after)
        rank.bench.space().arena.invalidate(plan.slots[3])

    copier.load = overtaken  # type: ignore[method-assign]
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


def test_a_copy_that_fails_fails_its_blocks(rank: Rank) -> None:
    rank.put_in(PIECE_BLOCKS + 2)
    plan = rank.lookup(PIECE_BLOCKS + 2)
    copier = rank.mover._mapping.copier  # type: ignore[union-attr]
    load_pairs, calls = copier.load, []

    def fails_second(pairs: Any, after: Any = None) -> None:
        calls.append(len(pairs))
        if len(calls) == 2:
            raise RuntimeError("device-side error")
        load_pairs(pairs, after)

    copier.load = fails_second  # type: ignore[method-assign]
    load = rank.run_load(plan)
    assert load.failed == plan.device_blocks[PIECE_BLOCKS:]
    rank.judge(plan, load.failed)


def test_a_block_that_does_not_arrive_fails_with_all_behind_it(
    make: Callable[..., Rank], below: FakeTier
) -> None:
    rank = on_disk(make, below, 5)
    disk = rank.bench.space().disk
    assert disk is not None
    below.medium.corrupt(disk.find(KEYS[2]))  # type: ignore[arg-type]
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


def test_a_load_that_stalls_is_given_up(
    make: Callable[..., Rank], below: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = on_disk(make, below, 3)
    plan = rank.lookup(3)
    monkeypatch.setattr(mover_module, "LOAD_STALL_S", -1.0)
    load = rank.run_load(plan)
    assert load.failed == plan.device_blocks


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
    rank.bench.until(lambda: rank.bench.space().host.counts().filling == 0, "the fence is not answered")
    rank.leader = rank.bench.leader()
    rank.leader.expect(Ready)
    assert rank.run_store(plan) == (0, 1)


def test_a_store_that_runs_is_finished_before_a_fence_is_answered(rank: Rank) -> None:
    plan = rank.reserve(0, 1, [0])
    copier = rank.mover._mapping.copier  # type: ignore[union-attr]
    begun, go_on, store_pairs = threading.Event(), threading.Event(), copier.store

    def slow(pairs: Any, after: Any = None) -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        store_pairs(pairs, after)

    copier.store = slow  # type: ignore[method-assign]
    engine = threading.Thread(target=rank.worker.store, args=(StepPlan(stores=(plan,)),))
    engine.start()
    assert begun.wait(DEADLINE_S)
    rank.leader.close()
    rank.bench.step(10)
    assert rank.bench.space().host.counts().filling == 1, "it may still write there"
    go_on.set()
    engine.join()
    rank.bench.until(lambda: rank.bench.space().host.counts().filling == 0)


def test_a_fenced_store_that_is_not_begun_leaves_the_slot_alone(rank: Rank) -> None:
    """The whole order of events: fence, slot given to another block, late plan, and nothing is overwritten."""
    late = rank.reserve(0, 1, [0])
    rank.paint(0, 666.0)
    rank.leader.close()
    rank.bench.until(lambda: rank.bench.space().host.counts().filling == 0)
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
    copier = rank.mover._mapping.copier  # type: ignore[union-attr]
    go_on, store_pairs = threading.Event(), copier.store

    def slow(pairs: Any, after: Any = None) -> None:
        assert go_on.wait(DEADLINE_S)
        store_pairs(pairs, after)

    copier.store = slow  # type: ignore[method-assign]
    monkeypatch.setattr("kvbm.worker.worker.STORE_TIMEOUT_S", 0.01)
    rank.worker.store(StepPlan(stores=(plan,)))
    assert rank.worker.report() is None, "the slots are not let go of yet"
    go_on.set()
    reports: list[StepReport] = []
    rank.bench.until(lambda: (report := rank.worker.report()) is not None and not reports.append(report))
    assert reports[0].stored[plan.store][1] == (0,)


@pytest.mark.parametrize("error", [KvbmError("out of range"), RuntimeError("CUDA error"), KeyError("a defect")])
def test_a_store_that_raises_is_reported_and_the_thread_lives(
    make: Callable[..., Rank], error: Exception
) -> None:
    rank = make()
    copier = rank.mover._mapping.copier  # type: ignore[union-attr]
    store_pairs = copier.store

    def fails(pairs: Any, after: Any = None) -> None:
        copier.store = store_pairs  # type: ignore[method-assign]
        raise error

    copier.store = fails  # type: ignore[method-assign]
    first, second = rank.reserve(0, 2, [0, 1]), rank.reserve(2, 1, [2])
    rank.worker.store(StepPlan(stores=(first, second)))
    report = rank.worker.report()
    assert report is not None
    assert {number: failed for number, (_, failed, _) in report.stored.items()} == {
        first.store: (0, 1),
        second.store: (),
    }


def test_a_replica_stores_nothing_and_says_so(rank: Rank) -> None:
    rank.worker._stores_here = False
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
    make: Callable[..., Rank], below: FakeTier
) -> None:
    """What had arrived is loaded from memory that nobody overwrites any more; the rest fails."""
    rank = on_disk(make, below, 5)
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
    end_s = time.monotonic() + DEADLINE_S
    while rank.mover._channel is not None:
        assert time.monotonic() < end_s
        time.sleep(0.002)
    assert rank.run_store(plan) == (0,)


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


def test_a_session_that_breaks_leaves_no_job_waiting(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that needs the manager ends the turn; the store behind it must not wait for the next wake-up."""
    rank.put_in(2)
    plan, store = rank.lookup(2), rank.reserve(2, 1, [2])
    fields = {field: getattr(plan, field) for field in plan.__struct_fields__}
    rank.stop_manager()
    end_s = time.monotonic() + DEADLINE_S
    while rank.mover._channel is not None:
        assert time.monotonic() < end_s
        time.sleep(0.002)
    monkeypatch.setattr(mover_module, "_RECONNECT_POLL_S", 3600.0)
    gate = threading.Event()
    turn = rank.mover._take_jobs

    def held() -> None:
        assert gate.wait(DEADLINE_S)
        turn()

    monkeypatch.setattr(rank.mover, "_take_jobs", held)
    rank.worker.load(StepPlan(loads=(LoadPlan(**{**fields, "ready": 1}),)))
    engine = threading.Thread(target=rank.worker.store, args=(StepPlan(stores=(store,)),))
    engine.start()
    while rank.mover._inbox.qsize() < 2:
        assert time.monotonic() < end_s
        time.sleep(0.002)
    gate.set()
    engine.join(DEADLINE_S)
    assert not engine.is_alive(), "the engine waits for a store that nobody looks at"
    assert rank.finish().failed == plan.device_blocks[1:]


def test_a_mapping_that_cannot_be_made_costs_the_cache_not_the_engine(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank.put_in(2)
    old = rank.lookup(2)
    make_mapping = rank.mover._make_mapping
    refusals: list[int] = []

    def refuse(welcome: Any, fds: list[int]) -> Mapping:
        refusals.append(1)
        if len(refusals) <= 2:
            for fd in fds:
                os.close(fd)
            raise OSError(errno.ENOMEM, "no memory")
        return make_mapping(welcome, fds)

    monkeypatch.setattr(rank.mover, "_make_mapping", refuse)
    rank.stop_manager()
    rank.bench = ManagerBench(rank.directory, **rank.settings)
    rank.closed = False
    rank.leader = rank.bench.leader()
    rank.bench.until(lambda: len(refusals) == 1)
    assert rank.run_load(old).failed == old.device_blocks
    epoch = rank.bench.server.epoch
    rank.bench.until(lambda: rank.mover._mapping is not None and rank.mover._mapping.epoch == epoch)
    rank.leader.take()
    rank.put_in(2)
    plan = rank.lookup(2)
    assert rank.run_load(plan).failed == ()
    rank.judge(plan, ())
    caplog.clear()


def test_a_defect_fails_what_is_open_and_the_thread_goes_on(
    make: Callable[..., Rank], below: FakeTier, caplog: pytest.LogCaptureFixture
) -> None:
    rank = on_disk(make, below, 3)
    plan = rank.lookup(3)
    rank.worker.load(StepPlan(loads=(plan,)))
    listen, broken = rank.mover._listen, rank.mover._mapping

    def fails(channel: Channel) -> None:
        rank.mover._listen = listen  # type: ignore[method-assign]
        raise KeyError("a defect")

    rank.mover._listen = fails  # type: ignore[method-assign]
    below.release()
    load = rank.finish()
    rank.judge(plan, load.failed)
    assert "open loads are recomputed" in caplog.text
    rank.bench.until(lambda: rank.mover._mapping not in (None, broken), "it does not come back")
    rank.leader.take()
    plan = rank.lookup(3)
    below.release()
    assert rank.run_load(plan).failed == ()


def test_stopping_ends_every_job(make: Callable[..., Rank], below: FakeTier) -> None:
    rank = on_disk(make, below, 3)
    plan = rank.lookup(3)
    rank.worker.load(StepPlan(loads=(plan,)))
    rank.worker.close()
    (load,) = rank.worker.finished(StepPlan())
    assert load.failed == plan.device_blocks


def test_a_worker_of_another_namespace_is_told_why(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.attach()
    cache = DeviceCache.from_tensors(rank.tensors, DEVICE_BLOCKS)
    address = ManagerAddress(socket_path=rank.bench.path, private=False)
    finder = ManagerFinder(address, rank.bench.settings, {}, time.monotonic)
    hello = rank.bench.worker_hello("other", layout=rank.layout, namespace=OTHER)
    stranger = Worker(finder, hello, cache)
    errors: list[BaseException] = []

    def join() -> None:
        try:
            stranger.attach(5.0)
        except ManagerRefused as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    rank.bench.until(lambda: errors)
    thread.join()
    assert "cannot be served" in str(errors[0])
    rank.close()


def test_no_manager_by_the_deadline_is_said(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.stop_manager()
    with pytest.raises(ManagerUnavailable, match="no manager answers"):
        rank.worker.attach(0.05)
    rank.close()


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

"""Whole transfers out of short ones, and the I/O threads' queue."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbm.block import Outcome, SlotIndex
from kvbm.testing.stored_runs import make_key
from kvbm.tiers.contract import BlockHead, Completion
from kvbm.tiers.disk import threads as disk_io
from kvbm.tiers.disk.syscalls import STALLS_MAX, Syscalls, read_fully, write_fully
from kvbm.tiers.disk.threads import IoThreads, Job, LoadJob, StoreJob
from rigs.faulty_syscalls import Fault, FaultRule, FaultySyscalls

PAGE = 4096
DEADLINE_S = 20.0


def aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
def test_short_and_interrupted_transfers_become_whole(tmp_path: Path, seed: int, flags: int) -> None:
    syscalls = FaultySyscalls(seed)
    for operation in ("preadv", "pwritev"):
        syscalls.arm(FaultRule(operation=operation, fault=Fault.SHORT, times=1))
        syscalls.arm(FaultRule(operation=operation, fault=Fault.SHORT, chance=0.4))
        syscalls.arm(FaultRule(operation=operation, fault=Fault.EINTR, chance=0.2))
    fd = syscalls.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT | flags)
    sources = [aligned(PAGE * pages) for pages in (3, 1, 5)]
    for source in sources:
        source[:] = os.urandom(len(source))
    targets = [aligned(PAGE * pages) for pages in (2, 6, 1)]
    write_fully(syscalls, fd, sources, PAGE)
    read_fully(syscalls, fd, targets, PAGE)
    assert b"".join(targets) == b"".join(sources)
    assert sum(syscalls.struck.values()) >= 2
    os.close(fd)


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    data = memoryview(bytearray(os.urandom(2500 * 8)))
    write_fully(Syscalls(), fd, [data[i : i + 8] for i in range(0, len(data), 8)], 0, alignment=8)
    target = memoryview(bytearray(len(data)))
    read_fully(Syscalls(), fd, [target[i : i + 8] for i in range(0, len(data), 8)], 0, alignment=8)
    assert target == data
    os.close(fd)


@pytest.mark.parametrize("transfer", [read_fully, write_fully])
def test_a_transfer_that_never_moves_is_given_up(transfer: object, tmp_path: Path) -> None:
    class Stuck(Syscalls):
        calls = 0

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self.calls += 1
            return PAGE - 1

        pwritev = preadv

    assert callable(transfer)
    stuck = Stuck()
    with pytest.raises(OSError, match="stopped after 0 of 8192 bytes") as caught:
        transfer(stuck, -1, [aligned(2 * PAGE)], 0)
    assert caught.value.errno == errno.ENODATA
    assert stuck.calls == STALLS_MAX + 1


class Gate:
    """An `execute` whose jobs wait until they are let through, and the order in which they began."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.together: list[list[int]] = []
        self.entered = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)

    def execute(self, jobs: Sequence[Job]) -> list[Completion]:
        self.begun += [job.job_id for job in jobs]
        self.together.append([job.job_id for job in jobs])
        self.entered.release()
        assert self.passes.acquire(timeout=DEADLINE_S)
        return [Completion(job_id=job.job_id, outcome=Outcome.HIT, blocks=()) for job in jobs]

    def open(self, count: int = 1000) -> None:
        self.passes.release(count)


def abandon(job: Job) -> Completion:
    return Completion(job_id=job.job_id, outcome=Outcome.RETRY, blocks=())


def load_job(job_id: int, slot: int = 0, count: int = 1) -> LoadJob:
    return LoadJob(job_id=job_id, slot=SlotIndex(slot), keys=(make_key(0),) * count, targets=())


def store_job(job_id: int, slot: int = 0) -> StoreJob:
    block = BlockHead(make_key(0), None)
    return StoreJob(job_id=job_id, slot=SlotIndex(slot), blocks=(block,), sequence=1, sources=())


def test_loads_overtake_stores_and_do_not_starve_them() -> None:
    gate = Gate()
    threads = IoThreads(gate.execute, abandon, thread_count=1, limit=100)
    threads.submit(store_job(0))
    assert gate.entered.acquire(timeout=DEADLINE_S)
    for job_id in (1, 2, 3):
        threads.submit(store_job(job_id))
    loads = list(range(10, 10 + disk_io.LOADS_IN_A_ROW_MAX + 2))
    for job_id in loads:
        threads.submit(load_job(job_id))
    gate.open()
    assert threads.wait_idle(DEADLINE_S)
    assert gate.begun == [0, *loads[:-2], 1, *loads[-2:], 2, 3]
    assert len(threads.collect()) == len(gate.begun)
    assert threads.uncollected_count == 0
    assert threads.stop(DEADLINE_S)


def test_stopping_finishes_what_was_accepted() -> None:
    gate = Gate()
    threads = IoThreads(gate.execute, abandon, thread_count=2, limit=8)
    for job_id in range(8):
        threads.submit(store_job(job_id))
    gate.open()
    assert threads.stop(DEADLINE_S)
    assert [(done.job_id, done.outcome) for done in sorted(threads.collect(), key=lambda c: c.job_id)] == [
        (job_id, Outcome.HIT) for job_id in range(8)
    ]


def test_what_never_ends_is_given_up_and_completes_once() -> None:
    gate = Gate()
    threads = IoThreads(gate.execute, abandon, thread_count=1, limit=8)
    for job_id in range(3):
        threads.submit(load_job(job_id))
    assert gate.entered.acquire(timeout=DEADLINE_S)
    assert not threads.stop(0.0)
    workers = [thread for thread in threading.enumerate() if thread.name == "kvbm-disk-0"]
    gate.open()
    for worker in workers:
        worker.join(DEADLINE_S)
    assert sorted(((done.job_id, done.outcome) for done in threads.collect()), key=lambda pair: pair[0]) == [
        (job_id, Outcome.RETRY) for job_id in range(3)
    ]


def test_queued_jobs_whose_slots_follow_one_another_go_together() -> None:
    gate = Gate()
    threads = IoThreads(gate.execute, abandon, thread_count=1, limit=100, run_blocks_max=4)
    threads.submit(store_job(0))
    assert gate.entered.acquire(timeout=DEADLINE_S)
    for job_id, slot, count in ((1, 0, 1), (2, 1, 2), (3, 3, 1), (4, 4, 1), (5, 6, 1), (6, 7, 3), (7, 3, 1)):
        threads.submit(load_job(job_id, slot, count))
    for job_id, slot in ((8, 5), (9, 6), (10, 6)):
        threads.submit(store_job(job_id, slot))
    gate.open()
    assert threads.wait_idle(DEADLINE_S)
    assert gate.together == [[0], [1, 2, 3], [4], [5, 6], [7], [8, 9], [10]]
    assert sorted(done.job_id for done in threads.collect()) == list(range(11))
    assert threads.stop(DEADLINE_S)


@pytest.mark.parametrize("run_blocks_max", [1, 100])
def test_jobs_that_do_not_go_together_wake_a_thread_each(run_blocks_max: int) -> None:
    """All threads sleep at first; every one of them must be inside a job before the first may end."""
    gate = Gate()
    threads = IoThreads(gate.execute, abandon, thread_count=3, limit=8, run_blocks_max=run_blocks_max)
    for _ in range(20):
        for job_id in range(3):
            threads.submit(load_job(job_id, slot=10 * job_id if run_blocks_max > 1 else job_id))
        for _ in range(3):
            assert gate.entered.acquire(timeout=DEADLINE_S)
        gate.open(3)
        assert threads.wait_idle(DEADLINE_S)
        assert len(threads.collect()) == 3
    assert threads.stop(DEADLINE_S)


def test_jobs_that_went_together_and_never_end_are_given_up_each() -> None:
    gate = Gate()
    threads = IoThreads(gate.execute, abandon, thread_count=1, limit=8, run_blocks_max=8)
    threads.submit(load_job(9, slot=50))
    assert gate.entered.acquire(timeout=DEADLINE_S)
    for job_id in range(3):
        threads.submit(load_job(job_id, slot=job_id))
    gate.open(1)
    assert gate.entered.acquire(timeout=DEADLINE_S)
    assert not threads.stop(0.0)
    gate.open()
    found = {done.job_id: done.outcome for done in threads.collect()}
    assert found == {9: Outcome.HIT, 0: Outcome.RETRY, 1: Outcome.RETRY, 2: Outcome.RETRY}

"""The I/O threads: a bounded queue in, a bounded queue of completions and an eventfd out.

A thread takes queued jobs whose slots follow one another as one run: who submits block by block gets the speed of runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from kvbm.block import BlockKey, SlotIndex
from kvbm.clock import Clock, monotonic
from kvbm.errors import TierError
from kvbm.tiers.contract import BlockHead, Completion
from kvbm.tiers.disk.block_io import Buffer

IO_THREADS = 8
"""Threads that read and write a tier, each a run of blocks at a time: eight requests of some MiB in flight keep an NVMe
disk busy. `python -m benchmarks.disk --threads` compares."""


class LoadJob(msgspec.Struct):
    """Blocks to read from the slots from `slot` on."""

    job_id: int
    slot: SlotIndex
    keys: Sequence[BlockKey]
    targets: Sequence[Buffer]

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def buffers(self) -> Sequence[Buffer]:
        return self.targets


class StoreJob(msgspec.Struct):
    """Blocks to write to the slots from `slot` on; `sequence` is the first one's."""

    job_id: int
    slot: SlotIndex
    blocks: Sequence[BlockHead]
    sequence: int
    sources: Sequence[Buffer]

    @property
    def count(self) -> int:
        return len(self.blocks)

    @property
    def buffers(self) -> Sequence[Buffer]:
        return self.sources


Job = LoadJob | StoreJob
"""Loads are urgent: a request waits for them."""

JobT = TypeVar("JobT", LoadJob, StoreJob)

LOADS_IN_A_ROW_MAX = 8
"""After so many loads one store goes first: stores pin host slots, so they may be slow but must not starve."""


class IoThreads:
    """Runs jobs in `thread_count` daemon threads. At most `limit` jobs are accepted and not collected yet.

    Raises TierError where the process can have no more threads; none of them is left then.

    `submit`, `collect`, `wait_idle` and `stop` belong to one owner thread. `execute` runs in the I/O threads and must
    not raise; it gets jobs of one kind whose slots follow one another, together at most `run_blocks_max` blocks or one
    job, and returns a completion for each. `abandon` makes the completion of a job that `stop` has abandoned.
    """

    def __init__(
        self,
        execute: Callable[[Sequence[Job]], list[Completion]],
        abandon: Callable[[Job], Completion],
        thread_count: int,
        limit: int,
        run_blocks_max: int = 1,
        clock: Clock = monotonic,
    ) -> None:
        assert thread_count > 0 and limit > 0 and run_blocks_max > 0
        self._execute = execute
        self._abandon = abandon
        self._limit = limit
        self._run_blocks_max = run_blocks_max
        self._clock = clock
        self._uncollected = 0
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        # Guarded by the lock:
        self._loads: deque[LoadJob] = deque()
        self._stores: deque[StoreJob] = deque()
        # Each with the time at which it began, the oldest first.
        self._running: dict[int, tuple[Sequence[Job], float]] = {}
        self._sleepers = 0
        self._loads_in_a_row = 0
        self._stopping = False
        # Appended under the lock before the eventfd is signalled, emptied by the owner without it.
        self._completions: deque[Completion] = deque()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvbm-disk-{index}", daemon=True)
            for index in range(thread_count)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.stop(0.0)
            raise TierError(f"disk tier: a thread cannot be started: {error}") from error

    @property
    def uncollected_count(self) -> int:
        """Jobs accepted whose completion was not collected."""
        return self._uncollected

    @property
    def busy_s(self) -> float:
        """How long the oldest job that a thread has taken has been running, in seconds; 0 without one."""
        with self._lock:
            _, begun_s = next(iter(self._running.values()), ((), None))
            return 0.0 if begun_s is None else self._clock() - begun_s

    def wake(self) -> None:
        """Any thread: make the descriptor readable, though there may be no completion."""
        with self._lock:
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)

    def submit(self, job: Job) -> None:
        """Queue a job. The caller has made sure that there is room (`uncollected_count` < `limit`)."""
        assert self._uncollected < self._limit and not self._stopping
        self._uncollected += 1
        with self._lock:
            queue = self._loads if isinstance(job, LoadJob) else self._stores
            # A job that goes with the one before it needs no thread of its own; if it does not go with it after all,
            # the thread that takes that one wakes another.
            if self._sleepers and not (queue and self._joins(queue[-1], queue[-1].count, job)):
                self._work.notify()
            queue.append(job)  # type: ignore[arg-type]

    def collect(self) -> list[Completion]:
        """The completions since the last call; never blocks."""
        if self._eventfd >= 0:
            try:
                # Before looking, so that a completion that comes while we look signals again.
                os.eventfd_read(self._eventfd)
            except BlockingIOError:
                pass
        collected: list[Completion] = []
        while self._completions:
            collected.append(self._completions.popleft())
        self._uncollected -= len(collected)
        return collected

    def fileno(self) -> int:
        assert self._eventfd >= 0, "the tier is closed"
        return self._eventfd

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until every accepted job has its completion; False when `deadline_s` seconds were not enough."""
        with self._lock:
            return self._idle.wait_for(self._is_idle, timeout=max(0.0, deadline_s))

    def stop(self, deadline_s: float) -> bool:
        """Finish the accepted jobs and end the threads.

        After `deadline_s` seconds the jobs that are left, begun or not, complete through `abandon`, and it returns
        False: a transfer that the kernel never ends may then still touch its buffers.
        """
        end_s = time.monotonic() + deadline_s
        with self._lock:
            self._stopping = True
            self._work.notify_all()
        idle = self.wait_idle(deadline_s)
        with self._lock:
            running = chain.from_iterable(jobs for jobs, _ in self._running.values())
            left: list[Job] = [*self._loads, *self._stores, *running]
            self._loads.clear()
            self._stores.clear()
            self._running.clear()
            self._completions.extend(self._abandon(job) for job in left)
            eventfd, self._eventfd = self._eventfd, -1
        if idle:
            for thread in self._threads:
                if thread.ident is not None:  # it was started
                    thread.join(max(0.0, end_s - time.monotonic()))
        os.close(eventfd)
        return idle

    def _is_idle(self) -> bool:
        return not (self._loads or self._stores or self._running)

    def _serve(self) -> None:
        while (jobs := self._take()) is not None:
            completions = self._execute(jobs)
            with self._lock:
                if self._running.pop(id(jobs), None) is None:
                    return  # abandoned by `stop`
                self._completions.extend(completions)
                os.eventfd_write(self._eventfd, 1)
                if self._is_idle():
                    self._idle.notify_all()

    def _take(self) -> Sequence[Job] | None:
        with self._lock:
            while not (self._loads or self._stores):
                if self._stopping:
                    return None
                self._sleepers += 1
                self._work.wait()
                self._sleepers -= 1
            jobs: Sequence[Job]
            if self._loads and not (self._stores and self._loads_in_a_row >= LOADS_IN_A_ROW_MAX):
                self._loads_in_a_row += 1
                jobs = self._take_run(self._loads)
            else:
                self._loads_in_a_row = 0
                jobs = self._take_run(self._stores)
            self._running[id(jobs)] = jobs, self._clock()
            if self._sleepers and (self._loads or self._stores):
                self._work.notify()
            return jobs

    def _take_run(self, queue: deque[JobT]) -> list[JobT]:
        """The first job, and those after it that go with it."""
        jobs = [queue.popleft()]
        count = jobs[0].count
        while queue and self._joins(jobs[-1], count, queue[0]):
            jobs.append(queue.popleft())
            count += jobs[-1].count
        return jobs

    def _joins(self, last: Job, count: int, job: Job) -> bool:
        """Whether a job goes with `count` blocks that end with those of `last`."""
        return last.slot + last.count == job.slot and count + job.count <= self._run_blocks_max

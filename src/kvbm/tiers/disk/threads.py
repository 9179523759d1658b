"""The I/O threads: a bounded queue in, a bounded queue of completions and an eventfd out."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kvbm.block import BlockKey, SlotIndex
from kvbm.tiers.contract import Completion
from kvbm.tiers.disk.block_io import Buffer


class LoadJob(msgspec.Struct, frozen=True, kw_only=True):
    """One block to read."""

    job_id: int
    key: BlockKey
    slot: SlotIndex
    targets: Sequence[Buffer]


class StoreJob(msgspec.Struct, frozen=True, kw_only=True):
    """One block to write."""

    job_id: int
    key: BlockKey
    parent: BlockKey | None
    slot: SlotIndex
    sequence: int
    sources: Sequence[Buffer]
    engine_hash: bytes = b""
    group: int = 0


Job = LoadJob | StoreJob
"""Loads are urgent: a request waits for them."""

LOADS_IN_A_ROW_MAX = 8
"""After so many loads one store goes first: stores pin host slots, so they may be slow but must not starve."""


class IoThreads:
    """Runs jobs in `thread_count` daemon threads. At most `limit` jobs are accepted and not collected yet.

    `submit`, `collect`, `wait_idle` and `stop` belong to one owner thread. `execute` runs in the I/O threads and must
    not raise; `abandon` makes the completion of a job that `stop` has abandoned.
    """

    def __init__(
        self,
        execute: Callable[[Job], Completion],
        abandon: Callable[[Job], Completion],
        thread_count: int,
        limit: int,
    ) -> None:
        assert thread_count > 0 and limit > 0
        self._execute = execute
        self._abandon = abandon
        self._limit = limit
        self._uncollected = 0
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        # Guarded by the lock:
        self._loads: deque[LoadJob] = deque()
        self._stores: deque[StoreJob] = deque()
        self._running: dict[int, Job] = {}
        self._loads_in_a_row = 0
        self._stopping = False
        # Appended under the lock before the eventfd is signalled, emptied by the owner without it.
        self._completions: deque[Completion] = deque()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvbm-disk-{index}", daemon=True)
            for index in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def uncollected_count(self) -> int:
        """Jobs accepted whose completion was not collected."""
        return self._uncollected

    def submit(self, job: Job) -> None:
        """Queue a job. The caller has made sure that there is room (`uncollected_count` < `limit`)."""
        assert self._uncollected < self._limit and not self._stopping
        self._uncollected += 1
        with self._lock:
            if isinstance(job, LoadJob):
                self._loads.append(job)
            else:
                self._stores.append(job)
            self._work.notify()

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
            left: list[Job] = [*self._loads, *self._stores, *self._running.values()]
            self._loads.clear()
            self._stores.clear()
            self._running.clear()
            self._completions.extend(self._abandon(job) for job in left)
            eventfd, self._eventfd = self._eventfd, -1
        if idle:
            for thread in self._threads:
                thread.join(max(0.0, end_s - time.monotonic()))
        os.close(eventfd)
        return idle

    def _is_idle(self) -> bool:
        return not (self._loads or self._stores or self._running)

    def _serve(self) -> None:
        while (job := self._take()) is not None:
            completion = self._execute(job)
            with self._lock:
                if self._running.pop(id(job), None) is None:
                    return  # abandoned by `stop`
                self._completions.append(completion)
                os.eventfd_write(self._eventfd, 1)
                if self._is_idle():
                    self._idle.notify_all()

    def _take(self) -> Job | None:
        with self._lock:
            while not (self._loads or self._stores):
                if self._stopping:
                    return None
                self._work.wait()
            job: Job
            if self._loads and not (self._stores and self._loads_in_a_row >= LOADS_IN_A_ROW_MAX):
                self._loads_in_a_row += 1
                job = self._loads.popleft()
            else:
                self._loads_in_a_row = 0
                job = self._stores.popleft()
            self._running[id(job)] = job
            return job

"""The jobs of a remote tier that were accepted and not collected, and who may touch their buffers.

A job's buffers belong to whoever *holds* the job: a thread takes hold of it only while it copies, never while it waits
for the store. So when the deadline passes, a job that nobody holds ends at once, and what comes later finds that it is
over; one that is held is let go in a moment. Until its request to the store returns, a job that ended so *hangs*.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kvbm.block import BlockKey, Outcome
from kvbm.clock import Clock
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion
from kvbm.tiers.remote.catalogue import Span
from kvbm.tiers.remote.contract import Buffers


class Job(msgspec.Struct, kw_only=True, eq=False):
    """What both kinds of jobs have. Changed only under the exchange's lock."""

    job_id: int
    begun_s: float
    deadline_s: float
    asked_s: float | None = None
    """When the store was asked first; None before."""
    held: bool = False
    late: bool = False
    """The deadline passed while it was held."""

    @property
    def count(self) -> int:
        raise NotImplementedError

    def completion(self, ends: Sequence[BlockEnd], block_bytes: int, now_s: float, error: str) -> Completion:
        """The job's end, from those of its blocks."""
        return Completion.of(self.job_id, ends, block_bytes, max(0.0, now_s - self.begun_s), error)


class LoadJob(Job, kw_only=True, eq=False):
    """Blocks to read: the records of `span`, into the targets."""

    keys: Sequence[BlockKey]
    place: int
    span: Span
    targets: Sequence[Buffers]
    tenant: str | None

    @property
    def count(self) -> int:
        return len(self.keys)


class StoreJob(Job, kw_only=True, eq=False):
    """Blocks to write, together."""

    blocks: Sequence[BlockHead]
    sources: Sequence[Buffers]
    tenant: str | None
    tail: bool

    @property
    def count(self) -> int:
        return len(self.blocks)


class Exchange:
    """Every accepted job ends once. `accept` and `collect` belong to one owner thread, the rest to any."""

    def __init__(self, clock: Clock, block_bytes: int) -> None:
        self._clock = clock
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._open: dict[int, Job] = {}
        self._completions: deque[Completion] = deque()
        self._uncollected: dict[type[Job], int] = {LoadJob: 0, StoreJob: 0}
        self._kinds: dict[int, type[Job]] = {}
        self._hanging: set[Job] = set()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def uncollected(self, kind: type[LoadJob] | type[StoreJob]) -> int:
        """Jobs of this kind that were accepted and whose completion was not collected."""
        return self._uncollected[kind]

    def accept(self, job: LoadJob | StoreJob) -> None:
        """The job is ours from now on."""
        assert job.job_id not in self._kinds, "a job of this number is under way"
        self._uncollected[type(job)] += 1
        self._kinds[job.job_id] = type(job)
        with self._lock:
            self._open[job.job_id] = job

    def over(self, job: Job) -> bool:
        """Whether the job has ended."""
        return self._open.get(job.job_id) is not job

    def begin_request(self, job: Job) -> bool:
        """A thread asks the store for the job from now on, until `end_request`. False where it is over."""
        with self._lock:
            if self.over(job):
                return False
            job.asked_s = self._clock()
            return True

    def end_request(self, job: Job) -> None:
        """The thread is free again."""
        with self._lock:
            hung = job in self._hanging
            self._hanging.discard(job)
        if hung:
            self.signal()  # there is room again

    def count_hanging(self, kind: type[LoadJob] | type[StoreJob]) -> int:
        """Jobs of this kind that ended at their deadline, and whose request to the store has not returned."""
        with self._lock:
            return sum(isinstance(job, kind) for job in self._hanging)

    def hold(self, job: Job) -> bool:
        """Take hold of the job, to touch its buffers. False where it is over."""
        with self._lock:
            if self.over(job):
                return False
            assert not job.held
            job.held = True
            return True

    def let_go(self, job: Job) -> bool:
        """Its buffers are not touched any more. False where it is over now, because its deadline had passed."""
        with self._lock:
            job.held = False
            if job.late:
                self._end(job, (BlockEnd(Outcome.RETRY),) * job.count, "the deadline passed")
            return not job.late

    def finish(
        self, job: Job, ends: Sequence[BlockEnd], error: str = "", then: Callable[[], None] | None = None
    ) -> bool:
        """The job ends so, unless it is over. `then` is called before anybody can collect it, if it ends now."""
        with self._lock:
            if self.over(job):
                return False
            if then is not None:
                then()
            self._end(job, ends, error)
            return True

    def retry(self, job: Job, error: str) -> bool:
        """The job ends, and none of its blocks moved."""
        return self.finish(job, (BlockEnd(Outcome.RETRY),) * job.count, error)

    def expire(self, error: str) -> list[Job]:
        """End the jobs whose deadline has passed, and name them. One that is held ends when it is let go."""
        with self._lock:
            now_s = self._clock()
            late = [job for job in self._open.values() if job.deadline_s <= now_s and not job.late]
            for job in late:
                job.late = True
                if job.asked_s is not None:
                    self._hanging.add(job)
                if not job.held:
                    self._end(job, (BlockEnd(Outcome.RETRY),) * job.count, error)
            return late

    @property
    def idle(self) -> bool:
        """Whether every accepted job has ended."""
        return not self._open

    def signal(self) -> None:
        """Make the descriptor readable."""
        with self._lock:
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)

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
            completion = self._completions.popleft()
            self._uncollected[self._kinds.pop(completion.job_id)] -= 1
            collected.append(completion)
        return collected

    def fileno(self) -> int:
        assert self._eventfd >= 0, "the tier is closed"
        return self._eventfd

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until every accepted job has ended; False when `deadline_s` seconds were not enough."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._open, max(0.0, deadline_s))

    def stop(self, error: str, deadline_s: float) -> None:
        """End every job: those that nobody holds now, the others when they are let go."""
        with self._lock:
            for job in list(self._open.values()):
                job.late = True
                if not job.held:
                    self._end(job, (BlockEnd(Outcome.RETRY),) * job.count, error)
        self.wait_idle(deadline_s)
        with self._lock:
            eventfd, self._eventfd = self._eventfd, -1
        os.close(eventfd)

    def _end(self, job: Job, ends: Sequence[BlockEnd], error: str) -> None:
        del self._open[job.job_id]
        self._completions.append(job.completion(ends, self._block_bytes, self._clock(), error))
        if self._eventfd >= 0:
            os.eventfd_write(self._eventfd, 1)
        if not self._open:
            self._idle.notify_all()

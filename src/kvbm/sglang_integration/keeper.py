"""The thread that owns everything at the manager, and the calls that SGLang's own threads make to it.

SGLang calls a backend from several threads: one asks what is held, one reads, one writes, and the scheduler clears and
closes. A session with a manager has one owner. So each call is a job, and its caller waits for the result, for a
bounded time, or comes back for it. A job that has to wait itself (for bytes from disk) is a generator: it yields, and
other jobs go on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvbm.client.channel import readable_among
from kvbm.clock import Clock, monotonic
from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.sglang")

ResultT = TypeVar("ResultT")

JOBS_MAX = 1024
"""Jobs that wait to begin; one more is refused."""
POLL_S = 0.001
"""How often a job that waits is asked again."""
IDLE_S = 1.0
"""How long nothing happens before `on_event` is called all the same."""


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)
    steps: Generator[None, None, Any] | None = None


class Keeper:
    """Runs jobs one after the other, in a daemon thread of its own; those that wait take turns.

    `on_event` is called in that thread between jobs: when one of the `descriptors()` can be read, and about once a
    second, however many jobs there are.
    """

    def __init__(
        self,
        name: str,
        on_event: Callable[[], None] = lambda: None,
        descriptors: Callable[[], Iterable[int]] = tuple,
        clock: Clock = monotonic,
    ) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue(JOBS_MAX)
        self._waiting: list[_Job] = []
        self._on_event, self._descriptors, self._clock = on_event, descriptors, clock
        self._told_s = clock()
        self._lock = threading.Lock()
        """Held while jobs are put in, so that none comes behind the last one, and nobody writes to a closed `_wake`."""
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], ResultT] | Callable[[], Generator[None, None, ResultT]], otherwise: ResultT
    ) -> Future[ResultT]:
        """The result of `work`, which runs in the keeper's thread, once it is there; `otherwise` where it cannot run.

        Raises nothing. The result has the error of a `work` that raises.
        """
        job = _Job(work)
        with self._lock:
            accepted = not self._closed and not self._jobs.full()
            if accepted:
                self._put(job)
        if not accepted:
            job.result.set_result(otherwise)
        return job.result

    @property
    def busy(self) -> bool:
        """Whether jobs wait to begin."""
        return not self._jobs.empty()

    def call(
        self,
        work: Callable[[], ResultT] | Callable[[], Generator[None, None, ResultT]],
        otherwise: ResultT,
        timeout_s: float,
    ) -> ResultT:
        """The result of `work`; `otherwise` if it raises, or does not begin in time.

        Once it has begun its end is awaited, however long that takes: it may be writing into the caller's memory. So
        `work` must bound its own waits.
        """
        result = self.submit(work, otherwise)
        done = concurrent.futures.wait((result,), timeout_s).done
        if (not done and result.cancel()) or result.cancelled() or result.exception() is not None:
            return otherwise  # an error was logged where it was raised
        return result.result()

    def close(self, last: Callable[[], None], timeout_s: float) -> None:
        """Run `last` as the last job, and end the thread; jobs that have not begun by then are dropped, and those that
        wait are ended first."""
        dropped: list[_Job] = []
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(queue.Empty):  # that was the last one
                while (job := self._jobs.get_nowait()) is not None:
                    dropped.append(job)
            self._put(_Job(self._end_waiting))
            self._put(_Job(last))
            self._put(None)
        for job in dropped:
            job.result.cancel()
            job.result.set_running_or_notify_cancel()  # this, not the line above, wakes a caller that waits
        self._thread.join(timeout_s)

    def _put(self, job: _Job | None) -> None:
        """The lock is held, and there is room."""
        self._jobs.put_nowait(job)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            self._take_turns()
        finally:
            os.close(self._wake)  # nobody writes to it: it is closed after the last job was put in

    def _take_turns(self) -> None:
        while True:
            self._sleep()
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                pass
            else:
                if job is None:
                    break
                if job.result.set_running_or_notify_cancel():
                    self._begin(job)
            self._waiting = [each for each in self._waiting if not self._ended(each)]

    def _end_waiting(self) -> None:
        """Jobs that wait end here: what `last` closes is theirs too."""
        for job in self._waiting:
            assert job.steps is not None
            try:
                job.steps.close()
            except Exception as error:
                record_swallowed(error)
                log.exception("a defect in KVBM")
            job.result.set_exception(RuntimeError("closed"))
        self._waiting.clear()

    def _sleep(self) -> None:
        """Wait for a job, or for something to be said."""
        try:
            watched = tuple(self._descriptors())
            busy = not self._jobs.empty()
            due_s = self._told_s + IDLE_S - self._clock()
            wait_s = 0.0 if busy else min(POLL_S if self._waiting else IDLE_S, max(0.0, due_s))
            readable = readable_among((self._wake, *watched), wait_s)
            if self._wake in readable:
                os.eventfd_read(self._wake)
            if any(fd in readable for fd in watched) or self._clock() - self._told_s >= IDLE_S:
                self._told_s = self._clock()
                self._on_event()
        except Exception as error:
            record_swallowed(error)
            log.exception("a defect in KVBM")

    def _begin(self, job: _Job) -> None:
        try:
            found = job.work()
        except Exception as error:
            record_swallowed(error)
            self._fail(job, error)
            return
        if isinstance(found, Generator):
            job.steps = found
            self._waiting.append(job)
        else:
            job.result.set_result(found)

    def _ended(self, job: _Job) -> bool:
        """Let a job that waits go on; whether it is over."""
        assert job.steps is not None
        try:
            next(job.steps)
        except StopIteration as stop:
            job.result.set_result(stop.value)
            return True
        except Exception as error:
            record_swallowed(error)
            self._fail(job, error)
            return True
        return False

    def _fail(self, job: _Job, error: Exception) -> None:
        log.error("a defect in KVBM costs this call its result", exc_info=error)
        job.result.set_exception(error)

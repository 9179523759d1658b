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
    second.
    """

    def __init__(
        self,
        name: str,
        on_event: Callable[[], None] = lambda: None,
        descriptors: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue(JOBS_MAX)
        self._waiting: list[_Job] = []
        self._on_event, self._descriptors = on_event, descriptors
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
        try:
            if self._closed:
                raise queue.Full
            self._jobs.put_nowait(job)
        except queue.Full:
            job.result.set_result(otherwise)
        else:
            os.eventfd_write(self._wake, 1)
        return job.result

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
        with contextlib.suppress(Exception):  # it was logged where it was raised
            if concurrent.futures.wait((result,), timeout_s).done or not result.cancel():
                return result.result()
        return otherwise

    def close(self, last: Callable[[], None], timeout_s: float) -> None:
        """Run `last` as the last job, and end the thread; jobs that have not begun by then are dropped."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job.result.cancel()
        self._jobs.put(_Job(last))
        self._jobs.put(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_s)

    def _run(self) -> None:
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
        for each in self._waiting:
            each.result.set_exception(RuntimeError("closed"))

    def _sleep(self) -> None:
        """Wait for a job, or for something to be said."""
        try:
            watched = tuple(self._descriptors())
            busy = not self._jobs.empty()
            wait_s = 0.0 if busy else POLL_S if self._waiting else IDLE_S
            readable = readable_among((self._wake, *watched), wait_s)
            if self._wake in readable:
                os.eventfd_read(self._wake)
            if any(fd in readable for fd in watched) or (not readable and not busy and not self._waiting):
                self._on_event()
        except Exception:
            log.exception("a defect in KVBM")

    def _begin(self, job: _Job) -> None:
        try:
            found = job.work()
        except Exception as error:
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
            self._fail(job, error)
            return True
        return False

    def _fail(self, job: _Job, error: Exception) -> None:
        log.error("a defect in KVBM costs this call its result", exc_info=error)
        job.result.set_exception(error)

"""The thread that owns everything at the manager, and the calls that SGLang's own threads make to it.

SGLang calls a backend from several threads: one asks what is held, one reads, one writes, and the scheduler clears and
closes. A session with a manager has one owner. So each call is a job, and its caller waits for the result, for a
bounded time. A job that has to wait itself (for bytes from disk) is a generator: it yields, and other jobs go on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

log = logging.getLogger("kvbm.sglang")

ResultT = TypeVar("ResultT")

JOBS_MAX = 1024
"""Jobs that wait to begin; one more is refused."""
POLL_S = 0.001
"""How often a job that waits is asked again."""
IDLE_S = 1.0
"""How often `on_idle` is called while nothing happens."""


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)
    steps: Generator[None, None, Any] | None = None


class Keeper:
    """Runs jobs one after the other, in a daemon thread of its own; those that wait take turns.

    `on_idle` is called in that thread about once a second, between jobs.
    """

    def __init__(self, name: str, on_idle: Callable[[], None] = lambda: None) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue(JOBS_MAX)
        self._waiting: list[_Job] = []
        self._on_idle = on_idle
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(
        self,
        work: Callable[[], ResultT] | Callable[[], Generator[None, None, ResultT]],
        otherwise: ResultT,
        timeout_s: float,
    ) -> ResultT:
        """The result of `work`, which runs in the keeper's thread; `otherwise` if it raises, or does not begin in time.

        Once it has begun its end is awaited, however long that takes: it may be writing into the caller's memory. So
        `work` must bound its own waits.
        """
        job = _Job(work)
        try:
            if self._closed:
                return otherwise
            self._jobs.put_nowait(job)
        except queue.Full:
            return otherwise
        with contextlib.suppress(Exception):  # it was logged where it was raised
            if concurrent.futures.wait((job.result,), timeout_s).done or not job.result.cancel():
                found: ResultT = job.result.result()
                return found
        return otherwise

    def close(self, last: Callable[[], None], timeout_s: float) -> None:
        """Run `last` as the last job, and end the thread; jobs that have not begun by then are dropped."""
        if self._closed:
            return
        self._closed = True
        while not self._jobs.empty():
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.result.cancel()
        self._jobs.put(_Job(last))
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=POLL_S if self._waiting else IDLE_S)
            except queue.Empty:
                if not self._waiting:
                    self._idle()
            else:
                if job is None:
                    break
                if job.result.set_running_or_notify_cancel():
                    self._begin(job)
            self._waiting = [each for each in self._waiting if not self._ended(each)]
        for job in self._waiting:
            job.result.set_exception(RuntimeError("closed"))

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

    def _idle(self) -> None:
        try:
            self._on_idle()
        except Exception:
            log.exception("a defect in KVBM")

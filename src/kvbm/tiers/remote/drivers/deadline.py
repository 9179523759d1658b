"""Calls that the kernel may never return from (a file server that is away) given up after a deadline.

A thread that waits for such a server cannot be stopped. So calls are made by a few threads of the store's own, and who
asked waits for them no longer than the deadline. While all of them are stuck, further calls fail at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Generic, TypeVar

from kvbm.strict import record_swallowed
from kvbm.tiers.remote.blobs import StoreError

_Answer = TypeVar("_Answer")


class _Call(Generic[_Answer]):
    def __init__(self, work: Callable[[threading.Event], _Answer]) -> None:
        self._work = work
        self._answer: Future[_Answer] = Future()
        self._given_up = threading.Event()

    def run(self) -> None:
        if self._given_up.is_set():
            return
        try:
            self._answer.set_result(self._work(self._given_up))
        except BaseException as error:
            self._answer.set_exception(error)

    def wait(self, deadline_s: float) -> bool:
        if futures.wait([self._answer], deadline_s).done:
            return True
        self._given_up.set()
        self._answer.add_done_callback(_record_error)  # `result` will not raise it
        return False

    def result(self) -> _Answer:
        return self._answer.result()


def _record_error(answer: Future[_Answer]) -> None:
    error = answer.exception()
    if error is not None and not isinstance(error, StoreError):
        record_swallowed(error)


class Deadline:
    """Threads that make calls for others. Threads are started as they are needed, at most `thread_count`."""

    def __init__(self, place: str, deadline_s: float, thread_count: int) -> None:
        self._place = place
        self._deadline_s = deadline_s
        self._thread_count = thread_count
        self._calls: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        """Threads less calls that are waiting or under way; below 0, calls wait for a thread."""
        self._threads = 0
        self._closed = False

    def run(self, work: Callable[[threading.Event], _Answer]) -> _Answer:
        """What `work` returns or raises. StoreError `slow` when it takes too long; then its argument is set.

        Work that has been given up should not begin anything more that others could see.
        """
        call = _Call(work)
        with self._lock:
            if self._closed:
                raise StoreError("unreachable", f"{self._place} was closed")
            if self._free == 0 and self._threads < self._thread_count:
                # A daemon: one that is stuck must not keep the process from ending.
                threading.Thread(target=self._serve, name="kvbm-directory", daemon=True).start()
                self._threads += 1
                self._free += 1
            if self._free <= -self._thread_count:
                raise StoreError("slow", f"{self._place}: {2 * self._thread_count} calls wait for it already")
            self._free -= 1
        self._calls.put(call)  # type: ignore[arg-type] # whatever it answers
        if not call.wait(self._deadline_s):
            raise StoreError("slow", f"{self._place} did not answer within {self._deadline_s:g} s")
        return call.result()

    def close(self) -> None:
        """End the threads as soon as they can."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            with self._lock:
                self._free += 1

"""Threads that call a store: so many at once. A call that hangs keeps its thread until the driver gives it up."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.tiers.remote.workers")

Task = Callable[[], None]


class Workers:
    """At most `count` daemon threads, begun as they are needed. Tasks raise nothing.

    The queue has no bound of its own: whoever runs tasks has one. Every method may be called by any thread.
    """

    def __init__(self, name: str, count: int) -> None:
        assert count > 0
        self._name = name
        self._count = count
        self._work = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._threads: list[threading.Thread] = []
        self._sleepers = 0
        self._stopping = False

    def run(self, task: Task) -> bool:
        """Queue a task. False when `stop` was called."""
        with self._work:
            if self._stopping:
                return False
            self._tasks.append(task)
            if len(self._tasks) <= self._sleepers:
                self._work.notify()
            elif len(self._threads) < self._count:
                self._start()
            return True

    def stop(self, deadline_s: float) -> bool:
        """Run no further task. False when one still ran after `deadline_s` seconds: its thread ends when it does."""
        with self._work:
            self._stopping = True
            self._tasks.clear()
            self._work.notify_all()
        end_s = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        name = f"kvbm-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while (task := self._take()) is not None:
            try:
                task()
            except Exception as error:
                record_swallowed(error)
                log.exception("remote tier: a defect in a thread of %s", self._name)
            del task  # and with it the buffers that it knew

    def _take(self) -> Task | None:
        """What to do next; None ends the thread."""
        with self._work:
            while not self._stopping:
                if self._tasks:
                    return self._tasks.popleft()
                self._sleepers += 1
                self._work.wait()
                self._sleepers -= 1
            return None

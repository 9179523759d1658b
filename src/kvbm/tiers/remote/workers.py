"""Threads that call a store: so many at once, and none that hangs keeps the others from going on.

A call to a store may not come back for a long time. Whoever no longer waits for it says so (`give_up`), and another
thread takes the place of the one that hangs, up to a bound; when it comes back after all, it ends.
"""

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
    """`count` daemon threads, and at most `spare_max` in place of those that hang. Tasks raise nothing.

    The queue has no bound of its own: whoever runs tasks has one. Every method may be called by any thread.
    """

    def __init__(self, name: str, count: int, spare_max: int) -> None:
        assert count > 0 and spare_max >= 0
        self._name = name
        self._count = count
        self._spare_max = spare_max
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._tasks: deque[Task] = deque()
        self._running: dict[int, Task] = {}
        self._given_up: set[int] = set()
        self._threads: dict[int, threading.Thread] = {}
        self._sleepers = 0
        self._started = 0
        self._stopping = False

    @property
    def hanging(self) -> int:
        """Threads whose task was given up and has not ended."""
        return len(self._given_up)

    @property
    def running(self) -> int:
        """Tasks that a thread has begun and not ended, those that were given up among them."""
        return len(self._running)

    def run(self, task: Task, *, first: bool = False) -> bool:
        """Queue a task; `first`: before all others. False when `stop` was called."""
        with self._lock:
            if self._stopping:
                return False
            if first:
                self._tasks.appendleft(task)
            else:
                self._tasks.append(task)
            self._get_ready()
            return True

    def give_up(self, task: Task) -> None:
        """Nobody waits for this task any more. One that no thread has begun does not run."""
        with self._lock:
            if task in self._tasks:
                self._tasks.remove(task)
            for thread, running in self._running.items():
                if running == task and thread not in self._given_up:
                    if len(self._given_up) < self._spare_max:
                        self._given_up.add(thread)
                        self._get_ready()
                    break
            if self._is_idle():
                self._idle.notify_all()

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until no task is queued or runs, but for those that were given up."""
        with self._lock:
            return self._idle.wait_for(self._is_idle, max(0.0, deadline_s))

    def stop(self, deadline_s: float) -> bool:
        """Run no further task. False when one still ran after `deadline_s` seconds: its thread ends when it does."""
        with self._lock:
            self._stopping = True
            self._tasks.clear()
            self._work.notify_all()
            threads = list(self._threads.values())
        end_s = time.monotonic() + deadline_s
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _get_ready(self) -> None:
        """Somebody for each task that waits, within the bound."""
        if len(self._tasks) <= self._sleepers:
            self._work.notify()
        elif len(self._threads) - len(self._given_up) < self._count:
            self._start()

    def _is_idle(self) -> bool:
        return not self._tasks and len(self._running) == len(self._given_up)

    def _start(self) -> None:
        number, self._started = self._started, self._started + 1
        thread = threading.Thread(
            target=self._serve, args=(number,), name=f"kvbm-{self._name}-{number}", daemon=True
        )
        self._threads[number] = thread
        thread.start()

    def _serve(self, number: int) -> None:
        while (task := self._take(number)) is not None:
            try:
                task()
            except Exception as error:
                record_swallowed(error)
                log.exception("remote tier: a defect in a thread of %s", self._name)
            del task  # and with it the buffers that it knew

    def _take(self, number: int) -> Task | None:
        """What to do next; None ends the thread: there is an end, or another one took its place."""
        with self._lock:
            self._running.pop(number, None)
            self._given_up.discard(number)
            if self._is_idle():
                self._idle.notify_all()
            while not self._stopping and len(self._threads) - len(self._given_up) <= self._count:
                if self._tasks:
                    self._running[number] = task = self._tasks.popleft()
                    return task
                self._sleepers += 1
                self._work.wait()
                self._sleepers -= 1
            del self._threads[number]
            return None

"""Looks after the jobs of a remote tier in a thread: their deadlines, second requests, and threads that hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from kvbm.clock import Clock
from kvbm.tiers.remote.exchange import Exchange, Job, LoadJob, StoreJob
from kvbm.tiers.remote.health import StoreHealth
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.workers import Task, Workers

PERIOD_S = 0.02


class JobWatch:
    """The tasks of each job that is not over. `load` does a load, once more where it is asked a second time."""

    def __init__(
        self,
        place: str,
        options: RemoteOptions,
        exchange: Exchange,
        health: StoreHealth,
        load: Callable[[LoadJob], None],
        loads: Workers,
        stores: Workers,
        clock: Clock,
    ) -> None:
        self._place = place
        self._options = options
        self._exchange = exchange
        self._health = health
        self._load = load
        self._loads = loads
        self._stores = stores
        self._clock = clock
        self._closed = False
        self._tasks: dict[Job, list[Task]] = {}
        self._watched = threading.Condition()
        threading.Thread(target=self._serve, name="kvbm-remote-watch", daemon=True).start()

    def begin(self, job: LoadJob | StoreJob, task: Task, workers: Workers) -> None:
        """Have `workers` do a new job's task."""
        self._exchange.accept(job)
        with self._watched:
            self._tasks[job] = [task]
            self._watched.notify_all()
        workers.run(task)

    def expire(self) -> None:
        """End what is late; its threads may hang, so others take their places."""
        now_s = self._clock()
        for job in self._exchange.expire(f"{self._place} did not answer in time"):
            # One that waited for its turn is not the store's fault.
            if job.asked_s is None or 2 * (now_s - job.asked_s) < job.deadline_s - job.begun_s:
                continue
            if isinstance(job, LoadJob):
                self._health.read_late(self._options.load_deadline_s)
            else:
                self._health.write_late(self._options.store_deadline_s)

    def stop(self) -> None:
        """Nobody looks after them any more."""
        with self._watched:
            self._closed = True
            self._watched.notify_all()

    def _serve(self) -> None:
        """In the thread: it works while there are jobs."""
        while True:
            with self._watched:
                self._watched.wait_for(lambda: self._tasks or self._closed)
                if self._closed:
                    return
            self.expire()
            if self._options.hedge:
                self._hedge()
            self._let_go()
            with self._watched:
                self._watched.wait_for(lambda: self._closed, PERIOD_S)

    def _hedge(self) -> None:
        now_s = self._clock()
        for job in self._exchange.open_loads():
            if job.hedged or job.asked_s is None:
                continue
            delay_s = self._health.hedge_delay_s(job.span.end - job.span.start)
            if delay_s is None or now_s - job.asked_s < delay_s or not self._health.take_hedge():
                continue
            task = partial(self._load, job)
            self._exchange.asked_again(job)
            with self._watched:
                self._tasks.setdefault(job, []).append(task)
            self._loads.run(task, first=True)

    def _let_go(self) -> None:
        """Threads that still work for a job that is over may hang: others take their places."""
        with self._watched:
            over = [job for job in self._tasks if self._exchange.over(job)]
            tasks = [task for job in over for task in self._tasks.pop(job)]
        for task in tasks:
            self._loads.give_up(task)
            self._stores.give_up(task)

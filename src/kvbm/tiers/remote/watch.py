"""Ends the jobs of a remote tier at their deadlines, from a thread: the owner may sleep until one ends."""

from __future__ import annotations

import threading

from kvbm.clock import Clock
from kvbm.tiers.remote.exchange import Exchange, LoadJob, StoreJob
from kvbm.tiers.remote.health import StoreHealth
from kvbm.tiers.remote.options import RemoteOptions

PERIOD_S = 0.02


class JobWatch:
    """Its thread works while there are jobs. What is late counts against the store."""

    def __init__(
        self, place: str, options: RemoteOptions, exchange: Exchange, health: StoreHealth, clock: Clock
    ) -> None:
        self._place = place
        self._options = options
        self._exchange = exchange
        self._health = health
        self._clock = clock
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, name="kvbm-remote-watch", daemon=True).start()

    def accept(self, job: LoadJob | StoreJob) -> None:
        """The job is under way, and is to end by its deadline."""
        with self._changed:
            self._exchange.accept(job)
            self._changed.notify_all()

    def expire(self) -> None:
        """End what is late."""
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
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._exchange.idle)
                if self._closed:
                    return
            self.expire()
            with self._changed:
                self._changed.wait_for(lambda: self._closed, PERIOD_S)

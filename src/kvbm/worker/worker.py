"""One rank's worker, as an engine integration drives it: every call comes from the engine's thread and returns soon."""

from __future__ import annotations

import queue
import threading
import time

from kvbm.clock import Clock
from kvbm.launch import ManagerFinder
from kvbm.protocol import Hello, StepPlan, StepReport, Welcome
from kvbm.transfer import DeviceCache
from kvbm.worker.mapping import Mapping
from kvbm.worker.mover import FinishedLoad, LoadJob, Mover, StoreJob

STORE_TIMEOUT_S = 60.0
IDLE_WAIT_S = 0.02


class Worker:
    """Carries out step plans. `stores_here` is False on a rank whose bytes another rank stores (replicas)."""

    def __init__(
        self,
        finder: ManagerFinder,
        hello: Hello,
        cache: DeviceCache,
        stores_here: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._stores_here = stores_here
        self._mover = Mover(finder, hello, lambda welcome, fds: Mapping(welcome, fds, cache), clock)
        self._open_loads = 0
        self._stored: dict[int, tuple[int, tuple[int, ...], float]] = {}
        self._loaded: dict[str, float] = {}

    def attach(self, timeout_s: float) -> Welcome:
        """Join the manager; raises ManagerUnavailable or ManagerRefused. `start` follows in any case."""
        return self._mover.attach(timeout_s)

    def start(self) -> None:
        """Serve plans from now on, with or without a manager."""
        self._mover.start()

    def store(self, plan: StepPlan) -> None:
        """Copy what the plan stores; on return the device blocks may be overwritten.

        Called before anything else of the step. When the copy does not end in time the job is abandoned: the mover
        reports it as failed once it has let go of the slots.
        """
        if not plan.stores:
            return
        if not self._stores_here:
            self._stored.update({store.store: (1, (), 0.0) for store in plan.stores})
            return
        if not self._mover.connected:
            # Nothing could be committed, and the copying thread may be busy joining a manager.
            self._stored.update({s.store: (1, tuple(range(len(s.slots))), 0.0) for s in plan.stores})
            return
        job = StoreJob(plan.stores, self._mover.mark(), threading.Event())
        self._mover.put(job)
        if not job.done.wait(STORE_TIMEOUT_S):
            job.abandoned = True

    def load(self, plan: StepPlan) -> None:
        """Start the plan's loads; they end in `finished`."""
        if not plan.loads:
            return
        after = self._mover.mark()
        now_s = self._clock()
        for load in plan.loads:
            self._open_loads += 1
            self._mover.put(LoadJob(load, after, copied=0, ready=load.ready, started_s=now_s, heard_s=now_s))

    def finished(self, plan: StepPlan) -> list[FinishedLoad]:
        """The loads that ended since the last call. In an idle step it waits a little for one: nobody else has work."""
        done: list[FinishedLoad] = []
        while True:
            try:
                done.append(self._mover.loads.get_nowait())
            except queue.Empty:
                break
        pending = self._open_loads - len(done)
        if not done and pending and plan.idle:
            try:
                done.append(self._mover.loads.get(timeout=IDLE_WAIT_S))
            except queue.Empty:
                pass
        self._open_loads -= len(done)
        for load in done:
            self._loaded[load.request] = load.seconds
        return done

    def report(self) -> StepReport | None:
        """What there is to tell the leader, or None."""
        while True:
            try:
                store = self._mover.stores.get_nowait()
            except queue.Empty:
                break
            self._stored.setdefault(store.store, (1, store.failed, store.seconds))
        if not self._stored and not self._loaded:
            return None
        report = StepReport(stored=self._stored, loaded=self._loaded)
        self._stored, self._loaded = {}, {}
        return report

    def close(self) -> None:
        self._mover.stop()

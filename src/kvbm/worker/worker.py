"""One rank's worker, as an engine integration drives it: every call comes from the engine's thread and returns soon."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from kvbm.clock import Clock, nanoseconds, wall_offset_ns
from kvbm.errors import CopyHung
from kvbm.protocol import Welcome
from kvbm.settings import variable
from kvbm.step_plan import NO_EPOCH, StepPlan, StepReport
from kvbm.transfer import DeviceCache
from kvbm.transfer.copier import COPY_S_MAX
from kvbm.worker.failures import FailureLog
from kvbm.worker.jobs import FinishedLoad, LoadJob, ReportJob, StoreJob
from kvbm.worker.layers import LayerGate
from kvbm.worker.mapping import Mark
from kvbm.worker.mover import Mover

STORE_TIMEOUT_S = 60.0
LAYER_TIMEOUT_S = COPY_S_MAX
ADOPT_WAIT_S = 15.0
"""A manager that has welcomed this rank is in the leader's plans before the rank has mapped its memory."""
IDLE_WAIT_S = 0.02
HANG_POLL_S = 1.0
"""How often it is asked, in a wait for a load by layer, whether that hangs."""

_LOADS_HANG = (
    f"KVBM ends this engine: a load has not ended within {COPY_S_MAX:g} s, the device or its driver hangs, and the "
    "load may still write to its blocks. Restart the engine; if it happens again, set "
    f"{variable('cuda_copy')}=rows"
)

ResultT = TypeVar("ResultT")


class Worker:
    """Carries out step plans. `stores_here` is False on a rank whose bytes another rank stores (replicas)."""

    def __init__(
        self,
        mover: Mover,
        cache: DeviceCache,
        stores_here: bool = True,
        clock: Clock = time.monotonic,
        weights_changes: Callable[[], int] = lambda: 0,
        wall_offset_ns: Callable[[], int] = wall_offset_ns,
    ) -> None:
        """`weights_changes` counts how often this rank's weights were changed in memory, from any number on.
        `wall_offset_ns` makes a time of `clock` one of the system's clock."""
        self._clock = clock
        self._wall_offset_ns = wall_offset_ns
        self._weights_changes = weights_changes
        self._changes_seen = weights_changes()
        self._weights_known = 0
        self._weights_unknown = False
        self._stores_here = stores_here
        self._layers = cache.layers
        # On a CPU a copy and a forward pass would only take the cores from one another.
        self._copies_beside = cache.device.type != "cpu"
        self._mover = mover
        self._failures = FailureLog()
        self._mark: Mark | None = None
        self._marked: StepPlan | None = None
        self._storing: dict[int, StoreJob] = {}
        # Stores that did not begin in time: none is waited for before they have.
        self._late: StoreJob | None = None
        self._by_layer: list[tuple[LayerGate, LoadJob]] = []
        self._not_begun: list[FinishedLoad] = []
        # Of each load that runs: what `_weights_known` was when it began, and its device blocks.
        self._begun: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._open_loads = 0
        self._stored: dict[int, tuple[int, tuple[int, ...], float]] = {}
        self._loaded: dict[str, float] = {}
        self._copied: dict[str, tuple[int, int]] = {}

    def attach(self, timeout_s: float) -> Welcome:
        """Join the manager; raises ManagerUnavailable or ManagerRefused. `start` follows in any case."""
        return self._mover.attach(timeout_s)

    def start(self) -> None:
        """Serve plans from now on, with or without a manager."""
        self._mover.start()

    def store(self, plan: StepPlan) -> None:
        """Begin the plan's stores; on return the blocks of the stores that it releases may be overwritten.

        Called before anything else of the step. On a device that copies by itself its stream waits, not this thread.
        What does not begin in time is abandoned: the mover reports it as failed once it has let go of the slots.
        """
        self._compare_weights(plan)
        self._set_mark(plan)
        if plan.stores:
            self._begin_stores(plan)
        held = False
        for store in plan.released if self._copies_beside else ():
            job = self._storing.get(store)
            if job is not None and self._await(job):
                self._hold(job, store)
                held = True
        if held and plan.loads:
            # The engine may load into blocks that it got back in this very step: those stores come first.
            self._mark_now()

    def load(self, plan: StepPlan) -> None:
        """Start the plan's loads; they end in `finished`."""
        self._set_mark(plan)
        now_s = self._clock()
        for load in plan.loads:
            # The copying thread may be busy joining a manager, and the forward pass would wait for it.
            unattended = self._mover.watches.is_stuck or (load.layerwise and not self._mover.connected)
            job = LoadJob(load, self._mark, ready=load.ready, started_s=now_s, last_progress_s=now_s)
            self._open_loads += not load.layerwise
            if unattended or self._weights_unknown:
                self._not_begun.append(job.finished(0, now_s))
                continue
            if load.layerwise:
                job.layers = LayerGate(self._layers)
                self._by_layer.append((job.layers, job))
            self._begun[load.request] = self._weights_known, load.device_blocks
            self._mover.put(job)

    def load_now(self, plan: StepPlan, timeout_s: float) -> list[FinishedLoad]:
        """Carry out the plan's loads and wait for their ends: on return what has not failed lies on the device.

        For an engine whose forward pass reads the blocks next. What has not ended after `timeout_s` counts as failed.
        """
        until_s = self._clock() + timeout_s
        for each in plan.loads:
            self._marked = one = msgspec.structs.replace(plan, stores=(), loads=(each,))
            self._mark_for(each.epoch, min(ADOPT_WAIT_S, timeout_s))
            self.load(one)
        open_loads = {load.request: load.device_blocks for load in plan.loads}
        done, self._not_begun = self._not_begun, []
        while len(done) < len(plan.loads) and (left_s := until_s - self._clock()) > 0.0:
            with contextlib.suppress(queue.Empty):  # the time is over
                done.append(self._mover.loads.get(timeout=left_s))
        self._open_loads -= len(done)
        for load in done:
            open_loads.pop(load.request, None)
            self._begun.pop(load.request, None)
            if not load.failed:
                self._loaded[load.request] = load.seconds
        late = [
            FinishedLoad(request=name, failed=blocks, seconds=timeout_s)
            for name, blocks in open_loads.items()
        ]
        return done + late

    @property
    def open_stores(self) -> frozenset[int]:
        """Stores whose copies run beside the engine's work, as of the latest report."""
        return frozenset(self._storing)

    def abandon(self, stores: Iterable[int]) -> None:
        """The engine overwrites the blocks of these stores now: they are reported as failed."""
        for store in stores:
            job = self._storing.get(store)
            if job is not None:
                job.abandoned = True

    def send_report(self) -> None:
        """Tell the leader, through the manager, what this thread knows and the mover has not told already."""
        report = self.report()
        if report is not None:
            self._mover.put(ReportJob(report))

    def wait_for_layer(self, layer: str) -> None:
        """The forward pass is about to read this layer: loads into it come first."""
        for gate, job in self._by_layer:
            if not gate.abandoned and not gate.pass_through(layer, job.after, LAYER_TIMEOUT_S):
                # Its blocks are reported as failed, and the mover begins no further layer of it.
                gate.abandoned = True

    def finished(self, plan: StepPlan) -> list[FinishedLoad]:
        """The loads that ended since the last call; those of this step's forward pass, all of them.

        In an idle step it waits a little for one: the engine has no other work. Raises CopyHung where a load does not
        end: its blocks may still be written, so that neither its request nor another one can have them.
        """
        if self._mover.watches.loads_hang:
            raise CopyHung(_LOADS_HANG)
        done, self._not_begun = self._not_begun, []
        done += [
            job.finished(0, self._clock()) for gate, job in self._by_layer if not self._await_layers(gate)
        ]
        self._by_layer.clear()
        done += _taken(self._mover.loads)
        pending = self._open_loads - sum(not load.layerwise for load in done)
        if pending and self._mover.watches.is_stuck:
            raise CopyHung(_LOADS_HANG)
        if not done and pending and plan.idle:
            try:
                done.append(self._mover.loads.get(timeout=IDLE_WAIT_S))
            except queue.Empty:
                pass
        self._open_loads -= sum(not load.layerwise for load in done)
        for load in done:
            self._loaded[load.request] = load.seconds
            if load.copied is not None:
                offset_ns = self._wall_offset_ns()
                began_s, ended_s = load.copied
                self._copied[load.request] = (
                    nanoseconds(began_s) + offset_ns,
                    nanoseconds(ended_s) + offset_ns,
                )
        return [self._unless_outdated(load) for load in done]

    def _await_layers(self, gate: LayerGate) -> bool:
        """Wait for the end of a load by layer, which the mover reports. False where it has not begun in time: the mover
        neither begins nor reports it any more. Raises CopyHung."""
        if gate.over.wait(LAYER_TIMEOUT_S):
            return True
        if not gate.writes and gate.abandon() and gate.claim_report():
            return False
        # Each copy has a time of its own: many may take longer, and none hangs.
        while not gate.over.wait(HANG_POLL_S):
            if self._mover.watches.loads_hang or self._mover.watches.is_stuck:
                raise CopyHung(_LOADS_HANG)
        return True

    def _unless_outdated(self, load: FinishedLoad) -> FinishedLoad:
        """A load that began before the weights changed brought KV that they would not have computed."""
        known, blocks = self._begun.pop(load.request, (self._weights_known, load.failed))
        if known == self._weights_known and not self._weights_unknown:
            return load
        return msgspec.structs.replace(load, failed=blocks)

    def report(self) -> StepReport | None:
        """The report for the leader, or None when there is nothing to report."""
        for store in _taken(self._mover.stores):
            self._storing.pop(store.store, None)
            if not self._mover.reporting.on:
                self._stored.setdefault(store.store, (1, store.failed, store.seconds))
        if not self._stored and not self._loaded and not self._weights_unknown:
            return None
        report = StepReport(
            stored=self._stored,
            loaded=self._loaded,
            weights_changed=self._weights_unknown,
            copied=self._copied,
        )
        self._stored, self._loaded, self._copied = {}, {}, {}
        return report

    def quiesce(self, timeout_s: float) -> bool:
        """Have nothing copied from or to the device any more, before its memory goes; False after `timeout_s`."""
        return self._mover.drain(timeout_s)

    def close(self) -> None:
        self._mover.stop()
        self._failures.close()

    def _compare_weights(self, plan: StepPlan) -> None:
        """Whether the leader knows with which weights this rank computes by now; once a step, before all else."""
        changes = self._weights_changes()
        if changes != self._changes_seen:
            self._changes_seen, self._weights_unknown = changes, True
        if plan.weights > self._weights_known:
            # It knows of a change, and of the latest: nothing was computed since the plan before, and every load of
            # this plan was found after the leader knew of it.
            self._weights_known, self._weights_unknown = plan.weights, False

    def _set_mark(self, plan: StepPlan) -> None:
        """Set the mark that the step's copies come after: the end of the engine's work before it. Once a step."""
        if self._marked is plan or not (plan.stores or plan.loads):
            return
        self._marked = plan
        self._mark_now()

    def _mark_for(self, epoch: int, timeout_s: float) -> None:
        """Set the mark for a load out of this memory, which may be mapped in a moment, or be the one before."""
        self._mark_now(epoch)
        if epoch != NO_EPOCH and (self._mark is None or self._mark.mapping.epoch != epoch):
            self._mover.adopted.wait(epoch, timeout_s)
            self._mark_now(epoch)

    def _mark_now(self, epoch: int = NO_EPOCH) -> None:
        self._mark = None
        try:
            self._mark = self._mover.mark() if epoch == NO_EPOCH else self._mover.mark(epoch)
        except RuntimeError as error:
            # The device is lost. The engine will say so itself: our jobs fail for want of a mark.
            self._failures.log_failure("asking the device for an event", error)

    def _hold(self, job: StoreJob, store: int) -> None:
        if self._mover.watches.stores_hang:
            job.abandoned = True  # the device would wait for ever, and it only reads these blocks
            return
        try:
            if self._mover.watches.stores_are_late:
                job.wait(store)  # this has a limit; the device would wait for ever
            else:
                job.hold(store)
        except (CopyHung, RuntimeError) as error:
            job.abandoned = True
            self._failures.log_failure("letting the device wait for a store", error)

    def _begin_stores(self, plan: StepPlan) -> None:
        attended = self._mover.connected and not self._mover.watches.is_stuck
        if self._weights_unknown or (self._stores_here and not attended):
            # Nothing could be committed, and the copying thread may be busy joining a manager. Or what was computed
            # with other weights would be kept under the name of those before.
            self._stored.update({store.store: (1, store.positions, 0.0) for store in plan.stores})
            return
        if not self._stores_here:
            self._stored.update({store.store: (1, (), 0.0) for store in plan.stores})
            return
        # Of some this node's manager has all blocks already, and other nodes' have not.
        stores = tuple(store for store in plan.stores if store.slots)
        self._stored.update({store.store: (1, (), 0.0) for store in plan.stores if not store.slots})
        if not stores:
            return
        job = StoreJob(stores, self._mark)
        self._mover.put(job)
        if self._copies_beside:
            self._storing.update({store.store: job for store in stores})
        else:
            self._await(job)

    def _await(self, job: StoreJob) -> bool:
        """Wait until the job's copies were begun; on a CPU they are over then. False when it was abandoned."""
        waits = self._late is None or self._late.begun.is_set()
        if not job.begun.wait(STORE_TIMEOUT_S if waits else 0.0):
            job.abandoned, self._late = True, job
        return not job.abandoned


def _taken(results: queue.SimpleQueue[ResultT]) -> Iterator[ResultT]:
    """The results that are there by now."""
    with contextlib.suppress(queue.Empty):  # that was the last one
        while True:
            yield results.get_nowait()

"""The one thread of a rank that copies, and that owns the rank's session with the manager.

Jobs come in through a queue, results leave through another; nothing here is shared. Stores go first, because the
engine may wait for them; loads are copied in pieces as their blocks become ready (`loading`), so a store never waits
for long. On a device that copies by itself this thread only begins copies, and looks now and then which are over: it
waits for none, so that stores, loads and fences do not wait for one another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from kvbm.client.channel import Channel, readable_among
from kvbm.client.finder import ManagerFinder
from kvbm.clock import Clock
from kvbm.errors import CopyHung, DeviceLost, ManagerRefused, ManagerUnavailable
from kvbm.protocol import CopiesHang, Fence, FenceDone, Hello, Progress, Watch, Welcome
from kvbm.settings import variable
from kvbm.step_plan import NO_EPOCH, StorePlan
from kvbm.strict import record_swallowed
from kvbm.transfer import Copying
from kvbm.worker.failures import FailureLog
from kvbm.worker.fences import Fences
from kvbm.worker.hang_watch import Watches
from kvbm.worker.jobs import DrainJob, FinishedLoad, FinishedStore, LoadJob, ReportJob, StoreJob
from kvbm.worker.loading import Loading
from kvbm.worker.mapping import Adopted, Earlier, Mapping, Mark
from kvbm.worker.reporting import Reporting
from kvbm.worker.storing import Storing

log = logging.getLogger("kvbm.worker")

ADOPT_RETRY_S = 5.0
LOADING_POLL_S, STORING_POLL_S = 0.001, 0.004
"""While copies are under way, how often it is looked which are over: requests wait for loads, nobody for a store."""
_RECONNECT_POLL_S = 0.25
"""Also how often it is looked whether copies that hang have ended after all."""
_WELCOME_TIMEOUT_S = 10.0


class Mover:
    """The jobs of a rank, its session, and the thread that serves both: `attach`, then `start`, then the queues.

    Without `start`, the owner of the mover drives it by calling `turn`. `finder` makes the sessions, `make_mapping`
    maps the memory that a session gives. Whatever happens to the manager, every job that is put in is answered: with
    bytes, or with failed blocks; but not jobs whose copies hang (`hang_watch`).
    """

    def __init__(
        self,
        finder: ManagerFinder,
        hello: Hello,
        make_mapping: Callable[[Welcome, list[int]], Mapping],
        clock: Clock = time.monotonic,
        reports: bool = False,
    ) -> None:
        """`reports`: the leader is told through the manager what has ended (see `reporting`)."""
        self._finder = finder
        self._hello = hello
        self._make_mapping = make_mapping
        self._clock = clock
        self._inbox: queue.SimpleQueue[StoreJob | LoadJob | DrainJob | ReportJob | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channel: Channel | None = None
        self._kept_channel: Channel | None = None
        """A session that the manager has ended, open because copies hang: the manager sees when it is closed."""
        self._mapping: Mapping | None = None
        self._thread_adopted: Mapping | None = None
        self._fences = Fences()
        self._failures = FailureLog()
        self._stopping = self._stopped = self._device_lost = self._gave_up = False
        self._refused = ""
        self._retry_at_s = 0.0
        self.stores: queue.SimpleQueue[FinishedStore] = queue.SimpleQueue()
        self.loads: queue.SimpleQueue[FinishedLoad] = queue.SimpleQueue()
        self.reporting = Reporting(reports)
        self._storing = Storing(self.stores, self._copy_failed, clock, self.reporting.store_ended)
        self._loading = Loading(self.loads, self._copy_failed, self._still_there, clock)
        self.watches = Watches(self._storing.watch, self._loading.watch)
        self.adopted, self._earlier = Adopted(), Earlier(reports)
        self._thread = threading.Thread(target=self._run, name="kvbm-mover", daemon=True)

    # ---- the engine's thread

    def attach(self, timeout_s: float) -> Welcome:
        """Join the manager now, before the thread runs. Raises ManagerUnavailable or ManagerRefused."""
        channel, welcome = self._finder.establish(self._hello, timeout_s, time.sleep)
        self._adopt(channel, welcome)
        return welcome

    def start(self) -> None:
        """Start the thread; it reconnects by itself from now on."""
        self._thread.start()

    def put(self, job: StoreJob | LoadJob | DrainJob | ReportJob) -> None:
        """Hand the thread a job; never blocks."""
        self._inbox.put(job)
        os.eventfd_write(self._wake, 1)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing that was put in before touches the device any more; False after `timeout_s`.

        Loads end with the blocks that are ready by now.
        """
        if not self._thread.is_alive():
            return True
        if self.watches.has_hung or self.watches.is_stuck:
            return False
        job = DrainJob()
        self.put(job)
        return job.done.wait(timeout_s)

    @property
    def connected(self) -> bool:
        """Whether there is a session; a hint for the engine's thread, which may be outdated at once."""
        return self._channel is not None

    def mark(self, epoch: int = NO_EPOCH) -> Mark | None:
        """The present end of the engine's device work, by its thread. `epoch` may name earlier memory."""
        mapping, earlier = self._mapping, self._earlier.mapping
        if earlier is not None and earlier.epoch == epoch:
            mapping = earlier
        return Mark(mapping, mapping.copier.mark()) if mapping is not None else None

    def _usable(self, after: Mark | None, epoch: int, loads: bool = True) -> Mapping | None:
        """The mapping for a job, unless it was meant for another one."""
        mapping, earlier = None if self._is_off else self._mapping, self._earlier.mapping
        if loads and mapping is not None and earlier is not None and earlier.epoch == epoch:
            mapping = earlier
        if mapping is None or after is None or after.mapping is not mapping or mapping.epoch != epoch:
            return None
        return mapping

    @property
    def _is_off(self) -> bool:
        """No copy is begun, and no session either."""
        return self._device_lost or self._gave_up

    def stop(self) -> None:
        """End the thread; jobs that are left fail, and nothing may be put in any more. Twice is no error."""
        if self._stopped:
            return
        self._stopped = True
        if self._thread.is_alive():
            self._inbox.put(None)
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout=10.0)
        else:
            self._end()
        if not self._thread.is_alive():
            os.close(self._wake)

    # ---- the thread

    def _run(self) -> None:
        while not self._stopping:
            self.turn()
        self._end()

    def turn(self, wait: bool = True) -> None:
        """One pass of the thread's loop: take jobs, join or read the manager, move a piece, report what has ended.

        Without `wait` it does not wait until something happens.
        """
        try:
            if self._mapping is not self._thread_adopted and self._mapping is not None:
                self._thread_adopted = self._mapping
                self._mapping.copier.adopt_thread()
            self._turn(wait)
        except ManagerUnavailable as error:
            self._lose_session(str(error))
        except CopyHung as error:
            self._give_up(error)
        except Exception as error:
            # A defect of ours must cost a load, never the engine: fail the open jobs, start afresh.
            record_swallowed(error)
            self._failures.log_failure("mover", error, then="; open loads are recomputed")
            self._lose_session("mover failed")

    def _end(self) -> None:
        self._lose_session("worker stops")
        self._failures.close()
        if self._storing or self._loading.under_way:
            return  # copies hang, and may use the memory until the process ends, which closes the session
        self._earlier.close()
        if self._mapping is not None:
            self._mapping.close()

    def _turn(self, wait: bool) -> None:
        if self._channel is None:
            self.take_jobs()  # joining may take a while: jobs that wait by now fail at once
            self._reconnect()
        watched = [self._wake] + ([self._channel.fileno()] if self._channel else [])
        readable = readable_among(watched, self._patience_s() if wait else 0.0)
        if self._wake in readable:
            os.eventfd_read(self._wake)
        self.take_jobs()
        if self._channel is not None and self._channel.fileno() in readable:
            self._listen(self._channel)
        self._loading.advance(interrupted=self._has_jobs)
        self._earlier.expire(self._clock(), bool(self._loading))
        self._storing.collect()
        if self._channel is not None and self._fences:
            for fence in self._fences.passed(self._storing.under_way):
                self._channel.send(FenceDone(fence=fence))
        self.reporting.send(self._channel)
        if self._kept_channel is not None and not (self._storing or self._loading.under_way):
            self._kept_channel.close()
            self._kept_channel = None
        if self._device_lost and self._channel is not None:
            self._lose_session("the device is lost")

    def _patience_s(self) -> float:
        """How long to wait for something to happen."""
        if self._loading.may_begin or self._has_jobs():
            return 0.0  # also jobs whose wake-up a turn took that failed
        if self._gave_up:
            return _RECONNECT_POLL_S
        if self._loading.under_way:
            return LOADING_POLL_S
        if self._storing:
            return STORING_POLL_S
        return 1.0 if self._channel else _RECONNECT_POLL_S

    def _has_jobs(self) -> bool:
        return not self._inbox.empty()

    def take_jobs(self) -> None:
        """The first part of a turn: begin the stores that were put, and queue the loads."""
        while True:
            try:
                job = self._inbox.get_nowait()
            except queue.Empty:
                return
            if job is None:
                self._stopping = True
            elif isinstance(job, StoreJob):
                self._store(job)
            elif isinstance(job, DrainJob):
                self._drain(job)
            elif isinstance(job, ReportJob):
                self.reporting.add(job.report)
            else:
                self._begin_load(job)

    def _drain(self, job: DrainJob) -> None:
        try:
            self._storing.drain()
            self._loading.end_all()
        finally:
            if not self.watches.has_hung:
                job.done.set()

    def _store(self, job: StoreJob) -> None:
        try:
            for plan in job.plans:
                started_s = self._clock()
                copying = None if plan.store in self._fences else self._copy_out(plan, job.after)
                if copying is None:
                    self._storing.end(plan, started_s, copied=False)
                    continue
                self._storing.begun(plan, job, copying, started_s)
            self._storing.collect()
        finally:
            job.begun.set()

    def _copy_out(self, plan: StorePlan, after: Mark | None) -> Copying | None:
        """Without a session no fence could reach us, and a reservation may have ended before the present one."""
        mapping = self._usable(after, plan.epoch, loads=False)
        if self._channel is None or mapping is None or after is None:
            return None
        if mapping.intact(plan.slots, plan.generations) < len(plan.slots):
            return None
        try:
            with self._storing.watch.watch_call():
                return mapping.copier.begin_store(
                    list(zip(plan.device_blocks, plan.slots, strict=True)), after.event
                )
        except Exception as error:
            record_swallowed(error)
            self._copy_failed("store", len(plan.slots), error)
            return None

    def _begin_load(self, job: LoadJob) -> None:
        if not self._still_there(job):
            job.closed = True
        self._loading.add(job)
        if job.layers is None and not job.closed and job.ready < len(job.plan.slots):
            if self._channel is None:
                raise ManagerUnavailable("it went before a load had all its blocks")
            self._channel.send(Watch(lookup=job.plan.lookup))

    def _still_there(self, job: LoadJob) -> bool:
        """Whether the memory that the load was promised out of is still mapped."""
        return self._usable(job.after, job.plan.epoch) is not None

    def _listen(self, channel: Channel) -> None:
        for message in channel.receive():
            if isinstance(message, Progress):
                self._loading.progress(message.lookup, message.ready, message.final)
            elif isinstance(message, Fence):
                self._fences.raised(message.fence, message.stores, self._storing.under_way)

    def _copy_failed(self, kind: str, blocks: int, error: Exception) -> None:
        """A copy failed. Without a device none will succeed: that is logged once, and no session is kept."""
        if not isinstance(error, DeviceLost):
            self._failures.log_failure(kind, error, blocks)
        elif not self._device_lost:
            self._device_lost = True
            log.error("KVBM is off in this rank from now on: %s", error)

    # ---- the session

    def _reconnect(self) -> None:
        waits = self._is_off or self._clock() < self._retry_at_s
        channel = None if waits else self._finder.attempt()
        if channel is None:
            return
        try:
            welcome = channel.introduce(self._hello, _WELCOME_TIMEOUT_S)
            self._finder.welcomed()
            self._adopt(channel, welcome)
        except (ManagerRefused, ManagerUnavailable) as error:
            channel.close()
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning("no KV cache for now: %s", error)
            return
        self._refused = ""
        log.info("connected again to the manager (epoch %x)", welcome.epoch)

    def _adopt(self, channel: Channel, welcome: Welcome) -> None:
        """Go over to a manager's memory. Loads from the old one end first, with the blocks that are ready."""
        try:
            self._loading.end_all()
            if self._mapping is not None:
                self._earlier.replace(self._mapping, self._clock())
                self._mapping = None
            self._mapping = self._make_mapping(welcome, channel.take_fds())
        except BaseException:
            channel.close()
            # Mapping or page-locking may be refused every time, perhaps after minutes: do not spin on it.
            self._retry_at_s = self._clock() + ADOPT_RETRY_S
            raise
        self.adopted.now(welcome.epoch)
        # Last: a thread that sees a session may count on the memory behind it, which can take long to map.
        self._channel = channel

    def _lose_session(self, reason: str) -> None:
        """The manager has gone: blocks that were on their way to host memory never come.

        The mapping stays until there is a new one: a dead manager overwrites nothing, so blocks that it had
        promised can still be loaded.
        """
        try:
            # To a manager that lives, the end of the session means that nothing writes into its slots any more.
            self._storing.drain()
            self._loading.end_all()
        except CopyHung as error:
            self._give_up(error)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            if not self._stopping and not self._device_lost:
                log.warning("manager lost: %s; requests are computed until it is back", reason)
        self._fences.session_ended()

    def _give_up(self, error: CopyHung) -> None:
        """A copy hangs: nothing is copied any more, and nothing waits for it. The manager ends the session, and the
        slots of open stores stay reserved until our end of it is closed. The first one alone is logged."""
        if not self._gave_up:
            log.error(
                "KVBM is off in this rank from now on: %s, the device or its driver hangs. Restart the engine; if it "
                "happens again, set %s=rows",
                error,
                variable("cuda_copy"),
            )
        self._gave_up = True
        if self._channel is not None:
            self._kept_channel, self._channel = self._channel, None
            with contextlib.suppress(ManagerUnavailable):
                self._kept_channel.send(CopiesHang())
        self._fences.session_ended()
        self._loading.stop_waiting()

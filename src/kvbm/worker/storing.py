"""Stores that are being copied, in the order in which their copies were begun. Owned by the mover's thread."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from kvbm.clock import Clock
from kvbm.errors import CopyHung
from kvbm.step_plan import StorePlan
from kvbm.strict import record_swallowed
from kvbm.transfer import Copying
from kvbm.worker.hang_watch import HangWatch
from kvbm.worker.jobs import FinishedStore, StoreJob, StoreUnderWay


class Storing:
    """Puts stores that have ended into `finished` and tells `ended`. Calls `failed(kind, blocks, error)` for a copy
    that failed. A store whose copy hangs stays under way: its slots may still be written."""

    def __init__(
        self,
        finished: queue.SimpleQueue[FinishedStore],
        failed: Callable[[str, int, Exception], None],
        clock: Clock,
        ended: Callable[[FinishedStore], None] = lambda store: None,
    ) -> None:
        self._ended = ended
        self._finished = finished
        self._failed = failed
        self._clock = clock
        self._under_way: deque[StoreUnderWay] = deque()
        self.watch = HangWatch("store", clock)

    def __bool__(self) -> bool:
        return bool(self._under_way)

    @property
    def under_way(self) -> frozenset[int]:
        """The numbers of the stores whose copies are not over."""
        return frozenset(store.plan.store for store in self._under_way)

    def begun(self, plan: StorePlan, job: StoreJob, copying: Copying, started_s: float) -> None:
        """A copy was begun, after all those that were begun before."""
        job.copies[plan.store] = copying
        self._under_way.append(StoreUnderWay(plan, job, copying, started_s))

    def end(self, plan: StorePlan, started_s: float, *, copied: bool) -> None:
        """The store is over."""
        failed = () if copied else plan.positions
        finished = FinishedStore(store=plan.store, failed=failed, seconds=self._clock() - started_s)
        self._finished.put(finished)
        self._ended(finished)

    def collect(self, *, wait: bool = False) -> None:
        """End the stores whose copies are over, in order; with `wait`, the oldest one in any case. Raises CopyHung, the
        first time that one hangs."""
        while self._under_way:
            store = self._under_way[0]
            try:
                if wait:
                    with self.watch.watch_wait():
                        store.copying.wait()
                elif not store.copying.done():
                    self.watch.check_oldest(store.started_s)
                    return
                # Looked at after the copy: an engine that waited until here has overwritten nothing.
                copied = not store.job.abandoned
            except CopyHung:
                raise
            except Exception as error:
                record_swallowed(error)
                self._failed("store", len(store.plan.slots), error)
                copied = False
            wait = False
            self._under_way.popleft()
            self.watch.note_end()
            self.end(store.plan, store.started_s, copied=copied)

    def drain(self) -> None:
        """End them all, but for those that hang. Raises as `collect` does."""
        while self._under_way and not self.watch.hung:
            self.collect(wait=True)

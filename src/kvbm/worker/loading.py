"""Loads that are being copied: all that is ready is begun at once, as far as a window of bytes allows.

A load is copied in pieces, each with an end of its own, so that the window moves on before all of it has been copied.
Pieces are large: the thread that begins them needs the interpreter again after each, and an engine that computes in
Python lets go of it every few milliseconds (`docs/decisions/0033-windows-of-bytes.md` has what that costs). Whatever
their size, slots are looked at one by one, and one that changed hands costs the blocks behind it and no more. The first
piece is smaller, so that the link begins to move bytes while the second one is being begun. Nothing here waits for a
copy, but for `end_all`. Owned by the mover's thread.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvbm.clock import Clock
from kvbm.errors import CopyHung, DeviceLost
from kvbm.strict import record_swallowed
from kvbm.transfer import Copying
from kvbm.worker.hang_watch import HangWatch
from kvbm.worker.jobs import FinishedLoad, LoadJob

log = logging.getLogger("kvbm.worker")

FIRST_PIECE_BYTES = 64 << 20
"""Begun in one go where nothing is under way; so are all pieces on a CPU, where beginning one is copying it."""
PIECE_BYTES = 256 << 20
"""Begun in one go behind others: where runs of bytes have 64 KiB that is one full call into the driver, so larger ones
gain nothing. At 50 GB/s it is 5 ms of copying. A thread that computes in Python all the time holds this one up for
longer than that, so beside it a load is slower than the link."""
WINDOW_BYTES = 1 << 30
"""Begun and not over yet, of all loads together."""
LOAD_STALL_S = 20.0


class _Piece(NamedTuple):
    """A run of a load's blocks that is being copied: `[start, end)` of its plan."""

    job: LoadJob
    start: int
    end: int
    copying: Copying
    size: int
    begun_s: float


class Loading:
    """Puts loads that have ended into `finished`. Calls `failed(kind, blocks, error)` for a copy that failed, and asks
    `usable(job)` whether the memory that a load was promised is still there. A load of which a copy hangs is never
    reported: its blocks may still be written."""

    def __init__(
        self,
        finished: queue.SimpleQueue[FinishedLoad],
        failed: Callable[[str, int, Exception], None],
        usable: Callable[[LoadJob], bool],
        clock: Clock,
    ) -> None:
        self._finished = finished
        self._failed = failed
        self._usable = usable
        self._clock = clock
        self._jobs: deque[LoadJob] = deque()
        self._pieces: deque[_Piece] = deque()
        self._bytes = 0
        self.watch = HangWatch("load", clock)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def under_way(self) -> bool:
        """Copies were begun whose end has not been seen."""
        return bool(self._pieces)

    @property
    def may_begin(self) -> bool:
        """A piece can be begun now."""
        return self._next() is not None

    def add(self, job: LoadJob) -> None:
        """Take a load. One that goes layer by layer is begun at once, as the forward pass waits for it; one that is
        closed failed."""
        self._jobs.append(job)
        if job.layers is not None and not job.closed:
            self._begin_layers(job)
        self._settle()

    def progress(self, lookup: int, ready: int, final: bool) -> None:
        """So many blocks of that lookup are in host memory by now; `final`: no more will come."""
        for job in self._jobs:
            if job.plan.lookup == lookup:
                job.last_progress_s = self._clock()
                job.ready = max(job.ready, min(ready - job.plan.offset, len(job.plan.slots)))
                if final:
                    job.goal = job.ready
        self._settle()

    def advance(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """End what is over, and begin what is ready until the window is full or somebody else needs this thread.

        Loads without progress for `LOAD_STALL_S` are ended with the blocks that are ready.
        """
        self._collect(wait=False)
        while (job := self._next()) is not None:
            if self._begin_piece(job) or interrupted():
                break
        now_s = self._clock()
        for job in self._jobs:
            idle = not (job.pieces or job.may_begin or job.ended)
            if idle and now_s - job.last_progress_s > LOAD_STALL_S:
                log.warning(
                    "load of request %s stalled for %g s; the rest is recomputed",
                    job.plan.request,
                    LOAD_STALL_S,
                )
                job.goal = job.ready
        self._settle()

    def end_all(self) -> None:
        """End every load with the blocks that are ready; the rest failed. Waits for the copies, but not for those that
        hang: raises CopyHung, the first time that one does."""
        self.stop_waiting()
        while self._jobs and not self.watch.hung:
            while (begins := self._next()) is not None:
                self._begin_piece(begins)
            self._collect(wait=True)
            self._settle()

    def stop_waiting(self) -> None:
        """No load waits for further blocks."""
        for job in self._jobs:
            job.goal = job.ready
        self._settle()

    # ---- inside

    def _next(self) -> LoadJob | None:
        """The first load that has blocks to copy, while the window has room."""
        if self._bytes >= WINDOW_BYTES:
            return None
        return next((job for job in self._jobs if job.may_begin), None)

    def _begin_piece(self, job: LoadJob) -> bool:
        """Begin the load's next piece. Whether beginning it was copying it, as on a CPU."""
        if not self._usable(job):
            job.broken = True  # promised out of another life's memory, or the device is lost
            return False
        if job.copying_s is None:
            job.copying_s = self._clock()
        try:
            self._begin_blocks(job)
        except Exception as error:
            record_swallowed(error)
            job.closed = True
            self._failed("load", len(job.plan.slots), error)
        return self._collect(wait=False)

    def _begin_blocks(self, job: LoadJob) -> None:
        """Raises as `begin_load` does."""
        plan, after = job.plan, job.after
        assert after is not None
        mapping, start = after.mapping, job.begun
        size = PIECE_BYTES if self._pieces else FIRST_PIECE_BYTES
        end = min(start + max(1, size // mapping.slot_bytes), job.ready)
        intact = mapping.intact(plan.slots[start:end], plan.generations[start:end])
        job.closed = intact < end - start
        if intact:
            end = start + intact
            pairs = list(zip(plan.device_blocks[start:end], plan.slots[start:end], strict=True))
            with self.watch.watch_call():
                copying = mapping.copier.begin_load(pairs, after.event)
            self._put(job, start, end, copying, intact * mapping.slot_bytes)

    def _begin_layers(self, job: LoadJob) -> None:
        """Begin the whole load, one layer after the other, each announced at the gate as its copy begins.

        It ends with its last layer; one that is given up, or that fails, with what was begun.
        """
        plan, gate, after = job.plan, job.layers, job.after
        assert gate is not None and after is not None and job.ready == len(plan.slots)
        mapping = after.mapping
        job.copying_s, job.closed = self._clock(), True
        begun: list[Copying] = []
        try:
            if mapping.intact(plan.slots, plan.generations) < len(plan.slots):
                return
            pairs = list(zip(plan.device_blocks, plan.slots, strict=True))
            # Set before `abandoned` is read: the engine's thread sets `abandoned` before it reads this.
            gate.writes = True
            for layer in mapping.layers:
                if gate.abandoned:
                    break
                with self.watch.watch_call():
                    begun.append(mapping.copier.begin_load(pairs, after.event, layer))
                gate.open(layer, begun[-1])
        except Exception as error:
            record_swallowed(error)
            self._failed("load", len(plan.slots), error)
        # Whatever was begun is waited for; only all layers together are blocks that arrived.
        whole = len(begun) == len(mapping.layers)
        for number, copying in enumerate(begun, 1):
            end = len(plan.slots) if whole and number == len(begun) else 0
            self._put(job, 0, end, copying, 0)

    def _put(self, job: LoadJob, start: int, end: int, copying: Copying, size: int) -> None:
        job.begun = end
        job.pieces += 1
        self._pieces.append(_Piece(job, start, end, copying, size, self._clock()))
        self._bytes += size

    def _collect(self, *, wait: bool) -> bool:
        """End the pieces that are over, in the order in which they were begun; with `wait` the oldest in any case.
        Whether none is under way. Raises CopyHung, the first time that one hangs."""
        while self._pieces:
            piece = self._pieces[0]
            job = piece.job
            try:
                if wait:
                    with self.watch.watch_wait():
                        piece.copying.wait()
                elif not piece.copying.done():
                    self.watch.check_oldest(piece.begun_s)
                    return False
                if not job.broken:
                    self._arrived(piece)
            except CopyHung:
                raise
            except Exception as error:
                record_swallowed(error)
                if job.broken and not isinstance(error, DeviceLost):
                    log.debug("a copy failed whose result is not used: %s", error)
                else:
                    self._failed("load", len(job.plan.slots), error)
                job.broken = True
            wait = False
            self._pieces.popleft()
            self.watch.note_end()
            self._bytes -= piece.size
            job.pieces -= 1
        return True

    def _arrived(self, piece: _Piece) -> None:
        """A slot that changed hands while it was copied may have given us anything."""
        job, after = piece.job, piece.job.after
        assert after is not None
        slots, expected = (
            job.plan.slots[piece.start : piece.end],
            job.plan.generations[piece.start : piece.end],
        )
        intact = after.mapping.intact(slots, expected)
        job.copied += intact
        job.broken = intact < len(slots)

    def _settle(self) -> None:
        """Report the loads that are over. Nothing of them is under way when the engine gets the report."""
        for job in [job for job in self._jobs if job.ended and not job.pieces]:
            self._jobs.remove(job)
            if job.layers is None or job.layers.claim_report():
                self._finished.put(job.finished(job.copied, self._clock()))
            if job.layers is not None:
                job.layers.open_all()

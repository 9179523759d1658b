"""What a disk tier does to its medium beside moving blocks: it opens it, voids records, watches its files, closes it.

All of that happens in the control thread. The owner thread queues it and looks at what came of it.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvbm.block import BlockKey, SlotIndex
from kvbm.clock import Clock
from kvbm.errors import KvbmError, TierError
from kvbm.strict import record_swallowed
from kvbm.tiers.disk.block_io import BlockIo
from kvbm.tiers.disk.control import ControlThread
from kvbm.tiers.disk.medium import DiskMedium, DiskOptions
from kvbm.tiers.disk.opening import open_medium
from kvbm.tiers.disk.reset_marks import ResetMarks
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.voids import Voids

if TYPE_CHECKING:
    from kvbm.tiers.recovered import RecoveredBlocks

log = logging.getLogger("kvbm.tiers.disk.tier")

SYNC_S_MAX = 1.0
"""What is not durable while an operation takes that long is marked beside the medium."""
SYNC_EXTRA_S = 2.25
"""A sync writes all that a drive has cached: it may take so much longer than other operations."""
STRETCHES_AT_ONCE = 64
"""Voids that are written before another operation has its turn."""


class Fault:
    """Why the tier is off, in one line; empty while it works. Any thread may set it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.text = ""

    def turn_off(self, operation: str, error: Exception) -> None:
        """The first failure names the fault, later ones are its consequences."""
        unexpected = None if isinstance(error, OSError) else error
        self.declare(f"{operation} failed: {reason_of(error)}", unexpected)

    def declare(self, what: str, unexpected: Exception | None = None) -> None:
        """The tier is off for this reason, unless it is off already."""
        with self._lock:
            if self.text:
                return
            self.text = f"disk tier is off: {what}"
        log.error("%s", self.text, exc_info=unexpected)


class Opening(NamedTuple):
    """How an attempt to open the medium ended: what it holds, without what the owner has forgotten since, or the error
    that kept it from that."""

    recovered: RecoveredBlocks | None
    error: KvbmError | None = None


class Maintenance:
    """The medium of one tier, None while there is none, and its control thread.

    Methods belong to the owner thread, but for `forget` and `overtake`. `wake` is called in the control thread when
    something ended that the owner waits for. Raises TierError where the process can have no more threads.
    """

    def __init__(
        self,
        options: DiskOptions,
        slot_count: int,
        fault: Fault,
        wake: Callable[[], None],
        clock: Clock,
        syscalls: Syscalls,
        io: BlockIo,
    ) -> None:
        self._options = options
        self._fault = fault
        self._wake = wake
        self._syscalls = syscalls
        self._io = io
        self.medium: DiskMedium | None = None
        self._home: Path | None = None
        self._voids = Voids(slot_count)
        self._sync_wanted, self._sync_queued, self._is_syncing = 0, False, False
        self._marks = ResetMarks(options.namespace.short, options.root, options.notes_dir, syscalls)
        self._is_noting = False
        self._mark_lock = threading.Lock()
        # Guarded by the lock: the number of the last mark, and up to which `sync` it counts.
        self._mark = self._marked = 0
        # The last mark that the medium has recorded, and the last `sync` that was to be marked.
        self._recorded_mark = self._mark_wanted = 0
        self._synced = 0
        self._looking = False
        self._opening: Opening | None = None
        self._slot_count = slot_count
        # Forgotten since the attempt to open began, which may have read the journal before: a byte a slot.
        self._forgotten = bytearray()
        self._has_forgotten = False
        self.is_opening = False
        self._closed = False
        self._thread = ControlThread(clock)

    @property
    def synced(self) -> int:
        """As `RunTier.synced`."""
        return max(self._synced, self._marked)

    @property
    def busy_s(self) -> float:
        """How long the call that runs now has been running, in seconds, a sync less `SYNC_EXTRA_S`; 0 without one."""
        busy_s = self._thread.busy_s
        return max(0.0, busy_s - SYNC_EXTRA_S) if self._is_syncing else busy_s

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until nothing is queued or running; False when `deadline_s` seconds were not enough."""
        return self._thread.wait_idle(deadline_s)

    # ---- opening

    def open(self) -> None:
        """Begin to close the medium, if there is one, and to open it anew: nothing is in flight."""
        assert not self.is_opening
        self.is_opening = True
        self._forgotten = bytearray(self._slot_count)
        self._thread.run(self._open)

    def opened(self) -> Opening | None:
        """How the attempt that `open` began has ended, once; None while it goes on."""
        opening, self._opening = self._opening, None
        if opening is None:
            return None
        if opening.recovered is not None and self._has_forgotten:
            self._has_forgotten = False
            self._thread.run(partial(self._filter, opening.recovered))
            return None
        self.is_opening = False
        return opening

    def _filter(self, recovered: RecoveredBlocks) -> None:
        """Leave out what was forgotten while the medium was opened."""
        self._report_opening(lambda: recovered.without(self._forgotten))

    def _open(self) -> None:
        self._report_opening(self._open_anew)

    def _report_opening(self, work: Callable[[], RecoveredBlocks]) -> None:
        try:
            opening = Opening(work())
        except KvbmError as error:
            opening = Opening(None, error)
        except Exception as error:
            record_swallowed(error)
            log.debug("disk tier: opening failed", exc_info=error)
            opening = Opening(None, TierError(f"disk tier: opening failed: {reason_of(error)}"))
        self._opening = opening
        self._wake()

    def _open_anew(self) -> RecoveredBlocks:
        """Raises SettingsError, TierError."""
        options, before, sync_wanted = self._options, self.medium, self._sync_wanted
        if before is not None:
            self.medium = None
            before.close(remove=not options.persist)
        mark = self._mark  # the medium is empty where it has not recorded it
        medium = open_medium(options, self._syscalls, self._io, self._go_on, self._marks, self._home)
        if medium.path != self._home:
            self._voids.clear()  # they were of another directory
        try:
            recovered, forgotten = medium.recover(), self._forgotten
            while (stretch := self._voids.take()) is not None:
                self._void(medium, stretch)
                forgotten[stretch.start : stretch.stop] = b"\1" * len(stretch)
            if sync_wanted > self._synced:
                medium.sync()
                self._synced = sync_wanted
        except BaseException as error:
            medium.close(remove=not options.persist)
            if not isinstance(error, OSError):
                raise
            text = f"disk tier: cannot read the journal in {medium.path}: {reason_of(error)}"
            raise TierError(text) from error
        self.medium, self._home, self._recorded_mark = medium, medium.path, mark
        self._has_forgotten = False  # it is set after a slot is marked
        return recovered.without(forgotten)

    def _go_on(self) -> None:
        """Between the steps of a long opening. Raises TierError."""
        if self._closed:
            raise TierError(f"disk tier: closed before {self._options.root} was prepared")

    # ---- voids

    def forget(self, slot: int, count: int = 1) -> None:
        """Void the records of these slots, soon. Any thread."""
        if self.is_opening:
            self._forgotten[slot : slot + count] = b"\1" * count
            self._has_forgotten = True
        if self._voids.add(slot, count):
            self._thread.run(self._write_voids)

    def resume(self) -> None:
        """The tier works again: do what was wanted after the medium was opened and before that."""
        self._thread.run(self._write_voids)
        if self._sync_wanted > self._synced:
            self._queue_sync()

    def overtake(self, slot: int, count: int) -> list[int]:
        """A store is about to void these slots: no void that was queued before may be written after it. Waits for one
        that is being written. Returns the slots with such voids: if the store fails, `forget` them again."""
        return self._voids.overtake(slot, count)

    def sync(self) -> int:
        """As `RunTier.sync`."""
        self._sync_wanted += 1
        self._queue_sync()
        return self._sync_wanted

    def watch_sync(self) -> None:
        """In each turn: a reset that the medium does not record, because it is off or hangs, is marked beside it. The
        medium records it when it can."""
        wanted, stuck = self._sync_wanted, self._fault.text or self.busy_s >= SYNC_S_MAX
        if stuck and wanted > max(self.synced, self._mark_wanted) and not self._is_noting:
            self._mark_wanted, self._is_noting = wanted, True
            try:
                threading.Thread(
                    target=self._add_mark, args=(wanted,), name="kvbm-disk-mark", daemon=True
                ).start()
            except RuntimeError as error:
                self._is_noting = False
                log.warning("disk tier: a reset is not marked: a thread cannot be started: %s", error)
        if self._mark > self._recorded_mark and not self._fault.text:
            self._queue_sync()

    def _add_mark(self, wanted: int) -> None:
        """In a thread of its own."""

        def note(number: int) -> None:
            with self._mark_lock:
                self._mark, self._marked = max(self._mark, number), max(self._marked, wanted)
            self._wake()

        def leave_notes() -> None:
            self._is_noting = False

        try:
            self._marks.add(self._mark, note, leave_notes)
        except OSError as error:
            if self._marked < wanted:
                log.warning("disk tier: a reset is not marked beside %s: %s", self._options.root, error)

    def _queue_sync(self) -> None:
        if not self._sync_queued:
            self._sync_queued = True
            self._thread.run(self._sync)

    def _sync(self) -> None:
        self._sync_queued = False
        wanted, mark, medium = self._sync_wanted, self._mark, self.medium
        if self._fault.text or medium is None:
            return  # that is done when it is opened again
        try:
            while (stretch := self._voids.take()) is not None:
                self._void(medium, stretch)
            self._is_syncing = True
            self._thread.begin_step()
            medium.sync()
            medium.note_reset(mark)
        except OSError as error:
            self._fault.turn_off("voiding slots in the journal", error)
        else:
            self._synced, self._recorded_mark = wanted, mark
        finally:
            self._thread.begin_step()
            self._is_syncing = False
        self._wake()

    def _write_voids(self) -> None:
        for _ in range(STRETCHES_AT_ONCE):
            if self._fault.text or self.medium is None:
                return  # they are written when it is opened again
            if (stretch := self._voids.take()) is None:
                return
            try:
                self._void(self.medium, stretch)
            except OSError as error:
                self._fault.turn_off(f"voiding slot {stretch.start} in the journal", error)
                self._wake()
        self._thread.run(self._write_voids)

    def _void(self, medium: DiskMedium, stretch: range) -> None:
        """Raises OSError."""
        failed = True
        self._thread.begin_step()
        try:
            medium.void(SlotIndex(stretch.start), len(stretch))
            failed = False
        finally:
            self._voids.written(failed)

    # ---- facts

    def read_facts(
        self, blocks: Sequence[tuple[SlotIndex, BlockKey]], on_read: Callable[[list[bytes]], None]
    ) -> bool:
        """Read what was said of these blocks, a few hundred bytes of each, and call `on_read` with it in the control
        thread; empty where nothing is known. One read at a time. False: the tier is off."""
        if self._fault.text or self._closed:
            return False
        self._thread.run(partial(self._read_facts, blocks, on_read))
        return True

    def _read_facts(
        self, blocks: Sequence[tuple[SlotIndex, BlockKey]], on_read: Callable[[list[bytes]], None]
    ) -> None:
        medium, texts = self.medium, list[bytes]()
        for slot, key in blocks:
            self._thread.begin_step()
            texts.append(medium.facts(slot, [key])[0] if medium is not None else b"")
        on_read(texts)
        self._wake()

    # ---- watching

    def look(self) -> None:
        """Look whether the files are still there: removed files still take writes."""
        if not self._looking and not self.is_opening:
            self._looking = True
            self._thread.run(self._look)

    def _look(self) -> None:
        medium = self.medium
        if medium is not None and not self._fault.text and (what := medium.vanished()):
            self._fault.declare(what)
            self._wake()
        self._looking = False

    # ---- the end

    def close(self, remove: bool, deadline_s: float) -> None:
        """Write the voids and close the medium, with `remove` after deleting its directory. After `deadline_s` seconds
        the control thread is left to do that alone."""
        self._closed = True
        self._thread.run(lambda: self.close_medium(remove))
        if not self._thread.stop(deadline_s):
            log.warning(
                "disk tier: %s is not closed within %.1f s: a call does not end", self._home, deadline_s
            )

    def end_with(self, operation: Callable[[], None]) -> None:
        """Have the control thread end with this, in place of closing the medium. Waits for nothing."""
        self._closed = True
        self._thread.run(operation)
        self._thread.stop(0.0)

    def close_medium(self, remove: bool) -> None:
        """As `close`, in the control thread."""
        medium, self.medium = self.medium, None
        if medium is None:
            return
        try:
            while not (remove or self._fault.text) and (stretch := self._voids.take()) is not None:
                self._void(medium, stretch)
        except OSError as error:
            log.warning("disk tier: closing %s: %s", medium.path, error.strerror)
        medium.close(remove)


def reason_of(error: Exception) -> str:
    """The error in a few words."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)})"
    return f"{type(error).__name__}: {error}"

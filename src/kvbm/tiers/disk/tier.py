"""G3, the persistent disk tier: `DiskTier` is the asynchronous face of a `DiskMedium`.

The owner thread submits and polls, and never touches the medium. I/O threads move the bytes and verify them; the
control thread does the rest: it voids records, looks whether the files are still there, opens and closes. A medium that
fails turns the tier off with one line of `fault`, all pending jobs complete with RETRY, and `heal` opens everything
anew. A block that fails verification is only a miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.block import GROUP_MAX, KEY_BYTES, BlockKey, Outcome, SlotIndex
from kvbm.clock import Clock, monotonic
from kvbm.errors import KvbmError
from kvbm.layout import PAGE_BYTES, BlockLayout, Namespace
from kvbm.strict import record_swallowed
from kvbm.tiers.contract import CLOSE_LIMIT_S, RUN_BYTES_MAX, BlockHead, Completion, RecoveredBlock
from kvbm.tiers.disk.block_io import (
    BlockIo,
    Buffer,
    BufferStillInUse,
    HostBlockIo,
    disk_namespace,
)
from kvbm.tiers.disk.completions import abandoned, completions_of, memory_of
from kvbm.tiers.disk.geometry import AS_PARAMETERS, DiskSetting
from kvbm.tiers.disk.maintenance import Fault, Maintenance
from kvbm.tiers.disk.medium import DiskMedium, DiskOptions
from kvbm.tiers.disk.opening import plan
from kvbm.tiers.disk.room import NoRoom
from kvbm.tiers.disk.syscalls import VECTOR_BUFFERS_MAX, Syscalls
from kvbm.tiers.disk.threads import IO_THREADS, IoThreads, Job, LoadJob, StoreJob

if TYPE_CHECKING:
    from kvbm.tiers.recovered import RecoveredBlocks

log = logging.getLogger("kvbm.tiers.disk.tier")

PENDING_LIMIT = 64
WATCH_PERIOD_S = 5.0
"""How often the tier looks whether its files are still there."""


def open_disk_tier(
    root: Path | str,
    layout: BlockLayout,
    namespace: Namespace,
    *,
    capacity_bytes: int | None = None,
    capacity_blocks: int | None = None,
    io_threads: int = IO_THREADS,
    pending_limit: int = PENDING_LIMIT,
    o_direct: bool = True,
    zerofill_fallback: bool = False,
    persist: bool = True,
    unowned_bytes: int | None = None,
    setting: DiskSetting = AS_PARAMETERS,
    keeps_facts: bool = False,
    notes_dir: Path | None = None,
    clock: Clock = monotonic,
    syscalls: Syscalls | None = None,
    io: BlockIo | None = None,
    wait: bool = True,
) -> DiskTier:
    """Open the namespace's disk tier under `root`, with the blocks that an earlier run left there.

    - `capacity_bytes`: everything on the medium together stays below it; `capacity_blocks`: exactly so many slots
      (it wins when both are given).
    - `o_direct`: bypass the page cache; where the filesystem cannot, a warning is logged and it is used after all.
    - `zerofill_fallback`: on a filesystem without fallocate, write zeros at start instead of making sparse files.
    - `persist`: keep the blocks for the next run; otherwise start empty, in a directory of its own, and leave nothing
      behind.
    - `unowned_bytes`: what directories without an owner may take under `root`, all together; the least recently used
      go first. None is eight times the size of the largest tier there, times the tiers that share one `setting`, and
      spares what was used within seven days.
    - `keeps_facts`: keep what is said of blocks (`BlockHead.facts`) in a file of its own, a few hundred bytes a block.
    - `notes_dir`: a directory of ours on another medium: there a reset is marked while this one cannot record it.
    - `setting`: how the caller names these, for errors and log lines.
    - `io`: how blocks move and are checked, by system calls from host memory where it is not given. The tier takes it
      over and closes it, also when opening fails.
    - `wait`: return when it is open. Otherwise it is off until `heal` has opened it (see `opening_error`).

    Raises SettingsError (a directory or a capacity that cannot be used) and TierError (the medium failed or is full;
    DirectRefused: it cannot be reached by this `io`).
    """
    syscalls = syscalls or Syscalls()
    io = io or HostBlockIo(syscalls)
    options = DiskOptions(
        root=Path(root),
        layout=layout,
        namespace=disk_namespace(namespace, io.checksum_kind),
        capacity_bytes=capacity_bytes,
        capacity_blocks=capacity_blocks,
        o_direct=o_direct,
        zerofill_fallback=zerofill_fallback,
        persist=persist,
        unowned_bytes=unowned_bytes,
        setting=setting,
        keeps_facts=keeps_facts,
        notes_dir=notes_dir,
    )
    try:
        tier = DiskTier(options, io_threads, pending_limit, clock, syscalls, io)
    except BaseException:
        io.close()
        raise
    if wait:
        try:
            tier.wait_opened()
        except BaseException:
            tier.close(keep=True)
            raise
    return tier


class DiskTier:
    """A `RunTier` on local disk. All methods belong to one owner thread.

    A submission counts against `pending_limit` until its completion is polled; stores may use three quarters of it, so
    that loads always find room.
    """

    name = "disk"

    def __init__(
        self,
        options: DiskOptions,
        io_threads: int,
        pending_limit: int,
        clock: Clock,
        syscalls: Syscalls,
        io: BlockIo,
    ) -> None:
        """Use `open_disk_tier`. It is off until `heal` has opened it. Raises SettingsError and TierError."""
        self._options = options
        self._clock = clock
        self._io = io
        self.slot_count = plan(options).slot_count
        self.pending_limit = pending_limit
        self._store_limit = max(1, pending_limit - pending_limit // 4)
        layout = options.layout
        self._slot_bytes, self._shard_count = layout.slot_bytes, layout.shard_count
        self._block_bytes = layout.block_bytes
        assert self._slot_bytes % PAGE_BYTES == 0
        in_bytes, in_buffers = RUN_BYTES_MAX // self._block_bytes, VECTOR_BUFFERS_MAX // self._shard_count
        self.run_blocks_max = max(1, min(in_bytes, in_buffers))
        self._fault = Fault()
        self._fault.text = f"disk tier: {options.root} is being opened"
        self.opening_error: KvbmError | None = None
        """Why the last attempt to open the medium failed."""
        self._sequence = 0
        self._was_open = self._closed = False
        self._recovered: RecoveredBlocks | None = None
        self._watched_s = clock()
        self._no_room_logged = False
        self._threads = IoThreads(
            self._execute, self._abandon, io_threads, pending_limit, self.run_blocks_max, clock
        )
        try:
            self._upkeep = Maintenance(
                options, self.slot_count, self._fault, self._threads.wake, clock, syscalls, io
            )
        except BaseException:
            self._threads.stop(0.0)
            raise

    def wait_opened(self) -> None:
        """Open it for the first time, however long that takes. Raises SettingsError and TierError."""
        while (outcome := self.heal()) is Outcome.PENDING:
            self._upkeep.wait_idle(60.0)
        if outcome is not Outcome.HIT:
            assert self.opening_error is not None
            raise self.opening_error
        self._threads.collect()  # none has completed: its descriptor is readable no more

    @property
    def path(self) -> Path | None:
        """The directory in use; None while the tier is off because it could not be opened again."""
        medium = self._upkeep.medium
        return medium.path if medium is not None else None

    @property
    def direct(self) -> bool:
        """True while transfers bypass the page cache."""
        medium = self._upkeep.medium
        return medium is not None and medium.direct

    @property
    def fault(self) -> str:
        return self._fault.text

    @property
    def busy_s(self) -> float:
        return max(self._threads.busy_s, self._upkeep.busy_s)

    def recovered(self) -> Iterable[RecoveredBlock]:
        found, self._recovered = self._recovered, None
        return () if found is None else found

    def read_facts(
        self, blocks: Sequence[tuple[SlotIndex, BlockKey]], on_read: Callable[[list[bytes]], None]
    ) -> bool:
        """As `Maintenance.read_facts`."""
        return self._upkeep.read_facts(blocks, on_read)

    @property
    def load_room(self) -> int:
        return max(0, self.pending_limit - self._threads.uncollected_count)

    @property
    def store_room(self) -> int:
        return max(0, self._store_limit - self._threads.uncollected_count)

    def submit_store(
        self, job_id: int, blocks: Sequence[BlockHead], slot: SlotIndex, sources: Sequence[Buffer]
    ) -> Outcome:
        for block in blocks:
            assert len(block.key) == KEY_BYTES
            assert len(block.engine_hash) in (0, KEY_BYTES) and 0 <= block.group <= GROUP_MAX
        self._check(slot, len(blocks), sources)
        self._watch()
        if self._fault.text or self._closed:
            return Outcome.RETRY
        if self._threads.uncollected_count >= self._store_limit:
            return Outcome.THROTTLED
        first = self._sequence + 1
        self._sequence += len(blocks)
        self._threads.submit(StoreJob(job_id, slot, tuple(blocks), first, tuple(sources)))
        return Outcome.PENDING

    def submit_load(
        self, job_id: int, keys: Sequence[BlockKey], slot: SlotIndex, targets: Sequence[Buffer]
    ) -> Outcome:
        assert set(map(len, keys)) == {KEY_BYTES}
        self._check(slot, len(keys), targets)
        self._watch()
        if self._fault.text or self._closed:
            return Outcome.RETRY
        if self._threads.uncollected_count >= self.pending_limit:
            return Outcome.THROTTLED
        self._threads.submit(LoadJob(job_id, slot, tuple(keys), tuple(targets)))
        return Outcome.PENDING

    def forget(self, slot: SlotIndex, count: int = 1) -> None:
        assert count > 0 and 0 <= slot <= self.slot_count - count
        if not self._closed:
            self._upkeep.forget(slot, count)

    def sync(self) -> int:
        return self._upkeep.sync()

    @property
    def synced(self) -> int:
        return self._upkeep.synced

    def poll(self) -> list[Completion]:
        self._watch()
        self._upkeep.watch_sync()
        return self._threads.collect()

    def fileno(self) -> int:
        """As the contract says; not after `close`."""
        return self._threads.fileno()

    def heal(self) -> Outcome:
        """As the contract says: opens the directory anew and recovers it."""
        if self._closed:
            return Outcome.RETRY
        if not self._fault.text:
            return Outcome.HIT
        if not self._upkeep.is_opening:
            if not (self._threads.wait_idle(0.0) and self._io.idle()):
                # The kernel or the device still holds a transfer of ours; its files cannot be closed.
                return Outcome.RETRY
            self._upkeep.open()
        opening = self._upkeep.opened()
        if opening is None:
            return Outcome.PENDING
        self.opening_error = opening.error
        if opening.recovered is None:
            self._fault.text = str(opening.error)
            return Outcome.RETRY
        self._take_into_use(opening.recovered)
        return Outcome.HIT

    def drain(self, deadline_s: float) -> bool:
        end_s = time.monotonic() + deadline_s
        return self._threads.wait_idle(deadline_s) and self._upkeep.wait_idle(end_s - time.monotonic())

    def close(self, keep: bool, deadline_s: float = CLOSE_LIMIT_S) -> None:
        """As the contract says. The completions of pending jobs can still be polled afterwards.

        A transfer that the kernel or the device does not end in time completes with RETRY, and its buffers may still be
        touched: keep their memory mapped until the process ends.
        """
        if self._closed:
            return
        self._closed = True
        remove, end_s = not (keep and self._options.persist), time.monotonic() + deadline_s
        if deadline_s <= 0.0:
            self._upkeep.end_with(lambda: self._close_later(remove))
            return
        if self._threads.stop(deadline_s) and self._io.idle():
            self._upkeep.close(remove, end_s - time.monotonic())
        else:  # a transfer that does not end still uses the files
            self._upkeep.end_with(lambda: None)
        self._io.close()

    def _close_later(self, remove: bool) -> None:
        """In the control thread."""
        if self._threads.stop(CLOSE_LIMIT_S) and self._io.idle():
            self._upkeep.close_medium(remove)
        self._io.close()

    def _take_into_use(self, recovered: RecoveredBlocks) -> None:
        if self._was_open:
            log.warning("disk tier is back in %s with %d block(s)", self.path, len(recovered))
        self._was_open, self._recovered = True, recovered
        self._sequence = max(self._sequence, recovered.last_sequence())
        self._watched_s = self._clock()
        self._no_room_logged = False
        self._fault.text = ""
        self._upkeep.resume()

    def _execute(self, jobs: Sequence[Job]) -> list[Completion]:
        """In an I/O thread: run jobs whose slots follow one another. Raises nothing."""
        medium, job = self._upkeep.medium, jobs[0]
        if self._fault.text or medium is None:
            return list(map(self._abandon, jobs))
        start_s = self._clock()
        due = list[int]()
        try:
            memory = memory_of(jobs)
            if isinstance(job, StoreJob):
                due = self._upkeep.overtake(job.slot, len(memory.blocks))
                heads = [head for each in jobs if isinstance(each, StoreJob) for head in each.blocks]
                blocks, error = medium.store(job.slot, heads, job.sequence, memory)
            else:
                keys = [key for each in jobs if isinstance(each, LoadJob) for key in each.keys]
                blocks, error = medium.load(job.slot, keys, memory)
        except Exception as failure:
            if not isinstance(failure, OSError):  # that is a fault of the disk
                record_swallowed(failure)
            self._fault.turn_off(self._named(job, job.slot, medium), failure)
            in_use = isinstance(failure, BufferStillInUse)
            for slot in due:
                self._upkeep.forget(slot)
            return [self._abandon(each, in_use) for each in jobs]
        text = ""
        for slot in due:
            if blocks[slot - job.slot].outcome is not Outcome.HIT:
                self._upkeep.forget(slot)
        if isinstance(error, NoRoom):
            text = self._log_no_room(medium, error)
        elif error is not None:
            place = next(i for i, end in enumerate(blocks) if end.outcome is Outcome.RETRY)
            self._fault.turn_off(self._named(job, job.slot + place, medium), error)
            text = self._fault.text
        seconds = self._clock() - start_s
        for place, end in enumerate(blocks):
            if end.corrupt:
                slot = job.slot + place
                log.warning("disk tier: slot %d in %s failed verification and was dropped", slot, medium.path)
        return completions_of(jobs, blocks, self._block_bytes, seconds, text)

    def _named(self, job: Job, slot: int, medium: DiskMedium) -> str:
        verb = "writing" if isinstance(job, StoreJob) else "reading"
        return f"{verb} slot {slot} in {medium.path}"

    def _log_no_room(self, medium: DiskMedium, error: NoRoom) -> str:
        """A store that has no room ends alone: blocks on the disk can be read, and be replaced by others."""
        text = f"disk tier: no room for more blocks in {medium.path}: {error.strerror}"
        if not self._no_room_logged:
            self._no_room_logged = True
            log.warning("%s; logged once", text)
        return text

    def _abandon(self, job: Job, still_in_use: bool = False) -> Completion:
        return abandoned(job, self._fault.text or "disk tier: closed before the transfer ended", still_in_use)

    def _watch(self) -> None:
        """Files that were removed still take writes: have somebody look, now and then, whether they are there."""
        now_s = self._clock()
        if self._fault.text or self._closed or now_s - self._watched_s < WATCH_PERIOD_S:
            return
        self._watched_s = now_s
        self._upkeep.look()

    def _check(self, slot: SlotIndex, count: int, buffers: Sequence[Buffer]) -> None:
        assert 0 < count <= self.run_blocks_max and 0 <= slot <= self.slot_count - count
        assert len(buffers) == self._shard_count, "one buffer per shard"
        for buffer in buffers:
            assert buffer.nbytes == count * self._slot_bytes, "whole slots, padding included"

"""A directory, its journal and its slabs as one store: synchronous, the same from any thread.

The order of writes is what makes a `kill -9` harmless: the slot's record is voided, then the bytes are written, then
the new record. The checksum, which every load verifies against key and namespace, makes a power loss harmless too:
in any order that the medium kept, bytes that do not match are a miss.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.clock import Clock
from kvbm.errors import TierError
from kvbm.layout import PAGE_BYTES, BlockLayout, Namespace
from kvbm.tiers.contract import RecoveredBlock
from kvbm.tiers.disk.block_io import BlockIo, Buffer
from kvbm.tiers.disk.directory import (
    JOURNAL_NAME,
    ClaimedDirectory,
    DirectoryMeta,
    claim_directory,
    describe,
    meta_bytes_bound,
)
from kvbm.tiers.disk.geometry import AS_PARAMETERS, RECORD_BYTES, DiskGeometry, DiskSetting, plan_geometry
from kvbm.tiers.disk.journal import BlockRecord, DamagedRecord, Journal
from kvbm.tiers.disk.room import Room, bound_unowned, require_space
from kvbm.tiers.disk.slabs import SlabFiles, slab_name
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.threads import StoreJob

log = logging.getLogger("kvbm.tiers.disk.tier")


class DiskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a disk tier; `open_disk_tier` explains each."""

    root: Path
    layout: BlockLayout
    namespace: Namespace
    capacity_bytes: int | None
    capacity_blocks: int | None
    o_direct: bool = True
    zerofill_fallback: bool = False
    persist: bool = True
    unowned_bytes: int | None = None
    setting: DiskSetting = AS_PARAMETERS


class LoadVerdict(msgspec.Struct, frozen=True):
    """How a load ended: HIT, with the block's recorded hash and group, or MISS. `corrupt`: its check failed."""

    outcome: Outcome
    corrupt: bool = False
    engine_hash: bytes = b""
    group: int = 0


_MISS = LoadVerdict(Outcome.MISS)
_CORRUPT = LoadVerdict(Outcome.MISS, corrupt=True)


def plan(options: DiskOptions) -> DiskGeometry:
    """The geometry that the options ask for. Raises SettingsError."""
    meta_bytes = meta_bytes_bound(options.namespace, options.layout)
    return plan_geometry(
        options.layout, options.capacity_bytes, options.capacity_blocks, meta_bytes, options.setting
    )


class DiskMedium:
    """An open directory. `load`, `store` and `void` may be called from several threads, for different slots.

    Two calls for one slot at the same time do no harm beyond a miss: the slot then fails verification.
    """

    def __init__(
        self,
        directory: ClaimedDirectory,
        journal_fd: int,
        journal: Journal,
        slabs: SlabFiles,
        room: Room,
        fingerprint: bytes,
        syscalls: Syscalls,
        io: BlockIo,
    ) -> None:
        self._directory = directory
        self._journal_fd = journal_fd
        self._journal = journal
        self._slabs = slabs
        self._room = room
        self._fingerprint = fingerprint
        self._syscalls = syscalls
        self._io = io
        self.path = directory.path

    @property
    def direct(self) -> bool:
        """True while transfers bypass the page cache."""
        return self._slabs.direct

    def store(self, job: StoreJob) -> None:
        """Make the slot hold this block. Raises OSError; the slot then holds nothing.

        NoRoom: its bytes would have to come from the part left to others; nothing was touched.
        """
        if not self._slabs.has_bytes(job.slot):
            self._room.require(self._slabs.block_bytes)
        checksum = self._io.checksum(self._fingerprint, job.key, job.sources)
        self._journal.void(job.slot)
        self._slabs.write(job.slot, job.sources)
        record = BlockRecord(
            slot=job.slot,
            key=job.key,
            parent=job.parent,
            checksum=checksum,
            length=sum(source.nbytes for source in job.sources),
            sequence=job.sequence,
            engine_hash=job.engine_hash,
            group=job.group,
        )
        self._journal.write(record)

    def load(self, key: BlockKey, slot: SlotIndex, targets: Sequence[Buffer]) -> LoadVerdict:
        """Fill the targets with the block and verify it; unless it is a HIT their contents mean nothing.

        A block that fails verification is voided. Raises OSError.
        """
        try:
            record = self._journal.read(slot)
        except DamagedRecord:
            self._journal.void(slot)
            return _CORRUPT
        if record is None or record.key != key:
            return _MISS
        try:
            self._slabs.read(slot, targets)
        except OSError as error:
            if error.errno == errno.EIO:
                # A sector that cannot be read stays so: without this, each return to service would end here again.
                self.try_void(slot)
            raise
        if self._io.checksum(self._fingerprint, key, targets) == record.checksum:
            return LoadVerdict(Outcome.HIT, engine_hash=record.engine_hash, group=record.group)
        if not self._journal_says(slot, record):
            return _MISS  # overwritten while we read it
        self._journal.void(slot)
        return _CORRUPT

    def void(self, slot: SlotIndex) -> None:
        """The slot holds nothing from now on. Raises OSError."""
        self._journal.void(slot)

    def try_void(self, slot: SlotIndex) -> bool:
        """`void` on a medium that may be failing; False when it could not be written."""
        try:
            self._journal.void(slot)
        except OSError:
            return False
        return True

    def recover(self) -> list[RecoveredBlock]:
        """The blocks that the journal holds; of two with one key the newer. Voids all other records. Raises OSError."""
        newest: dict[BlockKey, RecoveredBlock] = {}
        rejected: list[SlotIndex] = []
        damaged_count = 0
        for entry in self._journal.scan():
            if isinstance(entry, int):
                damaged_count += 1
                rejected.append(entry)
                continue
            self._slabs.note_bytes(entry.slot)
            found = RecoveredBlock(
                key=entry.key,
                slot=entry.slot,
                sequence=entry.sequence,
                parent=entry.parent,
                engine_hash=entry.engine_hash,
                group=entry.group,
            )
            rival = newest.get(entry.key)
            if rival is None or rival.sequence < found.sequence:
                newest[entry.key] = found
                if rival is not None:
                    rejected.append(rival.slot)
            else:
                rejected.append(found.slot)
        for slot in rejected:
            self._journal.void(slot)
        if damaged_count:
            log.warning("disk tier: dropped %d damaged journal record(s) in %s", damaged_count, self.path)
        return list(newest.values())

    def vanished(self) -> str:
        """Empty, or one line that names the files that were removed under us."""
        try:
            what = self._directory.vanished() or self._slabs.vanished()
            if not what and self._syscalls.fstat(self._journal_fd).st_nlink == 0:
                what = "journal was removed"
        except OSError as error:
            what = error.strerror or str(error)
        return f"{self.path}: {what}" if what else ""

    def close(self, remove: bool) -> None:
        """Close the files and give up the directory, with `remove` after deleting it. Never raises."""
        try:
            self._slabs.close()
            _touch(self._journal_fd, self._syscalls)
            self._syscalls.close(self._journal_fd)
        except OSError as error:
            log.warning("disk tier: closing %s: %s", self.path, error.strerror)
        self._directory.release(remove)

    def _journal_says(self, slot: SlotIndex, record: BlockRecord) -> bool:
        try:
            return self._journal.read(slot) == record
        except DamagedRecord:
            return True


def open_medium(
    options: DiskOptions,
    syscalls: Syscalls,
    io: BlockIo,
    clock: Clock,
    within_s: float | None = None,
    before: Path | None = None,
) -> DiskMedium:
    """Claim a directory, keep the blocks in it that may be kept, and make it as large as it should be.

    Raises SettingsError for a directory or a capacity that cannot be used, TierError when the medium fails, is too
    full, or is not ready after `within_s` seconds. A directory that was made here and cannot be used is removed, one
    that was found is not. The directory `before`, which this tier had, is preferred.
    """
    geometry = plan(options)
    deadline = None if within_s is None else clock() + within_s

    def within_time() -> None:
        if deadline is not None and clock() > deadline:
            raise TierError(f"disk tier: {options.root} was not ready within {within_s:g} s")

    meta = describe(options.namespace, options.layout, geometry, options.persist)
    directory = claim_directory(options.root, meta, syscalls, before, options.setting.root)
    found = directory.found
    kept = found is not None and found.same_blocks(meta)
    if found is not None and not kept:
        log.warning("disk tier: %s starts empty: %s", directory.path, found.difference(meta))
    tier_bytes = geometry.total_bytes(meta_bytes_bound(options.namespace, options.layout))
    bound_unowned(options.root, directory.path, tier_bytes, options.unowned_bytes, options.setting)
    try:
        return _open_files(directory, options, meta, kept, syscalls, io, within_time)
    except BaseException as error:
        directory.release(remove=directory.created)
        if isinstance(error, OSError):
            text = error.strerror or str(error)
            raise TierError(f"disk tier: cannot prepare {directory.path}: {text}") from error
        raise


def _open_files(
    directory: ClaimedDirectory,
    options: DiskOptions,
    meta: DirectoryMeta,
    kept: bool,
    syscalls: Syscalls,
    io: BlockIo,
    within_time: Callable[[], None],
) -> DiskMedium:
    geometry = meta.geometry
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    journal_fd = syscalls.open(JOURNAL_NAME, flags, dir_fd=directory.dir_fd)
    slabs = SlabFiles(syscalls, io, geometry, str(directory.path), options.o_direct)
    try:
        sparse = not (options.zerofill_fallback or _reserves(journal_fd, syscalls))
        _find_space(directory, options, geometry, syscalls, sparse)
        if not kept:
            # Voids every record before anything else: later steps may be interrupted, and other geometry or
            # another namespace must find nothing here.
            syscalls.ftruncate(journal_fd, 0)
        _trim(directory, geometry, journal_fd, syscalls)
        room = Room(syscalls, directory.path)
        try:
            syscalls.fallocate(journal_fd, 0, geometry.journal_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            syscalls.ftruncate(journal_fd, geometry.journal_bytes)
        require_room = _require_nothing if sparse else room.require
        slabs.open(directory.dir_fd, options.zerofill_fallback, within_time, require_room)
        if directory.found != meta:
            directory.write_meta(meta)
        _touch(journal_fd, syscalls)
    except BaseException:
        slabs.close()
        syscalls.close(journal_fd)
        raise
    fingerprint = options.namespace.fingerprint
    journal = Journal(syscalls, journal_fd, geometry.slot_count, geometry.block_bytes, fingerprint)
    return DiskMedium(directory, journal_fd, journal, slabs, room, fingerprint, syscalls, io)


def _reserves(journal_fd: int, syscalls: Syscalls) -> bool:
    """Whether the filesystem can reserve bytes; asked with the page that every journal has. Raises OSError."""
    try:
        syscalls.fallocate(journal_fd, 0, PAGE_BYTES)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if error.errno != errno.ENOSPC:
            raise
    return True


def _find_space(
    directory: ClaimedDirectory,
    options: DiskOptions,
    geometry: DiskGeometry,
    syscalls: Syscalls,
    sparse: bool,
) -> None:
    """Room for all slots, before anything is changed. Raises TierError and OSError as `require_space` does."""
    try:
        setting = options.setting
        field = setting.size if options.capacity_blocks is None else setting.blocks
        require_space(directory, options.root, geometry, syscalls, field)
    except TierError:
        # Sparse files need room for each block when it is stored, and `DiskMedium.store` asks for it then.
        # Blocks that are there already must be found also on a filesystem that others have filled.
        if not sparse:
            raise


def _require_nothing(size_bytes: int) -> None:
    """In place of `Room.require` where opening takes nothing."""


def _touch(journal_fd: int, syscalls: Syscalls) -> None:
    """Note the time of use: it decides how long the directory stays once it has no owner. Never raises."""
    try:
        syscalls.touch(journal_fd)
    except OSError:
        pass  # a medium that fails raises where it matters


def _trim(directory: ClaimedDirectory, geometry: DiskGeometry, journal_fd: int, syscalls: Syscalls) -> None:
    """Give back the space beyond the geometry. Records go before the bytes that they promise."""
    table_bytes = geometry.slot_count * RECORD_BYTES
    if syscalls.fstat(journal_fd).st_size > table_bytes:
        # To the record, not to the page: when the tier grows again, the rest of the page must read as void.
        syscalls.ftruncate(journal_fd, table_bytes)
    expected = {slab_name(slab): geometry.slab_bytes(slab) for slab in range(geometry.slab_count)}
    for name in os.listdir(directory.dir_fd):
        if not name.startswith("slab-"):
            continue
        if name not in expected:
            syscalls.unlink(name, dir_fd=directory.dir_fd)
        elif os.stat(name, dir_fd=directory.dir_fd, follow_symlinks=False).st_size > expected[name]:
            fd = syscalls.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory.dir_fd)
            try:
                syscalls.ftruncate(fd, expected[name])
            finally:
                syscalls.close(fd)

"""Opening a `DiskMedium`: the directory that it claims, the blocks that it keeps, and its size."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvbm.errors import TierError
from kvbm.layout import PAGE_BYTES
from kvbm.tiers.disk.block_io import BlockIo
from kvbm.tiers.disk.directory import JOURNAL_NAME, NEW_SUFFIX, ClaimedDirectory, claim_directory
from kvbm.tiers.disk.directory_meta import DirectoryMeta, describe, meta_bytes_bound
from kvbm.tiers.disk.facts_file import FACTS_NAME, FactsFile, fact_bytes
from kvbm.tiers.disk.geometry import RECORD_BYTES, DiskGeometry, plan_geometry
from kvbm.tiers.disk.journal import Journal, reserve
from kvbm.tiers.disk.medium import DiskMedium, DiskOptions, touch
from kvbm.tiers.disk.reset_marks import ResetMarks
from kvbm.tiers.disk.room import Room, bound_unowned, require_space
from kvbm.tiers.disk.slabs import SlabFiles, slab_name
from kvbm.tiers.disk.syscalls import Syscalls

log = logging.getLogger("kvbm.tiers.disk.tier")


def plan(options: DiskOptions) -> DiskGeometry:
    """The geometry that the options ask for. Raises SettingsError."""
    meta_bytes = meta_bytes_bound(options.namespace, options.layout)
    return plan_geometry(
        options.layout,
        options.capacity_bytes,
        options.capacity_blocks,
        meta_bytes,
        options.setting,
        fact_bytes(options.layout) if options.keeps_facts else 0,
    )


def open_medium(
    options: DiskOptions,
    syscalls: Syscalls,
    io: BlockIo,
    go_on: Callable[[], None],
    marks: ResetMarks,
    before: Path | None = None,
) -> DiskMedium:
    """Claim a directory, keep the blocks in it that may be kept, and make it as large as it should be.

    Raises SettingsError for a directory or a capacity that cannot be used, TierError when the medium fails or is too
    full, and whatever `go_on` raises, which is called between the steps of a slow preallocation. A directory that was
    made here and cannot be used is removed, one that was found is not. The directory `before`, which this tier had, is
    preferred.
    """
    geometry = plan(options)
    meta = describe(options.namespace, options.layout, geometry, options.persist)
    directory = claim_directory(options.root, meta, syscalls, before, options.setting.root)
    try:
        found, reset = directory.found, marks.newest()
        kept = found is not None and found.same_blocks(meta) and found.reset >= reset
        meta = msgspec.structs.replace(meta, reset=found.reset if found is not None and kept else reset)
        if found is not None and not kept:
            log.warning("disk tier: %s starts empty: %s", directory.path, found.difference(meta))
        tier_bytes = geometry.total_bytes(meta_bytes_bound(options.namespace, options.layout))
        bound_unowned(options.root, directory.path, tier_bytes, options.unowned_bytes, options.setting)
        return _open_files(directory, options, meta, kept, syscalls, io, go_on)
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
    go_on: Callable[[], None],
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
            syscalls.fdatasync(journal_fd)
        _trim(directory, geometry, journal_fd, syscalls)
        room = Room(syscalls, directory.path)
        reserve(syscalls, journal_fd, geometry.journal_bytes)
        require_room = _require_nothing if sparse else room.require
        slabs.open(directory.dir_fd, options.zerofill_fallback, go_on, require_room)
        if directory.found != meta:
            directory.write_meta(meta)  # from now on it does not hold what was reset
        touch(journal_fd, syscalls)
        fingerprint = options.namespace.fingerprint
        journal = Journal(syscalls, journal_fd, geometry.slot_count, geometry.block_bytes, fingerprint)
        facts = _open_facts(directory, options, kept, syscalls)
        return DiskMedium(directory, journal, slabs, room, fingerprint, syscalls, io, facts)
    except BaseException:
        slabs.close()
        syscalls.close(journal_fd)
        raise


def _open_facts(
    directory: ClaimedDirectory, options: DiskOptions, kept: bool, syscalls: Syscalls
) -> FactsFile | None:
    """The file of facts, where they are kept; else it is removed, as it would take room. The tier works without it."""
    try:
        if not options.keeps_facts:
            with contextlib.suppress(FileNotFoundError):  # there is none
                syscalls.unlink(FACTS_NAME, dir_fd=directory.dir_fd)
            return None
        fd = syscalls.open(FACTS_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, dir_fd=directory.dir_fd)
        try:
            size = plan(options).slot_count * fact_bytes(options.layout) if kept else 0
            if syscalls.fstat(fd).st_size > size:
                syscalls.ftruncate(fd, size)
        except BaseException:
            syscalls.close(fd)
            raise
    except OSError as error:
        log.warning("disk tier: what is said of blocks is not kept in %s: %s", directory.path, error.strerror)
        return None
    return FactsFile(syscalls, fd, fact_bytes(options.layout))


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


def _trim(directory: ClaimedDirectory, geometry: DiskGeometry, journal_fd: int, syscalls: Syscalls) -> None:
    """Give back the space beyond the geometry. Records go before the bytes that they promise."""
    table_bytes = geometry.slot_count * RECORD_BYTES
    if syscalls.fstat(journal_fd).st_size > table_bytes:
        # To the record, not to the page: when the tier grows again, the rest of the page must read as void.
        syscalls.ftruncate(journal_fd, table_bytes)
    expected = {slab_name(slab): geometry.slab_bytes(slab) for slab in range(geometry.slab_count)}
    for name in os.listdir(directory.dir_fd):
        if name.endswith(NEW_SUFFIX):
            syscalls.unlink(name, dir_fd=directory.dir_fd)  # its owner was killed before it took its place
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

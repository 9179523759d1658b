"""Looks at cache directories from outside: it writes nothing, and does not disturb the processes that own them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvbm.block import SlotIndex
from kvbm.layout import PAGE_BYTES
from kvbm.tiers.disk.block_io import Checksum, host_checksum
from kvbm.tiers.disk.directory import DIRECTORY_PREFIX, JOURNAL_NAME, is_locked, list_directories, owner_pid
from kvbm.tiers.disk.directory_meta import FORMAT_VERSION, META_NAME, DirectoryMeta, read_meta
from kvbm.tiers.disk.geometry import RECORD_BYTES, DiskGeometry
from kvbm.tiers.disk.journal import BlockRecord, DamagedRecord, Journal
from kvbm.tiers.disk.slabs import slab_name
from kvbm.tiers.disk.syscalls import Syscalls, read_fully

CORRUPT_SLOTS_SHOWN_MAX = 20


class DirectorySurvey(msgspec.Struct, frozen=True, kw_only=True):
    """One directory as it was when we looked. `readable` is False when a tier would start empty in it.

    `groups` are the groups of its blocks. `medium_bytes` is what it takes on the filesystem; `pid` is its owner's, as
    that process knows itself.
    """

    path: str
    namespace: str
    readable: bool
    model: str
    fields: dict[str, str]
    block_bytes: int
    slots_used: int
    slots_total: int
    groups: list[int]
    medium_bytes: int
    locked: bool
    pid: int | None


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of reading every resident block of a directory.

    `changed` blocks were overwritten by the owner while we read them and say nothing. `corrupt_slots` names the first
    few of `corrupt`; a journal record that cannot be believed counts as corrupt.
    """

    path: str
    readable: bool
    resident: int
    verified: int
    corrupt: int
    changed: int
    verified_bytes: int
    corrupt_slots: list[int]


def directories_at(path: Path) -> list[Path]:
    """The cache directories in `path`, or `path` alone when it is one."""
    return [path] if path.name.startswith(DIRECTORY_PREFIX) else list_directories(path)


def survey_directory(path: Path) -> DirectorySurvey:
    """Look at one directory. Raises OSError when it cannot be read at all."""
    from kvbm.tiers.disk.journal_scan import scan_journal  # needs numpy

    meta = _read_present_meta(path)
    locked = is_locked(path)
    medium_bytes = path.stat().st_blocks * 512
    for entry in path.iterdir():
        medium_bytes += entry.lstat().st_blocks * 512
    used = 0
    groups: set[int] = set()
    if meta is not None and (path / JOURNAL_NAME).exists():
        with _OpenDirectory(path, meta) as files:
            for whole, _ in scan_journal(files.journal):
                used += len(whole)
                groups.update(whole["group"].tolist())
    return DirectorySurvey(
        path=str(path),
        namespace=path.name.removeprefix(DIRECTORY_PREFIX).rpartition("-")[0],
        readable=meta is not None,
        model=meta.namespace.model if meta else "",
        fields=dict(meta.namespace.fields) if meta else {},
        block_bytes=meta.block_bytes if meta else 0,
        slots_used=used,
        slots_total=meta.slot_count if meta else 0,
        groups=sorted(groups),
        medium_bytes=medium_bytes,
        locked=locked,
        pid=owner_pid(path) if locked else None,
    )


def verify_directory(
    path: Path, on_block: Callable[[int, int], None] = lambda done, total: None
) -> VerifyReport:
    """Read every resident block and compare its checksum; `on_block(done, total)` is called after each.

    Raises OSError when the journal or the directory cannot be read.
    """
    from kvbm.tiers.disk.journal_scan import scan_journal  # needs numpy

    meta = _read_present_meta(path)
    checksum = host_checksum(meta.namespace) if meta is not None else None
    if meta is None or checksum is None:
        return VerifyReport(
            path=str(path),
            readable=False,
            resident=0,
            verified=0,
            corrupt=0,
            changed=0,
            verified_bytes=0,
            corrupt_slots=[],
        )
    corrupt_slots: list[int] = []
    verified = changed = 0
    with _OpenDirectory(path, meta) as files:
        slots = list[int]()
        for whole, damaged in scan_journal(files.journal):
            slots += whole["slot"].tolist()
            corrupt_slots += damaged.tolist()
        total = len(slots) + len(corrupt_slots)
        buffer = memoryview(mmap.mmap(-1, meta.block_bytes))
        for done, slot in enumerate(slots, start=total - len(slots) + 1):
            record = files.record(slot)
            if record is None:
                changed += 1
            elif files.holds(record, buffer, checksum):
                verified += 1
            elif files.record(slot) == record:
                corrupt_slots.append(slot)
            else:
                changed += 1
            on_block(done, total)
    return VerifyReport(
        path=str(path),
        readable=True,
        resident=total,
        verified=verified,
        corrupt=len(corrupt_slots),
        changed=changed,
        verified_bytes=verified * meta.block_bytes,
        corrupt_slots=corrupt_slots[:CORRUPT_SLOTS_SHOWN_MAX],
    )


def _read_present_meta(path: Path) -> DirectoryMeta | None:
    """The directory's meta; None also for one of another format, whose records mean nothing here."""
    meta = read_meta(path / META_NAME)
    return meta if meta is not None and meta.format == FORMAT_VERSION else None


class _OpenDirectory:
    """A directory's journal and slabs, open for reading through the page cache, which is left as it was found."""

    def __init__(self, path: Path, meta: DirectoryMeta) -> None:
        self._path = path
        self._geometry: DiskGeometry = meta.geometry
        self._fingerprint = meta.namespace.fingerprint
        self._syscalls = Syscalls()
        self._slab_fds: dict[int, int] = {}
        flags = os.O_RDONLY | os.O_NOFOLLOW
        self._journal_fd = self._syscalls.open(str(path / JOURNAL_NAME), flags)
        self.journal = Journal(
            self._syscalls,
            self._journal_fd,
            min(meta.slot_count, os.fstat(self._journal_fd).st_size // RECORD_BYTES),
            meta.block_bytes,
            self._fingerprint,
        )

    def __enter__(self) -> _OpenDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._journal_fd, *self._slab_fds.values()):
            os.close(fd)

    def holds(self, record: BlockRecord, buffer: memoryview, checksum: Checksum) -> bool:
        """True when the slot's bytes are the record's."""
        slab, offset = self._geometry.locate(record.slot)
        try:
            fd = self._slab(slab)
            read_fully(self._syscalls, fd, [buffer], offset, PAGE_BYTES)
            os.posix_fadvise(fd, offset, len(buffer), os.POSIX_FADV_DONTNEED)
        except OSError:
            return False
        return checksum(self._fingerprint, record.key, [buffer]) == record.checksum

    def record(self, slot: int) -> BlockRecord | None:
        """What the journal says now of a slot; None where that is nothing, or not whole."""
        try:
            return self.journal.read(SlotIndex(slot))
        except DamagedRecord:
            return None

    def _slab(self, slab: int) -> int:
        if slab not in self._slab_fds:
            path = str(self._path / slab_name(slab))
            self._slab_fds[slab] = self._syscalls.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        return self._slab_fds[slab]

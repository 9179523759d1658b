"""A directory, its journal and its slabs as one store: synchronous, the same from any thread.

The order of writes is what makes a `kill -9` harmless: the slot's record is voided, then the bytes are written, then
the new record. The checksum, which every load verifies against key and namespace, makes a power loss harmless too:
in any order that the medium kept, bytes that do not match are a miss. A run goes the same way in as many writes as one
block: all its records are voided before its first byte is written, and written after its last.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.layout import PAGE_BYTES, BlockLayout, Namespace
from kvbm.tiers.contract import BlockEnd, BlockHead
from kvbm.tiers.disk.block_io import BlockIo, BufferStillInUse, RunBuffers
from kvbm.tiers.disk.directory import JOURNAL_NAME, NEW_SUFFIX, ClaimedDirectory
from kvbm.tiers.disk.facts_file import FactsFile
from kvbm.tiers.disk.geometry import AS_PARAMETERS, RECORD_BYTES, DiskSetting
from kvbm.tiers.disk.journal import Journal, is_void
from kvbm.tiers.disk.room import NoRoom, Room
from kvbm.tiers.disk.slabs import SlabFiles
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.voids import stretches_of

if TYPE_CHECKING:
    from kvbm.tiers.recovered import RecoveredBlocks

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
    keeps_facts: bool = False
    notes_dir: Path | None = None


class RunEnd(NamedTuple):
    """How each block of a run ended, and the error of the blocks that ended as RETRY."""

    blocks: list[BlockEnd]
    error: OSError | None = None


_MISS = BlockEnd(Outcome.MISS)
_CORRUPT = BlockEnd(Outcome.MISS, corrupt=True)
_RETRY = BlockEnd(Outcome.RETRY)
_STORED = BlockEnd(Outcome.HIT)


class DiskMedium:
    """An open directory. `load`, `store` and `void` may be called from several threads, for different slots.

    Two calls for one slot at the same time do no harm beyond a miss: the slot then fails verification.
    """

    def __init__(
        self,
        directory: ClaimedDirectory,
        journal: Journal,
        slabs: SlabFiles,
        room: Room,
        fingerprint: bytes,
        syscalls: Syscalls,
        io: BlockIo,
        facts: FactsFile | None = None,
    ) -> None:
        self._facts = facts
        self._directory = directory
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

    def store(
        self, slot: SlotIndex, blocks: Sequence[BlockHead], sequence: int, memory: RunBuffers
    ) -> RunEnd:
        """Make the slots from `slot` on hold these blocks. Raises OSError; the slots then hold nothing.

        A block whose bytes would have to come from the part left to others ends as RETRY, with NoRoom, and its slot is
        not touched.
        """
        if lacking := self._slabs.lacking(slot, len(blocks)):
            try:
                self._room.require(lacking * self._slabs.block_bytes)
            except NoRoom as error:
                if len(blocks) == 1:
                    return RunEnd([_RETRY], error)
                return self._store_what_fits(slot, blocks, sequence, memory)
        checksum, fingerprint = self._io.checksum, self._fingerprint
        checksums = [
            checksum(fingerprint, block.key, part) for block, part in zip(blocks, memory.blocks, strict=True)
        ]
        self._journal.void(slot, len(blocks))
        for first, end in self._slabs.pieces(slot, range(len(blocks))):
            self._slabs.write(SlotIndex(slot + first), memory.part(first, end).whole)
        self._journal.write_run(slot, blocks, checksums, sequence)
        if self._facts is not None:
            with contextlib.suppress(OSError):  # it costs events, not blocks
                self._facts.write(slot, blocks)
        return RunEnd([_STORED] * len(blocks))

    def _store_what_fits(
        self, slot: SlotIndex, blocks: Sequence[BlockHead], sequence: int, memory: RunBuffers
    ) -> RunEnd:
        """Block by block, because not all of them have room."""
        ends, error = list[BlockEnd](), None
        for i in range(len(blocks)):
            stored = self.store(SlotIndex(slot + i), blocks[i : i + 1], sequence + i, memory.part(i, i + 1))
            ends += stored.blocks
            error = stored.error or error
        return RunEnd(ends, error)

    def load(self, slot: SlotIndex, keys: Sequence[BlockKey], memory: RunBuffers) -> RunEnd:
        """Fill the memory with the blocks of these keys from the slots from `slot` on, and verify each.

        Unless a block is a HIT, the contents of its memory mean nothing. A block that fails verification is voided,
        and so is one that cannot be read (EIO). The latter and those after it end as RETRY. Raises OSError for other
        failures.
        """
        raw = self._journal.read_raw(slot, len(keys))
        held = self._journal.held(raw, slot)
        ends = [_MISS] * len(keys)
        wanted: list[int] = []
        for place, (key, block) in enumerate(zip(keys, held, strict=True)):
            if block is None:
                if not is_void(raw[place * RECORD_BYTES : (place + 1) * RECORD_BYTES]):
                    self._journal.void(slot + place)
                    ends[place] = _CORRUPT
            elif block.key == key:
                wanted.append(place)
        done, error = self._read(slot, wanted, memory) if wanted else (0, None)
        checksum, fingerprint = self._io.checksum, self._fingerprint
        for place in wanted[:done]:
            block = held[place]
            assert block is not None
            _, expected, engine_hash, group = block
            if checksum(fingerprint, keys[place], memory.blocks[place]) == expected:
                ends[place] = BlockEnd(Outcome.HIT, False, engine_hash, group)
            else:
                ends[place] = self._judge(
                    slot + place, raw[place * RECORD_BYTES : (place + 1) * RECORD_BYTES]
                )
        for place in wanted[done:]:
            ends[place] = _RETRY
        if self._facts is not None:
            facts = self.facts(slot, keys)
            ends = [
                end._replace(facts=said) if end.outcome is Outcome.HIT else end
                for end, said in zip(ends, facts, strict=True)
            ]
        return RunEnd(ends, error)

    def facts(self, slot: int, keys: Sequence[BlockKey]) -> list[bytes]:
        """What was said of the blocks with these keys in the slots from `slot` on; empty where nothing is known."""
        if self._facts is not None:
            with contextlib.suppress(OSError):  # it costs events, not blocks
                return self._facts.read(slot, keys)
        return [b""] * len(keys)

    def _read(self, slot: SlotIndex, wanted: Sequence[int], memory: RunBuffers) -> tuple[int, OSError | None]:
        """Read the blocks at the places in `wanted`; how many of the first ones came, and why not all."""
        done = 0
        for first, end in self._slabs.pieces(slot, wanted):
            try:
                self._slabs.read(SlotIndex(slot + first), memory.part(first, end).whole)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                # A sector that cannot be read stays so: without this, each return to service would end here again.
                if isinstance(error, BufferStillInUse):
                    # Its memory cannot be read into again to find out which block it was.
                    self._try_void(*self._struck(slot + first, end - first, error))
                    raise
                if end - first == 1:
                    self._try_void(slot + first)
                    return done, error
                read, failed = self._read_one_by_one(slot, first, end, memory)
                done += read
                if failed is not None:
                    return done, failed
            else:
                done += end - first
        return done, None

    def _read_one_by_one(
        self, slot: SlotIndex, first: int, end: int, memory: RunBuffers
    ) -> tuple[int, OSError | None]:
        """As `_read`, after an EIO, up to the block that cannot be read: only that one is lost."""
        for place in range(first, end):
            try:
                self._slabs.read(SlotIndex(slot + place), memory.blocks[place])
            except OSError as error:
                if error.errno == errno.EIO:
                    self._try_void(slot + place)
                if isinstance(error, BufferStillInUse):
                    raise
                return place - first, error
        return end - first, None

    def _struck(self, slot: int, count: int, error: BufferStillInUse) -> tuple[int, int]:
        """Of these slots, those whose buffer failed: the first one, and how many."""
        if not error.buffer_bytes:
            return slot, count
        size = self._slabs.block_bytes
        end = -(-(error.moved_bytes + error.buffer_bytes) // size)
        return slot + error.moved_bytes // size, end - error.moved_bytes // size

    def _judge(self, slot: int, record: bytes) -> BlockEnd:
        """The bytes did not match this record: they were overwritten while we read them, or they are corrupt."""
        now = self._journal.read_raw(slot, 1)
        if now != record and (is_void(now) or self._journal.held(now, slot) != [None]):
            return _MISS
        self._journal.void(slot)
        return _CORRUPT

    def void(self, slot: SlotIndex, count: int = 1) -> None:
        """These slots hold nothing from now on. Raises OSError."""
        self._journal.void(slot, count)

    def sync(self) -> None:
        """Make the journal durable. Raises OSError."""
        self._syscalls.fdatasync(self._journal.fd)

    def note_reset(self, number: int) -> None:
        """The blocks of this reset are not here any more, and that is durable (see `reset_marks`). Raises OSError."""
        meta = self._directory.meta
        if meta is not None and meta.reset < number:
            self._directory.write_meta(msgspec.structs.replace(meta, reset=number))

    def _try_void(self, slot: int, count: int = 1) -> None:
        """`void` on a medium that may be failing."""
        with contextlib.suppress(OSError):  # the slot is voided when it fails again
            self._journal.void(slot, count)

    def recover(self) -> RecoveredBlocks:
        """The blocks that the journal holds, the oldest first; of two with one key the newer. Voids all other records.

        Where pages of the journal cannot be read, their records are lost, and the others move to a new file. Raises
        OSError.
        """
        import numpy as np  # takes long to load, as what needs it does

        from kvbm.tiers.disk.journal_scan import scan_journal
        from kvbm.tiers.recovered import RECOVERED, recovered_rows

        rows, count = np.empty(self._journal.slot_count, RECOVERED), 0
        damaged = list[int]()
        for whole, broken in scan_journal(self._journal):
            rows[count : count + len(whole)] = whole
            count += len(whole)
            damaged += broken.tolist()
        rows = rows[:count]
        self._slabs.note_found(rows["slot"])
        found, outdated = recovered_rows(rows)
        if pages := self._journal.unreadable_pages:
            self._move_journal()
            log.warning(
                "disk tier: %d page(s) of the journal in %s could not be read, and with them up to %d block(s); the "
                "others are kept. look at the SMART values of this disk",
                pages,
                self.path,
                pages * PAGE_BYTES // RECORD_BYTES,
            )
        for stretch in stretches_of([*damaged, *outdated.tolist()]):
            self._journal.void(stretch.start, len(stretch))
        if damaged:
            log.warning("disk tier: dropped %d damaged journal record(s) in %s", len(damaged), self.path)
        return found

    def _move_journal(self) -> None:
        """Put a copy in the journal's place, on other pages of the medium. Raises OSError."""
        dir_fd, worn_fd, name = self._directory.dir_fd, self._journal.fd, JOURNAL_NAME + NEW_SUFFIX
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        fd = self._syscalls.open(name, flags, dir_fd=dir_fd)
        try:
            self._journal.move(fd)
            self._syscalls.rename(name, JOURNAL_NAME, dir_fd=dir_fd)
        except BaseException:
            self._journal.fd = worn_fd
            self._syscalls.close(fd)
            raise
        self._syscalls.close(worn_fd)

    def vanished(self) -> str:
        """Empty, or one line that names the files that were removed under us."""
        try:
            what = self._directory.vanished() or self._slabs.vanished()
            if not what and self._syscalls.fstat(self._journal.fd).st_nlink == 0:
                what = "journal was removed"
        except OSError as error:
            what = error.strerror or str(error)
        return f"{self.path}: {what}" if what else ""

    def close(self, remove: bool) -> None:
        """Close the files and give up the directory, with `remove` after deleting it. Never raises."""
        try:
            self._slabs.close()
            touch(self._journal.fd, self._syscalls)
            self._syscalls.close(self._journal.fd)
            if self._facts is not None:
                self._syscalls.close(self._facts.fd)
        except OSError as error:
            log.warning("disk tier: closing %s: %s", self.path, error.strerror)
        self._directory.release(remove)


def touch(journal_fd: int, syscalls: Syscalls) -> None:
    """Note the time of use: it decides how long the directory stays once it has no owner. Never raises."""
    try:
        syscalls.touch(journal_fd)
    except OSError:
        pass  # a medium that fails raises where it matters

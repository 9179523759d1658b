"""The journal of the disk tier: a fixed table with one checksummed record per slot, updated in place.

Record, 256 bytes, little-endian, at byte `256 * slot`:

====== ===== ==========================================================================
offset bytes
====== ===== ==========================================================================
0      4     magic "KVBR"
4      2     record version, 2
6      1     state: 2 = resident (`BlockState.RESIDENT`)
7      1     flags: bit 0 = the block has a parent
8      8     sequence: grows with every store, higher is newer
16     32    block key
48     32    parent key, or zeros
80     16    checksum of the bytes (`BlockIo.checksum`)
96     8     length of the bytes
104    8     slot, so that a record that lands in the wrong place is not believed
112    8     first 8 bytes of the namespace's fingerprint
120    32    the engine's own hash of the block, or zeros: not known
152    2     group: which kind of layers in a model that has several; 0 otherwise
154    98    zero, for later
252    4     crc32 of bytes 0 to 251
====== ===== ==========================================================================

256 zero bytes are the void record: the slot holds nothing. Anything else that does not decode is *damaged* and
counts as void. The order of writes is `DiskMedium`'s: void, then bytes, then record. The records of consecutive slots
are read and written in one call; a call that ends half-way leaves some of them as they were, and at most one torn.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from kvbm.block import GROUP_MAX, KEY_BYTES, BlockKey, BlockState, SlotIndex
from kvbm.layout import PAGE_BYTES, round_up
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.disk.geometry import RECORD_BYTES
from kvbm.tiers.disk.syscalls import Syscalls, read_fully, write_fully

_RECORD = struct.Struct("<4sHBBQ32s32s16sQQ8s32sH98x")
_CRC = struct.Struct("<I")
_HELD = struct.Struct("<7sx8x32s32x16sQQ8s32sH98xI")
"""The same record with its crc, as a load needs it: magic, version and state are one field; flags, sequence and
parent are left out."""
MAGIC = b"KVBR"
VERSION = 2
HAS_PARENT = 1
_VOID = bytes(RECORD_BYTES)
_SCAN_BYTES = 1 << 20
_NO_HASH = bytes(KEY_BYTES)
CHECKSUM_BYTES = 16

assert _RECORD.size + _CRC.size == _HELD.size == RECORD_BYTES
_RESIDENT = struct.pack("<4sHB", MAGIC, VERSION, BlockState.RESIDENT)


class DamagedRecord(Exception):
    """A record that is neither void nor whole: torn, flipped, misplaced, or another namespace's."""


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The journal's record of one resident block. `checksum` is of its `length` bytes (see `BlockIo`);
    `engine_hash` is empty where it is not known."""

    slot: SlotIndex
    key: BlockKey
    parent: BlockKey | None
    checksum: bytes
    length: int
    sequence: int
    engine_hash: bytes = b""
    group: int = 0


def is_void(raw: bytes) -> bool:
    """Whether this record says that its slot holds nothing."""
    return raw == _VOID


class HeldBlock(NamedTuple):
    """What a load needs of a whole record: as `BlockRecord`."""

    key: bytes
    checksum: bytes
    engine_hash: bytes
    group: int


def block_checksum(fingerprint: bytes, key: BlockKey, buffers: Sequence[memoryview]) -> bytes:
    """16 bytes: xxh3_128 over fingerprint, key, and the block's bytes in order.

    Because key and namespace go into it, right bytes in the wrong place fail as surely as flipped ones.
    """
    assert len(key) == KEY_BYTES
    digest = xxhash.xxh3_128(fingerprint + key)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def encode_record(record: BlockRecord, fingerprint: bytes) -> bytes:
    """The record's 256 bytes."""
    head = BlockHead(record.key, record.parent, record.engine_hash, record.group)
    return _pack(record.slot, head, record.checksum, record.length, record.sequence, fingerprint)


def _pack(
    slot: int, block: BlockHead, checksum: bytes, length: int, sequence: int, fingerprint: bytes
) -> bytes:
    key, parent, engine_hash, group, _ = block
    assert len(key) == KEY_BYTES and len(checksum) == CHECKSUM_BYTES
    assert len(engine_hash) in (0, KEY_BYTES) and 0 <= group <= GROUP_MAX
    body = _RECORD.pack(
        MAGIC,
        VERSION,
        BlockState.RESIDENT,
        0 if parent is None else HAS_PARENT,
        sequence,
        key,
        parent or _NO_HASH,
        checksum,
        length,
        slot,
        fingerprint[:8],
        engine_hash or _NO_HASH,
        group,
    )
    return body + _CRC.pack(zlib.crc32(body))


def decode_record(raw: bytes, slot: SlotIndex, length: int, fingerprint: bytes) -> BlockRecord | None:
    """The record, or None for a void one. Raises DamagedRecord for everything else.

    `slot`, `length` and `fingerprint` are what the record must say of itself.
    """
    if raw == _VOID:
        return None
    if len(raw) != RECORD_BYTES or _CRC.unpack_from(raw, _RECORD.size)[0] != zlib.crc32(raw[: _RECORD.size]):
        raise DamagedRecord(f"the record of slot {slot} is torn")
    fields = _RECORD.unpack_from(raw)
    magic, version, state, flags, sequence, key, parent, checksum, size, place, prefix = fields[:11]
    engine_hash, group = fields[11:]
    found = (magic, version, state, size, place, prefix)
    if found != (MAGIC, VERSION, BlockState.RESIDENT, length, slot, fingerprint[:8]):
        raise DamagedRecord(f"the record of slot {slot} belongs elsewhere")
    return BlockRecord(
        slot=slot,
        key=BlockKey(key),
        parent=BlockKey(parent) if flags & HAS_PARENT else None,
        checksum=checksum,
        length=size,
        sequence=sequence,
        engine_hash=b"" if engine_hash == _NO_HASH else engine_hash,
        group=group,
    )


class Journal:
    """The table in its file. It keeps nothing in memory: the file is the only truth.

    Reads and writes go through the page cache, which a killed process does not take with it. After a power loss the
    table may be older than the bytes or newer; the checksums make either a miss.
    """

    def __init__(
        self, syscalls: Syscalls, fd: int, slot_count: int, block_bytes: int, fingerprint: bytes
    ) -> None:
        self._syscalls = syscalls
        self.fd = fd
        self.unreadable_pages = 0
        """Pages that the last call of `parts` could not read."""
        self.slot_count = slot_count
        self.block_bytes = block_bytes
        self.fingerprint = fingerprint

    def read(self, slot: SlotIndex) -> BlockRecord | None:
        """The slot's record, None when void. Raises DamagedRecord, OSError."""
        return decode_record(self.read_raw(slot, 1), slot, self.block_bytes, self.fingerprint)

    def read_raw(self, slot: int, count: int) -> bytes:
        """The records of `count` slots from `slot` on, as they are in the file. Raises OSError."""
        assert 0 <= slot and slot + count <= self.slot_count
        raw = bytearray(count * RECORD_BYTES)
        read_fully(self._syscalls, self.fd, [memoryview(raw)], slot * RECORD_BYTES, RECORD_BYTES)
        return bytes(raw)

    def held(self, raw: bytes, slot: int) -> list[HeldBlock | None]:
        """The blocks of `read_raw(slot, ...)`: of each record that is neither void nor damaged, what a load needs."""
        length, prefix = self.block_bytes, self.fingerprint[:8]
        found: list[HeldBlock | None] = []
        start = 0
        # One step of Python for each of many small blocks: no objects but the result.
        for state, key, checksum, size, place, origin, engine_hash, group, crc in _HELD.iter_unpack(raw):
            if (
                state == _RESIDENT
                and crc == zlib.crc32(raw[start : start + _RECORD.size])
                and place == slot
                and size == length
                and origin == prefix
            ):
                name = b"" if engine_hash == _NO_HASH else engine_hash
                found.append(HeldBlock(key, checksum, name, group))
            else:
                found.append(None)
            start += RECORD_BYTES
            slot += 1
        return found

    def write(self, record: BlockRecord) -> None:
        """Replace the slot's record. Raises OSError."""
        self._put(record.slot, encode_record(record, self.fingerprint))

    def write_run(
        self, slot: int, blocks: Sequence[BlockHead], checksums: Sequence[bytes], sequence: int
    ) -> None:
        """Replace the records of consecutive slots in one write; `sequence` is the first one's. Raises OSError."""
        length, fingerprint = self.block_bytes, self.fingerprint
        records = [
            _pack(slot + i, block, checksums[i], length, sequence + i, fingerprint)
            for i, block in enumerate(blocks)
        ]
        self._put(slot, b"".join(records))

    def void(self, slot: int, count: int = 1) -> None:
        """These slots hold nothing from now on; one write. Raises OSError."""
        self._put(slot, _VOID * count)

    def parts(self) -> Iterator[tuple[int, int, bytearray | None]]:
        """The whole table in parts: the first slot of each, how many slots, and their records, or None for a page that
        cannot be read; one sequential read. Raises OSError, also where more than one page and most of them cannot
        be read: that is no page that has worn out, and the records may come back."""
        self.unreadable_pages = 0
        for start, chunk in self._chunks():
            first = start // RECORD_BYTES
            if chunk is None:
                self.unreadable_pages += 1
                if self.unreadable_pages > max(1, self.slot_count * RECORD_BYTES // PAGE_BYTES // 2):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                yield first, min(PAGE_BYTES // RECORD_BYTES, self.slot_count - first), None
            else:
                yield first, len(chunk) // RECORD_BYTES, chunk

    def move(self, fd: int) -> None:
        """Copy all that can be read into this empty file, which is the journal from now on. Raises OSError."""
        reserve(self._syscalls, fd, round_up(self.slot_count * RECORD_BYTES, PAGE_BYTES))
        for start, chunk in self._chunks():
            if chunk is not None and chunk.count(0) < len(chunk):
                write_fully(self._syscalls, fd, [memoryview(chunk)], start, RECORD_BYTES)
        self.fd = fd

    def _chunks(self) -> Iterator[tuple[int, bytearray | None]]:
        """The table in parts: the first byte and the bytes of each, None for a page that cannot be read. Raises
        OSError."""
        table_bytes = self.slot_count * RECORD_BYTES
        for start in range(0, table_bytes, _SCAN_BYTES):
            chunk = bytearray(min(_SCAN_BYTES, table_bytes - start))
            if self._reads(start, chunk):
                yield start, chunk
                continue
            for offset in range(0, len(chunk), PAGE_BYTES):
                page = chunk[offset : offset + PAGE_BYTES]
                yield start + offset, page if self._reads(start + offset, page) else None

    def _reads(self, start: int, target: bytearray) -> bool:
        """Whether this part of the table can be read, into the target. Raises OSError for other failures than EIO."""
        try:
            read_fully(self._syscalls, self.fd, [memoryview(target)], start, RECORD_BYTES)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        return True

    def _put(self, slot: int, raw: bytes) -> None:
        assert 0 <= slot and slot * RECORD_BYTES + len(raw) <= self.slot_count * RECORD_BYTES
        write_fully(self._syscalls, self.fd, [memoryview(raw)], slot * RECORD_BYTES, RECORD_BYTES)


def reserve(syscalls: Syscalls, fd: int, size_bytes: int) -> None:
    """Make the journal's file so long, with its bytes reserved where the filesystem can do that. Raises OSError."""
    try:
        syscalls.fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        syscalls.ftruncate(fd, size_bytes)

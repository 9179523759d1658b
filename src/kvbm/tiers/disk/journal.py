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
counts as void. The order of writes is `DiskMedium`'s: void, then bytes, then record.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

from kvbm.block import GROUP_MAX, KEY_BYTES, BlockKey, BlockState, SlotIndex
from kvbm.tiers.disk.geometry import RECORD_BYTES
from kvbm.tiers.disk.syscalls import Syscalls, read_fully, write_fully

_RECORD = struct.Struct("<4sHBBQ32s32s16sQQ8s32sH98x")
_CRC = struct.Struct("<I")
_MAGIC = b"KVBR"
_VERSION = 2
_HAS_PARENT = 1
_VOID = bytes(RECORD_BYTES)
_SCAN_BYTES = 1 << 20
_NO_HASH = bytes(KEY_BYTES)
CHECKSUM_BYTES = 16

assert _RECORD.size + _CRC.size == RECORD_BYTES


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
    assert len(record.key) == KEY_BYTES and len(record.checksum) == CHECKSUM_BYTES
    assert len(record.engine_hash) in (0, KEY_BYTES) and 0 <= record.group <= GROUP_MAX
    body = _RECORD.pack(
        _MAGIC,
        _VERSION,
        BlockState.RESIDENT,
        0 if record.parent is None else _HAS_PARENT,
        record.sequence,
        record.key,
        record.parent or bytes(KEY_BYTES),
        record.checksum,
        record.length,
        record.slot,
        fingerprint[:8],
        record.engine_hash or _NO_HASH,
        record.group,
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
    if found != (_MAGIC, _VERSION, BlockState.RESIDENT, length, slot, fingerprint[:8]):
        raise DamagedRecord(f"the record of slot {slot} belongs elsewhere")
    return BlockRecord(
        slot=slot,
        key=BlockKey(key),
        parent=BlockKey(parent) if flags & _HAS_PARENT else None,
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
        self._fd = fd
        self._slot_count = slot_count
        self._block_bytes = block_bytes
        self._fingerprint = fingerprint

    def read(self, slot: SlotIndex) -> BlockRecord | None:
        """The slot's record, None when void. Raises DamagedRecord, OSError."""
        assert 0 <= slot < self._slot_count
        raw = bytearray(RECORD_BYTES)
        read_fully(self._syscalls, self._fd, [memoryview(raw)], slot * RECORD_BYTES, RECORD_BYTES)
        return decode_record(bytes(raw), slot, self._block_bytes, self._fingerprint)

    def write(self, record: BlockRecord) -> None:
        """Replace the slot's record. Raises OSError."""
        self._put(record.slot, encode_record(record, self._fingerprint))

    def void(self, slot: SlotIndex) -> None:
        """The slot holds nothing from now on. Raises OSError."""
        self._put(slot, _VOID)

    def scan(self) -> Iterator[BlockRecord | SlotIndex]:
        """Every resident slot's record and, of every damaged record, the slot; one sequential read. Raises OSError."""
        table_bytes = self._slot_count * RECORD_BYTES
        for start in range(0, table_bytes, _SCAN_BYTES):
            chunk = bytearray(min(_SCAN_BYTES, table_bytes - start))
            read_fully(self._syscalls, self._fd, [memoryview(chunk)], start, RECORD_BYTES)
            if chunk.count(0) == len(chunk):
                continue
            for offset in range(0, len(chunk), RECORD_BYTES):
                slot = SlotIndex((start + offset) // RECORD_BYTES)
                raw = bytes(chunk[offset : offset + RECORD_BYTES])
                try:
                    record = decode_record(raw, slot, self._block_bytes, self._fingerprint)
                except DamagedRecord:
                    yield slot
                else:
                    if record is not None:
                        yield record

    def _put(self, slot: SlotIndex, raw: bytes) -> None:
        assert 0 <= slot < self._slot_count
        write_fully(self._syscalls, self._fd, [memoryview(raw)], slot * RECORD_BYTES, RECORD_BYTES)

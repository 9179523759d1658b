"""A pack: consecutive blocks of a chain in one blob, a record each (see `records`), and an index at its end.

The index is, little-endian: the first 8 bytes of each block's key; n + 1 offsets of 8 bytes, where each record begins
and where the last one ends; then the trailer, 32 bytes:

====== ===== ==========================================================================
offset bytes
====== ===== ==========================================================================
0      4     magic "KVBX"
4      2     version of the format, 1
6      2     flags: bit 0 = the blocks are a tail
8      4     blocks
12     4     zero
16     16    xxh3_128 of the blob's name, all of the index before, and the trailer up to here
====== ===== ==========================================================================

A pack's name follows from what is in it (`pack_name`), so that two nodes that pack the same blocks write the same name.
Their *bytes* may differ: one may know other facts. Who finds that a pack exists already must read its index, and not
believe the one that it would have written.

Earlier versions also wrote compressed records. A pack with one is not read, and is collected when it is old.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from operator import sub
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from blake3 import blake3

from kvbm.block import KEY_BYTES, BlockKey, Outcome
from kvbm.layout import BlockLayout
from kvbm.tiers.contract import BlockEnd, BlockHead
from kvbm.tiers.remote.blobs import Buffer
from kvbm.tiers.remote.records import (
    CHECKSUM_BYTES,
    FACTS_MAX,
    HEADER_BYTES,
    NO_CODEC,
    Record,
    checksum,
    decode_header,
    encode_header,
)
from kvbm.tiers.remote.sealing import Seal, Unopened

PACK_PREFIX = "packs/"
INDEX_GUESS_BYTES = 4096
"""Ask for so many last bytes first: the index of 253 blocks fits."""
BLOCKS_MAX = 1 << 16
"""No pack has more blocks."""

PRINT_BYTES = 8
"""Of a block's key, in an index: enough to find it, and its record says the rest."""

_TRAILER = struct.Struct("<4sHHI4x")
_TRAILER_BYTES = _TRAILER.size + CHECKSUM_BYTES
_OFFSET_BYTES = 8
_MAGIC = b"KVBX"
_VERSION = 1
_TAIL = 1

_ELSEWHERE = BlockEnd(Outcome.MISS)
"""A good record perhaps, but not one that may be used here."""
_CORRUPT = BlockEnd(Outcome.MISS, corrupt=True)


class PackEntry(msgspec.Struct, frozen=True):
    """What is known of a pack: hearsay, until a record of it was verified.

    `prints`: the first 8 bytes of each block's key, joined. Record i is the bytes from `offsets[i]` to before
    `offsets[i + 1]` of the blob, and the index begins at the last offset. `size`: bytes of the blob.
    """

    name: str
    prints: bytes
    offsets: tuple[int, ...]
    size: int
    tail: bool

    @property
    def blocks(self) -> int:
        """How many blocks are in it."""
        return len(self.offsets) - 1

    def has_compressed(self, block_bytes: int) -> bool:
        """Whether a record is too short for a block of so many bytes that is not compressed."""
        shortest: int = min(map(sub, self.offsets[1:], self.offsets))
        return shortest < HEADER_BYTES + block_bytes

    def span(self, first: int, end: int) -> tuple[int, int, list[int]]:
        """Of the records from `first` to before `end`: where in the blob they begin and end, and their offsets from
        there on, as `unpack` takes them."""
        start = self.offsets[first]
        return start, self.offsets[end], [offset - start for offset in self.offsets[first : end + 1]]


class Packed(NamedTuple):
    """A pack that is ready to be written. The parts, joined, are the blob; `entry` is true once *these* are written."""

    entry: PackEntry
    parts: list[Buffer]


def pack_name(fingerprint: bytes, keys: Sequence[BlockKey], tail: bool = False, sealed_by: str = "") -> str:
    """The name of a pack of these blocks: `packs/<2 hex>/<40 hex>`.

    `sealed_by` (`Seal.key_id`) is part of it: what one tenant sealed must not keep another from storing the same.
    """
    digest = blake3(b"kvbm pack 1\0T" if tail else b"kvbm pack 1\0-", key=fingerprint)
    digest.update(sealed_by.encode("ascii") + b"\0")
    for key in keys:
        digest.update(key)
    text = digest.hexdigest()[:40]
    return f"{PACK_PREFIX}{text[:2]}/{text}"


def pack(
    layout: BlockLayout,
    fingerprint: bytes,
    blocks: Sequence[BlockHead],
    sources: Sequence[Sequence[memoryview]],
    *,
    tail: bool = False,
    seal: Seal | None = None,
    tenant: str | None = None,
) -> Packed:
    """A pack of these blocks, whose bytes are `sources`: one buffer per shard, of `layout.slot_bytes` each.

    The bytes are not copied, unless they are sealed, and must not change until the pack is written. `seal` needs a
    `tenant`. Facts above 4 KiB are left out.
    """
    assert 0 < len(blocks) <= BLOCKS_MAX
    assert seal is None or tenant is not None, "a seal is for a tenant"
    parts: list[Buffer] = []
    offsets = [0]
    for head, buffers in zip(blocks, sources, strict=True):
        assert _fits(layout, buffers)
        if len(head.facts) > FACTS_MAX:
            head = head._replace(facts=b"")
        record = Record(
            head,
            fingerprint,
            layout.shard_bytes,
            layout.shard_count,
            layout.block_bytes,
            layout.block_bytes,
            len(head.facts),
            checksum(fingerprint, head.key, buffers),
        )
        stored: Sequence[Buffer] = buffers
        if seal is not None and tenant is not None:
            record, stored = _sealed(record, stored, seal, tenant)
        parts.append(encode_header(record))
        parts += stored
        offsets.append(offsets[-1] + record.size)
    keys = [head.key for head in blocks]
    sealed_by = seal.key_id(tenant) if seal is not None and tenant is not None else ""
    name = pack_name(fingerprint, keys, tail, sealed_by)
    prints = b"".join(key[:PRINT_BYTES] for key in keys)
    index = _index(name, prints, offsets, tail)
    parts.append(index)
    return Packed(PackEntry(name, prints, tuple(offsets), offsets[-1] + len(index), tail), parts)


def _sealed(
    record: Record, stored: Sequence[Buffer], seal: Seal, tenant: str
) -> tuple[Record, Sequence[Buffer]]:
    inner = (record.checksum + record.head.facts, *stored)
    record = record._replace(sealed_by=seal.key_id(tenant), checksum=bytes(CHECKSUM_BYTES))
    parts = seal.seal(tenant, inner, record.bound())
    return record._replace(stored_bytes=sum(memoryview(part).nbytes for part in parts)), parts


def _index(name: str, prints: bytes, offsets: Sequence[int], tail: bool) -> bytes:
    body = prints + struct.pack(f"<{len(offsets)}Q", *offsets)
    body += _TRAILER.pack(_MAGIC, _VERSION, _TAIL if tail else 0, len(offsets) - 1)
    return body + _index_sum(name, body)


def _index_sum(name: str, body: bytes) -> bytes:
    return xxhash.xxh3_128(name.encode("utf-8", "surrogatepass") + b"\0" + body).digest()


def entry_of(name: str, end: Buffer, size: int) -> PackEntry | int | None:
    """The entry of the blob of this name and size, from its last bytes.

    An int: so many last bytes are needed. None: this is no pack of ours (foreign, torn, or another one's copy).
    """
    tail = bytes(end)
    if len(tail) > size or size < _TRAILER_BYTES:
        return None
    if len(tail) < _TRAILER_BYTES:
        return min(size, INDEX_GUESS_BYTES)
    magic, version, flags, count = _TRAILER.unpack_from(tail, len(tail) - _TRAILER_BYTES)
    if (magic, version) != (_MAGIC, _VERSION) or flags & ~_TAIL or not 0 < count <= BLOCKS_MAX:
        return None
    length: int = count * PRINT_BYTES + (count + 1) * _OFFSET_BYTES + _TRAILER_BYTES
    if length + count * HEADER_BYTES > size:
        return None
    if length > len(tail):
        return length
    body, found = tail[-length:-CHECKSUM_BYTES], tail[-CHECKSUM_BYTES:]
    if _index_sum(name, body) != found:
        return None
    prints = body[: count * PRINT_BYTES]
    offsets: tuple[int, ...] = struct.unpack_from(f"<{count + 1}Q", body, len(prints))
    if (
        offsets[0] != 0
        or offsets[-1] + length != size
        or any(b - a < HEADER_BYTES for a, b in pairwise(offsets))
    ):
        return None
    return PackEntry(name, prints, offsets, size, bool(flags & _TAIL))


def unpack(
    layout: BlockLayout,
    fingerprint: bytes,
    keys: Sequence[BlockKey],
    records: Buffer,
    targets: Sequence[Sequence[memoryview]],
    *,
    offsets: Sequence[int] | None = None,
    unseal: Seal | None = None,
    tenant: str | None = None,
) -> list[BlockEnd]:
    """Bring the blocks of these records, which lie one after the other in `records`, into their targets.

    Each block ends for itself. HIT: its targets hold the verified bytes of that key. MISS, else: with `corrupt` where
    no whole record is found or its bytes do not verify; without where the record is a good one of another key,
    namespace or layout, compressed, or not sealed with a key that is there for `tenant`. With `unseal` a
    record that is not sealed is such a MISS too: anybody could have written it. Targets of a MISS may hold anything.

    `offsets`, n + 1 numbers from the begin of `records` on, say where each record lies (`PackEntry.span`). Without,
    nothing is found behind a record whose header is damaged.
    """
    assert len(fingerprint) == KEY_BYTES and (offsets is None or len(offsets) == len(keys) + 1)
    data = memoryview(records).cast("B")
    ends: list[BlockEnd] = []
    start = 0
    for number, (key, buffers) in enumerate(zip(keys, targets, strict=True)):
        assert _fits(layout, buffers)
        if offsets is None:
            piece = data[start:]
        else:
            piece = data[max(0, offsets[number]) : max(0, offsets[number + 1])]
        record = decode_header(piece)
        start += piece.nbytes if record is None else record.size
        if record is None or record.size > piece.nbytes:
            ends.append(_CORRUPT)
        elif not _is_of(record, layout, fingerprint, key):
            ends.append(_ELSEWHERE)
        else:
            ends.append(_unpacked(record, piece, buffers, unseal, tenant))
    return ends


def _is_of(record: Record, layout: BlockLayout, fingerprint: bytes, key: BlockKey) -> bool:
    found = (record.head.key, record.fingerprint, record.shard_bytes, record.shard_count, record.raw_bytes)
    return found == (key, fingerprint, layout.shard_bytes, layout.shard_count, layout.block_bytes)


def _unpacked(
    record: Record, piece: memoryview, targets: Sequence[memoryview], unseal: Seal | None, tenant: str | None
) -> BlockEnd:
    if record.codec != NO_CODEC or bool(record.sealed_by) != (unseal is not None):
        return _ELSEWHERE
    stored = piece[record.stored_from : record.size]
    wanted, head = record.checksum, record.head
    if unseal is not None:
        if tenant is None:
            return _ELSEWHERE
        opened = unseal.open(tenant, record.sealed_by, stored, record.bound())
        if isinstance(opened, Unopened):
            return _ELSEWHERE if opened is Unopened.NO_KEY else _CORRUPT
        inner = memoryview(opened)
        raw_from = CHECKSUM_BYTES + record.facts_bytes
        if inner.nbytes < raw_from:
            return _CORRUPT
        wanted = bytes(inner[:CHECKSUM_BYTES])
        head = head._replace(facts=bytes(inner[CHECKSUM_BYTES:raw_from]))
        stored = inner[raw_from:]
    # The checksum is of what lies in the targets: nothing can come between.
    if not _fill(targets, stored) or checksum(record.fingerprint, head.key, targets) != wanted:
        return _CORRUPT
    return BlockEnd(Outcome.HIT, False, head.engine_hash, head.group, head.facts)


def _fill(targets: Sequence[memoryview], stored: memoryview) -> bool:
    """Copy the stored bytes into the targets. False where they are not as many."""
    if stored.nbytes != sum(target.nbytes for target in targets):
        return False
    start = 0
    for target in targets:
        # Not a slice assignment: that would hold up every other thread for as long as it takes.
        piece = np.frombuffer(stored[start : start + target.nbytes], np.uint8)
        np.copyto(np.frombuffer(target, np.uint8), piece)
        start += target.nbytes
    return True


def _fits(layout: BlockLayout, buffers: Sequence[memoryview]) -> bool:
    return len(buffers) == layout.shard_count and all(one.nbytes == layout.slot_bytes for one in buffers)

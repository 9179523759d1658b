"""The record of one block in a pack: it says all that is needed to read and verify the block, without an index.

Header, 256 bytes, little-endian:

====== ===== ==========================================================================
offset bytes
====== ===== ==========================================================================
0      4     magic "KVBP"
4      2     record version, 1
6      1     flags: bit 0 = the block has a parent, bit 1 = it has an engine's hash, bit 2 = sealed
7      1     zero
8      2     group
10     2     length of the facts
12     4     zero
16     32    block key
48     32    parent key, or zeros
80     32    the engine's own hash of the block, or zeros
112    32    fingerprint of the namespace
144    8     raw length: the bytes of the block
152    8     stored length
160    8     bytes of a shard, without padding
168    8     shards
176    16    checksum of the raw bytes; zeros in a sealed record, which has it inside
192    16    reserved: "none", padded with zeros. Anything else: the block is compressed, and not read here
208    32    what it is sealed with, padded with zeros
240    16    xxh3_128 of bytes 0 to 239 and, where nothing is sealed, the facts
====== ===== ==========================================================================

Then come the facts (`BlockHead.facts`) and the stored bytes. In a sealed record the stored bytes are the sealed form of
checksum, facts and raw bytes: facts hold tokens, and a checksum of the plain bytes would confirm a guess.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvbm.block import GROUP_MAX, KEY_BYTES, BlockKey
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.remote.blobs import Buffer

HEADER_BYTES = 256
CHECKSUM_BYTES = 16
FACTS_MAX = 4096
"""Longer facts are not kept."""
CODEC_NAME_MAX = 16
NO_CODEC = "none"
SEALED_BY_MAX = 32

_HEADER = struct.Struct("<4sHBxHH4x32s32s32s32sQQQQ16s16s32s")
_MAGIC = b"KVBP"
_VERSION = 1
_HAS_PARENT, _HAS_HASH, _SEALED = 1, 2, 4
_FLAGS = _HAS_PARENT | _HAS_HASH | _SEALED
_NONE = bytes(KEY_BYTES)
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)

assert _HEADER.size + CHECKSUM_BYTES == HEADER_BYTES


class Record(NamedTuple):
    """What a record says of its block.

    Of a sealed record `facts` in `head` are empty (`facts_bytes` tells how long they are), `checksum` is zeros, and
    `stored_bytes` counts all that is sealed. `sealed_by` is empty where nothing is.
    """

    head: BlockHead
    fingerprint: bytes
    shard_bytes: int
    shard_count: int
    raw_bytes: int
    stored_bytes: int
    facts_bytes: int
    checksum: bytes = _NO_CHECKSUM
    sealed_by: str = ""
    codec: str = NO_CODEC

    @property
    def stored_from(self) -> int:
        """Where the stored bytes begin, from the begin of the record on."""
        return HEADER_BYTES if self.sealed_by else HEADER_BYTES + self.facts_bytes

    @property
    def size(self) -> int:
        """The bytes of the whole record."""
        return self.stored_from + self.stored_bytes

    def bound(self) -> bytes:
        """What a seal vouches for beside the sealed bytes: all of the header that is known before sealing."""
        return _body(self._replace(stored_bytes=0, checksum=_NO_CHECKSUM))


def checksum(fingerprint: bytes, key: BlockKey, buffers: Sequence[Buffer]) -> bytes:
    """16 bytes: xxh3_128 over fingerprint, key, and the block's raw bytes in order. Part of the format."""
    digest = xxhash.xxh3_128(fingerprint + key)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def encode_header(record: Record) -> bytes:
    """The header, and the facts behind it where nothing is sealed."""
    body = _body(record)
    facts = b"" if record.sealed_by else record.head.facts
    return body + xxhash.xxh3_128(body + facts).digest() + facts


def _body(record: Record) -> bytes:
    key, parent, engine_hash, group, _ = record.head
    codec, sealed_by = record.codec.encode("ascii"), record.sealed_by.encode("ascii")
    assert len(key) == len(record.fingerprint) == KEY_BYTES and len(parent or key) == KEY_BYTES
    assert len(engine_hash) in (0, KEY_BYTES) and 0 <= group <= GROUP_MAX
    assert 0 < len(codec) <= CODEC_NAME_MAX and len(sealed_by) <= SEALED_BY_MAX
    return _HEADER.pack(
        _MAGIC,
        _VERSION,
        (_HAS_PARENT if parent is not None else 0)
        | (_HAS_HASH if engine_hash else 0)
        | (_SEALED if sealed_by else 0),
        group,
        record.facts_bytes,
        key,
        parent or _NONE,
        engine_hash or _NONE,
        record.fingerprint,
        record.raw_bytes,
        record.stored_bytes,
        record.shard_bytes,
        record.shard_count,
        record.checksum,
        codec,
        sealed_by,
    )


def decode_header(data: memoryview) -> Record | None:
    """The record that begins with these bytes; None where they are none, or do not reach to the end of its facts.

    Nothing but the header and the facts is verified. Never raises for what the bytes are.
    """
    if data.nbytes < HEADER_BYTES:
        return None
    magic, version, flags, group, facts_bytes, *fields = _HEADER.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION) or flags & ~_FLAGS or facts_bytes > FACTS_MAX:
        return None
    key, parent, engine_hash, fingerprint, raw, stored, shard_bytes, shard_count, digest, codec, sealed_by = (
        fields
    )
    facts = b"" if flags & _SEALED else bytes(data[HEADER_BYTES : HEADER_BYTES + facts_bytes])
    if len(facts) != (0 if flags & _SEALED else facts_bytes):
        return None
    if xxhash.xxh3_128(bytes(data[: _HEADER.size]) + facts).digest() != data[_HEADER.size : HEADER_BYTES]:
        return None
    codec, sealed_by = codec.rstrip(b"\0"), sealed_by.rstrip(b"\0")
    if not (codec.isascii() and sealed_by.isascii()) or bool(sealed_by) != bool(flags & _SEALED):
        return None
    head = BlockHead(
        BlockKey(key),
        BlockKey(parent) if flags & _HAS_PARENT else None,
        engine_hash if flags & _HAS_HASH else b"",
        group,
        facts,
    )
    return Record(
        head,
        fingerprint,
        shard_bytes,
        shard_count,
        raw,
        stored,
        facts_bytes,
        digest,
        sealed_by.decode(),
        codec.decode(),
    )

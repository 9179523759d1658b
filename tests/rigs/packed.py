"""Blocks, packs of them, and what became of them, for tests of the pack format."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from kvbm.block import BlockKey, Outcome
from kvbm.layout import BlockLayout
from kvbm.testing.stored_runs import make_key
from kvbm.tiers.contract import BlockEnd, BlockHead
from kvbm.tiers.remote import packs
from kvbm.tiers.remote.packs import PackEntry, pack, unpack
from kvbm.tiers.remote.records import HEADER_BYTES, decode_header, encode_header
from kvbm.tiers.remote.sealing import MasterKey, Seal, Sealer

FINGERPRINT = bytes(range(32))
TENANT = "ann"


class Blocks(NamedTuple):
    """Some blocks of a layout and their bytes, one per shard."""

    layout: BlockLayout
    heads: list[BlockHead]
    sources: list[list[memoryview]]

    @property
    def keys(self) -> list[BlockKey]:
        return [head.key for head in self.heads]


class Blob(NamedTuple):
    """A pack as it lies in a store."""

    entry: PackEntry
    data: bytes

    def record(self, number: int) -> bytes:
        """One record's bytes."""
        return self.data[self.entry.offsets[number] : self.entry.offsets[number + 1]]

    @property
    def records(self) -> bytes:
        """All records, without the index."""
        return self.data[: self.entry.offsets[-1]]


def some_blocks(count: int, seed: int = 0, layout: BlockLayout | None = None) -> Blocks:
    """Blocks of a chain, with other groups, facts and hashes each."""
    layout = layout or BlockLayout(block_tokens=16, shard_bytes=4000)
    draw = random.Random(seed)
    keys = [make_key(seed * 1000 + number) for number in range(count)]
    heads = [
        BlockHead(
            key,
            keys[number - 1] if number else None,
            draw.randbytes(32) if number % 2 else b"",
            number,
            draw.randbytes(7 * number),
        )
        for number, key in enumerate(keys)
    ]

    def slot() -> memoryview:
        return memoryview(draw.randbytes(64) * (layout.slot_bytes // 64))

    return Blocks(layout, heads, [[slot() for _ in range(layout.shard_count)] for _ in heads])


def sealer(*ids: str, random_bytes: Callable[[int], bytes] | None = None) -> Sealer:
    """A sealer with master keys of these ids; the secret follows from the id."""
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    keys = [MasterKey(each, (each.encode() * 32)[:32]) for each in ids or ("one",)]
    return Sealer(keys, random_bytes) if random_bytes else Sealer(keys)


def blob(
    blocks: Blocks,
    seal: Seal | None = None,
    tenant: str = TENANT,
    fingerprint: bytes = FINGERPRINT,
) -> Blob:
    """The blocks, packed, as one piece."""
    packed = pack(blocks.layout, fingerprint, blocks.heads, blocks.sources, seal=seal, tenant=tenant)
    return Blob(packed.entry, b"".join(packed.parts))


def compressed_blob(blocks: Blocks, fingerprint: bytes = FINGERPRINT) -> Blob:
    """The blocks as a version that compressed would have packed them: each record names a codec and is short."""
    plain = blob(blocks, fingerprint=fingerprint)
    body, offsets = b"", [0]
    for number in range(len(blocks.heads)):
        record = decode_header(memoryview(plain.record(number)))
        assert record is not None
        code = zlib.compress(plain.record(number)[record.stored_from :])
        assert HEADER_BYTES + len(record.head.facts) + len(code) < blocks.layout.block_bytes
        body += encode_header(record._replace(codec="zstd-2", stored_bytes=len(code))) + code
        offsets.append(len(body))
    index = packs._index(plain.entry.name, plain.entry.prints, offsets, tail=False)
    entry = PackEntry(plain.entry.name, plain.entry.prints, tuple(offsets), len(body + index), False)
    return Blob(entry, body + index)


def read(
    blocks: Blocks,
    records: bytes,
    offsets: Sequence[int] | None = None,
    unseal: Seal | None = None,
    tenant: str | None = TENANT,
    fingerprint: bytes = FINGERPRINT,
) -> list[BlockEnd]:
    """Unpack these blocks from `records`. Asserts that every HIT brought the block's own bytes, facts and hash."""
    size = blocks.layout.slot_bytes
    targets = [[memoryview(bytearray(size)) for _ in each] for each in blocks.sources]
    ends = unpack(
        blocks.layout,
        fingerprint,
        blocks.keys,
        records,
        targets,
        offsets=offsets,
        unseal=unseal,
        tenant=tenant,
    )
    assert len(ends) == len(blocks.heads)
    for end, head, source, target in zip(ends, blocks.heads, blocks.sources, targets, strict=True):
        if end.outcome is Outcome.HIT:
            assert target == source, "a HIT with other bytes"
            assert (end.engine_hash, end.group, end.facts) == (head.engine_hash, head.group, head.facts)
            assert not end.corrupt
        else:
            assert end.outcome is Outcome.MISS
            assert end == BlockEnd(Outcome.MISS, corrupt=end.corrupt)
    return ends


def marks(ends: Sequence[BlockEnd]) -> str:
    """One letter per block: H(it), C(orrupt) or m(iss)."""
    return "".join("H" if end.outcome is Outcome.HIT else "C" if end.corrupt else "m" for end in ends)


def flipped(data: bytes, bit: int) -> bytes:
    """The same bytes but for one bit."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)

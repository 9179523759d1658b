"""Packs: what was packed comes back, and nothing else does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.block import GROUP_MAX, BlockKey
from kvbm.layout import BlockLayout
from kvbm.testing.stored_runs import make_key
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.remote import packs
from kvbm.tiers.remote.packs import INDEX_GUESS_BYTES, PackEntry, entry_of, pack, pack_name, unpack
from kvbm.tiers.remote.records import FACTS_MAX, HEADER_BYTES, decode_header, encode_header
from kvbm.tiers.remote.sealing import Seal
from rigs.packed import (
    FINGERPRINT,
    Blob,
    Blocks,
    blob,
    compressed_blob,
    flipped,
    marks,
    read,
    sealer,
    some_blocks,
)
from rigs.property_tests import scale_examples


@dataclasses.dataclass
class Way:
    """How blocks are packed."""

    seal: Seal | None

    def blob(self, blocks: Blocks) -> Blob:
        return blob(blocks, self.seal)

    def read(self, blocks: Blocks, records: bytes, offsets: tuple[int, ...] | None = None) -> str:
        return marks(read(blocks, records, offsets, self.seal))


@pytest.fixture(scope="module", params=["plain", "sealed"])
def way(request: pytest.FixtureRequest) -> Way:
    return Way(sealer() if request.param == "sealed" else None)


layouts = st.builds(
    BlockLayout,
    block_tokens=st.integers(1, 64),
    shard_bytes=st.integers(1, 3 * 4096),
    shard_count=st.integers(1, 3),
)


@st.composite
def many_blocks(draw: Callable[..., object]) -> Blocks:
    layout = draw(layouts)
    assert isinstance(layout, BlockLayout)
    hashes = st.binary(min_size=32, max_size=32)
    heads = draw(
        st.lists(
            st.builds(
                BlockHead,
                hashes.map(BlockKey),
                st.none() | hashes.map(BlockKey),
                st.just(b"") | hashes,
                st.integers(0, GROUP_MAX),
                st.binary(max_size=200) | st.just(b"f" * FACTS_MAX),
            ),
            min_size=1,
            max_size=4,
        )
    )
    assert isinstance(heads, list)
    seed = draw(st.integers(0, 2**32))
    assert isinstance(seed, int)
    return Blocks(layout, heads, some_blocks(len(heads), seed, layout).sources)


@given(many_blocks())
@settings(max_examples=scale_examples(40))
def test_what_was_packed_comes_back(way: Way, blocks: Blocks) -> None:
    packed = way.blob(blocks)
    everything = "H" * len(blocks.heads)
    assert way.read(blocks, packed.records) == everything
    assert way.read(blocks, packed.data, packed.entry.offsets) == everything
    assert entry_of(packed.entry.name, packed.data, len(packed.data)) == packed.entry
    assert packed.entry.prints == b"".join(key[:8] for key in blocks.keys)


@given(many_blocks(), st.data())
@settings(max_examples=scale_examples(40))
def test_some_records_of_a_pack_are_read_alone(way: Way, blocks: Blocks, data: st.DataObject) -> None:
    packed = way.blob(blocks)
    first = data.draw(st.integers(0, len(blocks.heads) - 1))
    end = data.draw(st.integers(first + 1, len(blocks.heads)))
    start, stop, offsets = packed.entry.span(first, end)
    part = Blocks(blocks.layout, blocks.heads[first:end], blocks.sources[first:end])
    assert way.read(part, packed.data[start:stop], tuple(offsets)) == "H" * (end - first)


def test_every_flipped_bit_of_a_record_costs_that_block_alone(way: Way) -> None:
    blocks = some_blocks(2)
    packed = way.blob(blocks)
    offsets = packed.entry.offsets
    # Every bit of the second header and its facts; then one of each byte.
    bits = [
        bit
        for bit in range(offsets[1] * 8, offsets[2] * 8)
        if bit < (offsets[1] + HEADER_BYTES + 7) * 8 or bit % 8 == bit // 8 % 8
    ]
    assert {way.read(blocks, flipped(packed.records, bit), offsets) for bit in bits} == {"HC"}


@given(st.data())
@settings(max_examples=scale_examples(150))
def test_damage_anywhere_is_never_a_hit_with_other_bytes(way: Way, data: st.DataObject) -> None:
    blocks = some_blocks(3)
    packed = way.blob(blocks)
    records = bytearray(packed.records)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(records) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=300))
        records[at : at + len(piece)] = piece[: len(records) - at]
    cut = data.draw(st.integers(0, len(records)))
    for offsets in (None, packed.entry.offsets):
        way.read(blocks, bytes(records[:cut]), offsets)  # asserts it


def test_a_cut_pack_has_the_whole_records_before_the_cut(way: Way) -> None:
    blocks = some_blocks(3)
    packed = way.blob(blocks)
    offsets = packed.entry.offsets
    for cut in (
        0,
        1,
        HEADER_BYTES - 1,
        HEADER_BYTES,
        *(offset + by for offset in offsets[1:] for by in (-1, 0, 1)),
    ):
        whole = sum(offset <= cut for offset in offsets[1:])
        expected = "H" * whole + "C" * (3 - whole)
        assert way.read(blocks, packed.records[:cut]) == expected, cut
        assert way.read(blocks, packed.records[:cut], offsets) == expected, cut


def test_behind_a_damaged_header_only_offsets_find_records() -> None:
    blocks = some_blocks(3)
    packed = blob(blocks)
    damaged = flipped(packed.records, packed.entry.offsets[1] * 8 + 70)
    assert marks(read(blocks, damaged)) == "HCC"
    assert marks(read(blocks, damaged, packed.entry.offsets)) == "HCH"
    in_the_bytes = flipped(packed.records, packed.entry.offsets[2] * 8 - 1)
    assert marks(read(blocks, in_the_bytes)) == "HCH"


def test_records_of_two_packs_can_be_mixed_and_stay_their_own(way: Way) -> None:
    ours, theirs = some_blocks(3, seed=1), some_blocks(3, seed=2)
    first, second = way.blob(ours), way.blob(theirs)
    mixed = first.record(0) + second.record(1) + first.record(2)
    assert way.read(ours, mixed) == "HmH"
    assert way.read(theirs, mixed) == "mHm"
    assert way.read(ours, first.record(1) + first.record(0) + first.record(2)) == "mmH"


def test_a_header_before_another_blocks_bytes_is_corrupt(way: Way) -> None:
    ours, theirs = some_blocks(1, seed=1), some_blocks(1, seed=2)
    mine, other = way.blob(ours).record(0), way.blob(theirs).record(0)
    assert way.read(ours, mine[:HEADER_BYTES] + other[HEADER_BYTES:]) == "C"


def test_another_namespace_key_or_layout_is_a_plain_miss(way: Way) -> None:
    layout = BlockLayout(block_tokens=16, shard_bytes=8192, shard_count=1)
    blocks = some_blocks(1, layout=layout)
    records = way.blob(blocks).records
    assert marks(read(blocks, records, unseal=way.seal, fingerprint=bytes(32))) == "m"
    other_key = blocks._replace(heads=[blocks.heads[0]._replace(key=make_key(77))])
    assert way.read(other_key, records) == "m"
    for changes in ({"shard_count": 2}, {"shard_bytes": 8191}, {"shard_bytes": 4096, "shard_count": 2}):
        other = some_blocks(1, layout=msgspec.structs.replace(layout, **changes))
        assert way.read(other, records) == "m", changes


def test_a_record_that_was_moved_to_another_key_is_corrupt() -> None:
    """Its header was made anew, as only somebody who forges would."""
    ours, theirs = some_blocks(1, seed=1), some_blocks(1, seed=2)
    data = blob(theirs).record(0)
    record = decode_header(memoryview(data))
    assert record is not None
    moved = encode_header(record._replace(head=ours.heads[0])) + data[record.stored_from :]
    assert marks(read(ours, moved)) == "C"


def test_lengths_that_a_header_claims_are_not_believed() -> None:
    blocks = some_blocks(1)
    data = blob(blocks).record(0)
    record = decode_header(memoryview(data))
    assert record is not None
    for stored_bytes, expected in ((0, "C"), (4095, "C"), (4097, "C"), (2**64 - 1, "C"), (4096, "H")):
        claimed = encode_header(record._replace(stored_bytes=stored_bytes)) + data[record.stored_from :]
        assert marks(read(blocks, claimed)) == expected, stored_bytes
    for raw_bytes in (0, 4095, 2**64 - 1):
        claimed = encode_header(record._replace(raw_bytes=raw_bytes)) + data[record.stored_from :]
        assert marks(read(blocks, claimed)) == "m", raw_bytes


def test_a_compressed_record_is_a_plain_miss() -> None:
    blocks = some_blocks(3)
    packed = compressed_blob(blocks)
    assert marks(read(blocks, packed.records)) == "mmm"
    data = blob(blocks).record(0)
    record = decode_header(memoryview(data))
    assert record is not None
    as_long = encode_header(record._replace(codec="from-tomorrow")) + data[record.stored_from :]
    assert marks(read(blocks._replace(heads=blocks.heads[:1], sources=blocks.sources[:1]), as_long)) == "m"


def test_an_index_shows_that_a_record_is_compressed(way: Way) -> None:
    blocks = some_blocks(3)
    packed, block_bytes = compressed_blob(blocks), blocks.layout.block_bytes
    assert entry_of(packed.entry.name, packed.data, len(packed.data)) == packed.entry
    assert packed.entry.has_compressed(block_bytes)
    assert not way.blob(blocks).entry.has_compressed(block_bytes)


def test_bytes_of_a_plain_block_are_not_copied() -> None:
    blocks = some_blocks(3, layout=BlockLayout(block_tokens=16, shard_bytes=4096, shard_count=2))
    parts = pack(blocks.layout, FINGERPRINT, blocks.heads, blocks.sources).parts
    given_views = {id(view) for source in blocks.sources for view in source}
    assert given_views <= {id(part) for part in parts}
    rest = sum(memoryview(part).nbytes for part in parts if id(part) not in given_views)
    assert rest < 2000


def test_facts_that_are_too_long_are_left_out() -> None:
    blocks = some_blocks(1)
    long = blocks._replace(heads=[blocks.heads[0]._replace(facts=b"f" * (FACTS_MAX + 1))])
    kept = blob(long)
    assert marks(read(blocks._replace(heads=[blocks.heads[0]._replace(facts=b"")]), kept.records)) == "H"


# The index.


def test_every_flipped_bit_of_the_index_is_found(way: Way) -> None:
    packed = way.blob(some_blocks(3))
    size = len(packed.data)
    for bit in range(packed.entry.offsets[-1] * 8, size * 8):
        damaged = flipped(packed.data, bit)
        assert entry_of(packed.entry.name, damaged, size) is None, bit


def test_the_end_of_a_pack_says_how_much_more_of_it_is_needed() -> None:
    packed = blob(some_blocks(3))
    name, data, size = packed.entry.name, packed.data, len(packed.data)
    index_bytes = size - packed.entry.offsets[-1]
    for length in range(1, index_bytes):
        needed = entry_of(name, data[-length:], size)
        assert isinstance(needed, int) and length < needed <= size
        assert entry_of(name, data[-needed:], size) == packed.entry
    for length in (index_bytes, INDEX_GUESS_BYTES, size):
        assert entry_of(name, data[-length:], size) == packed.entry


def test_what_is_no_pack_of_this_name_and_size_is_none() -> None:
    packed = blob(some_blocks(3))
    data, size = packed.data, len(packed.data)
    assert entry_of(packed.entry.name + "0", data, size) is None
    assert entry_of(packed.entry.name, data, size + 1) is None
    assert entry_of(packed.entry.name, data, size - 1) is None
    assert entry_of(packed.entry.name, data[:-1], size - 1) is None
    assert entry_of("packs/\udcff", data, size) is None
    assert entry_of(packed.entry.name, b"", 0) is None
    assert entry_of(packed.entry.name, bytes(100), 100) is None


@pytest.mark.parametrize(
    ("offsets", "good"),
    [
        ((0, 300, 700), True),
        ((1, 300, 700), False),
        ((0, 100, 700), False),
        ((0, 700, 300), False),
        ((0, 300, 699), False),
        ((0, 300, 2**64 - 1), False),
    ],
)
def test_offsets_where_no_records_can_lie_are_no_pack(offsets: tuple[int, ...], good: bool) -> None:
    """Also where somebody made the index's checksum anew."""
    data = bytes(700) + packs._index("packs/aa/x", bytes(16), offsets, tail=False)
    assert isinstance(entry_of("packs/aa/x", data, len(data)), PackEntry) == good


@given(st.binary(max_size=400), st.integers(0, 1000))
def test_foreign_bytes_are_no_pack_and_no_record(data: bytes, more: int) -> None:
    found = entry_of("packs/aa/x", data, len(data) + more)
    assert found is None or (isinstance(found, int) and len(data) < found <= len(data) + more)
    assert decode_header(memoryview(data)) is None
    assert decode_header(memoryview(b"KVBP\1\0" + data)) is None


def test_a_pack_with_an_index_of_many_blocks_is_read_in_two_steps() -> None:
    blocks = some_blocks(300)
    packed = blob(blocks)
    needed = entry_of(packed.entry.name, packed.data[-INDEX_GUESS_BYTES:], len(packed.data))
    assert isinstance(needed, int) and needed > INDEX_GUESS_BYTES
    assert entry_of(packed.entry.name, packed.data[-needed:], len(packed.data)) == packed.entry


def test_names_follow_from_what_is_in_a_pack() -> None:
    keys = [make_key(1), make_key(2)]
    name = pack_name(FINGERPRINT, keys)
    assert name == pack_name(FINGERPRINT, list(keys))
    folder, short, long = name.split("/")
    assert (folder, len(short), len(long)) == ("packs", 2, 40) and long.startswith(short)
    others = {
        pack_name(FINGERPRINT, keys[::-1]),
        pack_name(FINGERPRINT, keys[:1]),
        pack_name(bytes(32), keys),
        pack_name(FINGERPRINT, keys, tail=True),
        pack_name(FINGERPRINT, keys, sealed_by="one.aa"),
        pack_name(FINGERPRINT, keys, sealed_by="one.bb"),
    }
    assert len(others | {name}) == 7


def test_an_index_says_whether_the_blocks_are_a_tail() -> None:
    blocks = some_blocks(1)
    tail = pack(blocks.layout, FINGERPRINT, blocks.heads, blocks.sources, tail=True)
    data = b"".join(tail.parts)
    found = entry_of(tail.entry.name, data, len(data))
    assert isinstance(found, PackEntry) and found.tail


def test_the_format_is_what_other_nodes_have_written() -> None:
    """Another digest here is another format: it needs another version, or no node can read what lies in the stores."""
    blocks = Blocks(
        BlockLayout(block_tokens=16, shard_bytes=4096),
        [BlockHead(BlockKey(b"k" * 32), BlockKey(b"p" * 32), b"e" * 32, 3, b"facts")],
        [[memoryview(bytes(range(256)) * 16)]],
    )
    plain, sealed = blob(blocks), blob(blocks, seal=sealer(random_bytes=bytes))
    assert (plain.entry.name, blake3(plain.data).hexdigest()[:16]) == (
        "packs/f1/f1dd3a0c5b85bb2530c5abd2a6edb8343b4d8c35",
        "91a4d35998989c1a",
    )
    assert (sealed.entry.name, blake3(sealed.data).hexdigest()[:16]) == (
        "packs/73/739a14dd02e7a9979e733f9cbc4fba2f7422213f",
        "8fd07ccd818727e4",
    )


def test_targets_must_be_those_of_the_layout() -> None:
    blocks = some_blocks(1)
    with pytest.raises(AssertionError):
        unpack(blocks.layout, FINGERPRINT, blocks.keys, b"", [[memoryview(bytearray(4095))]])

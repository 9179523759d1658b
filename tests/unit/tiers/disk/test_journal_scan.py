"""Many records read at once are what they are one by one, whatever became of them on the medium."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.block import GROUP_MAX, BlockKey, SlotIndex
from kvbm.testing.stored_runs import make_key
from kvbm.tiers.contract import RecoveredBlock
from kvbm.tiers.disk.geometry import RECORD_BYTES
from kvbm.tiers.disk.journal import BlockRecord, Journal, encode_record
from kvbm.tiers.disk.journal_scan import scan_journal
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.voids import STRETCH_SLOTS_MAX, stretches_of
from kvbm.tiers.recovered import RECOVERED, RecoveredBlocks, recovered_rows

FINGERPRINT = bytes(range(32))
LENGTH = 8192
SLOTS = 70
PAGE_RECORDS = 4096 // RECORD_BYTES
TWINS = [BlockKey(bytes(8) + bytes([number]) * 24) for number in range(3)]
"""Keys that begin alike."""
KEYS = [*map(make_key, range(12)), *TWINS, BlockKey(bytes(32)), BlockKey(b"\xff" * 31 + b"\0")]

records = st.builds(
    BlockRecord,
    slot=st.just(SlotIndex(0)),
    key=st.sampled_from(KEYS),
    parent=st.none() | st.sampled_from(KEYS),
    checksum=st.binary(min_size=16, max_size=16),
    length=st.just(LENGTH),
    sequence=st.integers(0, 9) | st.integers(0, 2**64 - 1),
    engine_hash=st.sampled_from([b"", b"h" * 32, bytes(31) + b"\1"]),
    group=st.sampled_from([0, 1, GROUP_MAX]),
)


def reference_decode(raw: bytes, slot: int) -> RecoveredBlock | None:
    """One record, field by field; None where it is not whole."""
    if struct.unpack("<I", raw[252:])[0] != zlib.crc32(raw[:252]):
        return None
    if raw[:7] != b"KVBR\x02\x00\x02" or raw[112:120] != FINGERPRINT[:8]:
        return None
    if struct.unpack("<QQ", raw[96:112]) != (LENGTH, slot):
        return None
    return RecoveredBlock(
        key=BlockKey(raw[16:48]),
        slot=SlotIndex(slot),
        sequence=struct.unpack("<Q", raw[8:16])[0],
        parent=BlockKey(raw[48:80]) if raw[7] & 1 else None,
        engine_hash=b"" if raw[120:152] == bytes(32) else raw[120:152],
        group=struct.unpack("<H", raw[152:154])[0],
    )


def reference_recover(table: bytes, lost: Sequence[int]) -> tuple[list[RecoveredBlock], set[int], set[int]]:
    """The newest block of each key, in any order, the slots of the others, and those of damaged records."""
    newest, outdated, damaged = dict[bytes, RecoveredBlock](), set[int](), set[int]()
    for slot in range(SLOTS):
        raw = table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
        found = None if slot // PAGE_RECORDS in lost else reference_decode(raw, slot)
        if found is None:
            if slot // PAGE_RECORDS in lost or raw != bytes(RECORD_BYTES):
                damaged.add(slot)
        elif (rival := newest.get(found.key)) is None:
            newest[found.key] = found
        elif rival.sequence < found.sequence:
            outdated.add(rival.slot)
            newest[found.key] = found
        else:
            outdated.add(slot)
    return list(newest.values()), outdated, damaged


class WornPages(Syscalls):
    """Reads that touch one of these pages fail."""

    def __init__(self, pages: Sequence[int]) -> None:
        self._pages = pages

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        end = offset + sum(len(buffer) for buffer in buffers)
        if any(offset < (page + 1) * 4096 and page * 4096 < end for page in self._pages):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """The bytes of a journal: records that are whole, torn, flipped, misplaced, or another namespace's."""
    table = bytearray(SLOTS * RECORD_BYTES)
    for slot in draw(st.sets(st.integers(0, SLOTS - 1))):
        record = msgspec.structs.replace(draw(records), slot=SlotIndex(slot))
        raw = bytearray(encode_record(record, FINGERPRINT))
        kind = draw(
            st.sampled_from(["whole"] * 4 + ["flip", "torn", "place", "length", "origin", "head", "rest"])
        )
        if kind == "flip":
            raw[draw(st.integers(0, RECORD_BYTES - 1))] ^= 1 << draw(st.integers(0, 7))
        elif kind == "torn":
            end = draw(st.integers(1, RECORD_BYTES - 1))
            raw[end:] = draw(st.sampled_from([bytes(RECORD_BYTES), bytes(raw[::-1])]))[end:]
        elif kind != "whole":  # the checksum is right
            place = {"place": 104, "length": 96, "origin": 112}.get(kind)
            if place is None:
                first, last = (0, 7) if kind == "head" else (154, 251)
                place = draw(st.integers(first, last))
            raw[place] ^= 1 << draw(st.integers(0, 7))
            raw[252:] = struct.pack("<I", zlib.crc32(raw[:252]))
        table[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = raw
    return bytes(table)


@given(table=tables(), lost=st.sets(st.integers(0, SLOTS // PAGE_RECORDS), max_size=2).map(sorted))
def test_what_is_recovered_is_what_each_record_says(table: bytes, lost: list[int]) -> None:
    fd = os.memfd_create("journal")
    try:
        os.pwrite(fd, table, 0)
        journal = Journal(WornPages(lost), fd, SLOTS, LENGTH, FINGERPRINT)
        parts = list(scan_journal(journal))
    finally:
        os.close(fd)
    whole = [part.whole for part in parts]
    found, outdated = recovered_rows(np.concatenate([np.empty(0, RECOVERED), *whole]))
    blocks, older, damaged = reference_recover(table, lost)
    assert {slot for part in parts for slot in part.damaged.tolist()} == damaged
    assert set(outdated.tolist()) == older
    assert sorted(found, key=lambda block: block.slot) == sorted(blocks, key=lambda block: block.slot)
    sequences = [block.sequence for block in found]
    assert sequences == sorted(sequences)
    assert journal.unreadable_pages == len(lost)
    assert found.last_sequence() == max(sequences, default=0)


@pytest.mark.parametrize(("sequences", "kept"), [([4, 4, 3], 0), ([4, 5, 5], 1), ([1, 2, 9], 2)])
def test_of_two_with_one_key_the_newer_counts_or_else_the_first(sequences: list[int], kept: int) -> None:
    rows = np.zeros(3, RECOVERED)
    rows["sequence"], rows["slot"] = sequences, range(3)
    found, outdated = recovered_rows(rows)
    assert (found.slots.tolist(), len(outdated)) == ([kept], 2)


@given(
    blocks=st.lists(records, max_size=12, unique_by=lambda record: record.key),
    gone=st.sets(st.integers(0, 11)),
)
def test_blocks_as_columns_are_the_same_blocks(blocks: list[BlockRecord], gone: set[int]) -> None:
    plain = [
        RecoveredBlock(
            key=block.key,
            slot=SlotIndex(slot),
            sequence=block.sequence,
            parent=block.parent,
            engine_hash=block.engine_hash,
            group=block.group,
        )
        for slot, block in enumerate(blocks)
    ]
    columns = RecoveredBlocks.of(iter(plain))
    assert list(columns) == plain
    assert columns.keys(slice(1, 4)) == [block.key for block in plain[1:4]]
    names = columns.engine_names(slice(0, None))
    assert [row.tobytes() for row in names] == [block.engine_hash or block.key for block in plain]
    follows = [bool(i) and block.parent == plain[i - 1].key for i, block in enumerate(plain)]
    assert columns.follows.tolist() == follows
    left = columns.without(bytearray(slot in gone for slot in range(12)))
    assert list(left) == [block for block in plain if block.slot not in gone]


@pytest.mark.parametrize("slots", [[], [3], [5, 4, 4, 9], range(2 * STRETCH_SLOTS_MAX + 1)])
def test_neighbours_are_voided_together(slots: Sequence[int]) -> None:
    stretches = list(stretches_of(slots))
    assert [slot for stretch in stretches for slot in stretch] == sorted(set(slots))
    assert all(0 < len(stretch) <= STRETCH_SLOTS_MAX for stretch in stretches)
    ends = {stretch.stop for stretch in stretches if len(stretch) < STRETCH_SLOTS_MAX}
    assert not ends & {stretch.start for stretch in stretches}, "they could have been one"

"""The journal's records: what is written is read back, and nothing else is ever believed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvbm.block import GROUP_MAX, BlockKey, SlotIndex
from kvbm.testing.stored_runs import make_key
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.disk.geometry import RECORD_BYTES
from kvbm.tiers.disk.journal import (
    BlockRecord,
    DamagedRecord,
    HeldBlock,
    Journal,
    block_checksum,
    decode_record,
    encode_record,
    is_void,
)
from kvbm.tiers.disk.journal_scan import scan_journal
from kvbm.tiers.disk.syscalls import Syscalls

FINGERPRINT = bytes(range(32))
LENGTH = 8192
SLOT_COUNT = 20_000  # more than one chunk of the scan


def make_record(slot: int, sequence: int = 7, parent: BlockKey | None = None) -> BlockRecord:
    return BlockRecord(
        slot=SlotIndex(slot),
        key=make_key(slot),
        parent=parent,
        checksum=bytes([slot % 251] * 16),
        length=LENGTH,
        sequence=sequence,
    )


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    fd = os.open(tmp_path / "journal", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, SLOT_COUNT * RECORD_BYTES)
    yield Journal(Syscalls(), fd, SLOT_COUNT, LENGTH, FINGERPRINT)
    os.close(fd)


@pytest.mark.parametrize("parent", [None, make_key(99), BlockKey(bytes(32))])
def test_a_record_comes_back(parent: BlockKey | None) -> None:
    record = make_record(3, sequence=2**64 - 1, parent=parent)
    raw = encode_record(record, FINGERPRINT)
    assert len(raw) == RECORD_BYTES
    assert decode_record(raw, SlotIndex(3), LENGTH, FINGERPRINT) == record


@pytest.mark.parametrize(("engine_hash", "group"), [(b"", 7), (b"h" * 32, 0), (bytes(31) + b"\1", GROUP_MAX)])
def test_a_record_keeps_what_the_engine_calls_its_block(engine_hash: bytes, group: int) -> None:
    record = msgspec.structs.replace(make_record(3), engine_hash=engine_hash, group=group)
    assert decode_record(encode_record(record, FINGERPRINT), SlotIndex(3), LENGTH, FINGERPRINT) == record


def test_the_layout_is_the_documented_one() -> None:
    raw = encode_record(make_record(3, sequence=0x0102, parent=make_key(4)), FINGERPRINT)
    assert raw[:8] == b"KVBR\x02\x00\x02\x01"
    assert raw[8:16] == b"\x02\x01" + bytes(6)
    assert raw[16:48] == make_key(3)
    assert raw[48:80] == make_key(4)
    assert raw[80:96] == bytes([3] * 16)
    assert raw[96:112] == LENGTH.to_bytes(8, "little") + (3).to_bytes(8, "little")
    assert raw[112:120] == FINGERPRINT[:8]
    assert raw[120:252] == bytes(132)
    named = msgspec.structs.replace(make_record(3), engine_hash=bytes(range(32)), group=0x0102)
    raw = encode_record(named, FINGERPRINT)
    assert raw[120:152] == bytes(range(32))
    assert raw[152:252] == b"\x02\x01" + bytes(98)


def test_every_flipped_bit_is_noticed() -> None:
    raw = encode_record(make_record(3), FINGERPRINT)
    for bit in range(RECORD_BYTES * 8):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedRecord):
            decode_record(bytes(flipped), SlotIndex(3), LENGTH, FINGERPRINT)


def test_every_torn_record_is_noticed() -> None:
    """Each byte prefix of a new record over the void one, and over an older record of another block."""
    new = encode_record(make_record(3), FINGERPRINT)
    old = encode_record(make_record(3, sequence=1, parent=make_key(5)), FINGERPRINT)
    for length in range(1, RECORD_BYTES):
        for below in (bytes(RECORD_BYTES), old):
            torn = new[:length] + below[length:]
            if torn in (new, old):
                continue
            with pytest.raises(DamagedRecord):
                decode_record(torn, SlotIndex(3), LENGTH, FINGERPRINT)


@pytest.mark.parametrize(
    ("slot", "length", "fingerprint"),
    [(4, LENGTH, FINGERPRINT), (3, LENGTH * 2, FINGERPRINT), (3, LENGTH, bytes(32))],
)
def test_a_whole_record_of_elsewhere_is_damaged(slot: int, length: int, fingerprint: bytes) -> None:
    raw = encode_record(make_record(3), FINGERPRINT)
    with pytest.raises(DamagedRecord):
        decode_record(raw, SlotIndex(slot), length, fingerprint)


def test_the_checksum_covers_namespace_key_and_every_byte() -> None:
    data = bytearray(os.urandom(LENGTH))
    halves = [memoryview(data)[: LENGTH // 2], memoryview(data)[LENGTH // 2 :]]
    checksum = block_checksum(FINGERPRINT, make_key(1), halves)
    assert checksum == block_checksum(FINGERPRINT, make_key(1), [memoryview(data)])
    assert checksum != block_checksum(bytes(32), make_key(1), halves)
    assert checksum != block_checksum(FINGERPRINT, make_key(2), halves)
    assert checksum != block_checksum(FINGERPRINT, make_key(1), halves[::-1])
    for place in (0, LENGTH // 2, LENGTH - 1):
        data[place] ^= 1
        assert checksum != block_checksum(FINGERPRINT, make_key(1), halves)
        data[place] ^= 1


def test_the_table_is_scanned_whole(journal: Journal) -> None:
    slots = [0, 1, 8191, 8192, SLOT_COUNT - 1]
    for slot in slots:
        journal.write(make_record(slot))
    journal.void(SlotIndex(1))
    assert journal.read(SlotIndex(1)) is None
    assert journal.read(SlotIndex(8192)) == make_record(8192)
    parts = list(scan_journal(journal))
    assert [slot for part in parts for slot in part.whole["slot"]] == [slot for slot in slots if slot != 1]
    assert not any(len(part.damaged) for part in parts)


def test_a_damaged_record_is_reported_by_its_slot(journal: Journal, tmp_path: Path) -> None:
    journal.write(make_record(5))
    journal.write(make_record(6))
    with (tmp_path / "journal").open("r+b") as file:
        file.seek(5 * RECORD_BYTES + 20)
        file.write(b"?")
    part, *rest = scan_journal(journal)
    assert (part.damaged.tolist(), part.whole["slot"].tolist()) == ([5], [6])
    assert not any(len(other.damaged) or len(other.whole) for other in rest)
    with pytest.raises(DamagedRecord):
        journal.read(SlotIndex(5))


def test_records_of_a_run_are_those_of_its_blocks(journal: Journal) -> None:
    blocks = [
        BlockHead(make_key(0), None),
        BlockHead(make_key(1), make_key(0), bytes(range(32)), 3),
        BlockHead(make_key(2), make_key(1), b"", GROUP_MAX),
    ]
    checksums = [bytes([number] * 16) for number in range(3)]
    journal.write_run(5, blocks, checksums, 40)
    for place, head in enumerate(blocks):
        record = journal.read(SlotIndex(5 + place))
        assert record is not None
        assert BlockHead(record.key, record.parent, record.engine_hash, record.group) == head
        assert (record.slot, record.sequence, record.length) == (5 + place, 40 + place, LENGTH)
        assert record.checksum == checksums[place]
    raw = journal.read_raw(SlotIndex(4), 5)
    held = [
        HeldBlock(head.key, checksum, head.engine_hash, head.group)
        for head, checksum in zip(blocks, checksums, strict=True)
    ]
    assert journal.held(raw, 4) == [None, *held, None]
    assert is_void(raw[:RECORD_BYTES]) and not is_void(raw[RECORD_BYTES : 2 * RECORD_BYTES])
    journal.void(6, 2)
    assert [journal.read(SlotIndex(slot)) is None for slot in (5, 6, 7)] == [False, True, True]


def test_a_load_believes_what_is_whole_and_in_its_place_and_nothing_else(journal: Journal) -> None:
    """As `decode_record` does, bit by bit."""
    raw = encode_record(make_record(3), FINGERPRINT)
    assert journal.held(raw, 3) != [None]
    for place in range(RECORD_BYTES):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << place % 8
        assert journal.held(bytes(flipped), 3) == [None]
    assert journal.held(raw, 4) == [None]
    for length, fingerprint in ((LENGTH + 4096, FINGERPRINT), (LENGTH, bytes(32))):
        assert Journal(Syscalls(), -1, SLOT_COUNT, length, fingerprint).held(raw, 3) == [None]
    version = msgspec.structs.replace(make_record(3), sequence=8)
    assert journal.held(encode_record(version, FINGERPRINT), 3) == journal.held(raw, 3)

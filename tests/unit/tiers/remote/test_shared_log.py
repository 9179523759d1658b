"""Segments of the log: what they say, what is damaged, and what a reader missed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.tiers.remote.blobs import BlobInfo
from kvbm.tiers.remote.packs import PackEntry
from kvbm.tiers.remote.shared_log import (
    SEGMENT_BYTES_MAX,
    SEGMENTS_KEPT,
    LogReader,
    LogWriter,
    SegmentName,
    decode_segment,
    encode_segment,
    fitting,
    is_pack_name,
    segment_name,
)

OURS, THEIRS, OTHERS = "0" * 16, "a" * 16, "b" * 16


def entry(number: int, blocks: int = 3) -> PackEntry:
    name = f"{number:040x}"
    offsets = tuple(range(0, 5000 * (blocks + 1), 5000))
    return PackEntry(f"packs/{name[:2]}/{name}", bytes(range(8)) * blocks, offsets, offsets[-1] + 50, False)


def listed(*names: SegmentName | str) -> list[BlobInfo]:
    return [BlobInfo(str(name), 10, 0.0) for name in names]


def segment(writer: str, sequence: int) -> SegmentName:
    return SegmentName(writer, sequence)


def test_a_segment_says_what_it_was_given() -> None:
    name = segment(THEIRS, 255)
    assert str(name) == f"log/{THEIRS}/000000ff" and segment_name(str(name)) == name
    entries = [entry(1), entry(2, 5)]
    assert decode_segment(str(name), encode_segment(name, entries)) == entries


@given(cut=st.integers(0, 400), bit=st.integers(0, 8 * 300 - 1))
def test_a_damaged_segment_says_nothing(cut: int, bit: int) -> None:
    name = segment(THEIRS, 0)
    data = encode_segment(name, [entry(1), entry(2)])
    if cut < len(data):
        assert decode_segment(str(name), data[:cut]) is None
    flipped = bytearray(data)
    flipped[bit // 8 % len(data)] ^= 1 << bit % 8
    assert decode_segment(str(name), flipped) is None
    assert decode_segment(str(segment(OTHERS, 0)), data) is None, "another one's copy"


@pytest.mark.parametrize(
    "bad",
    [
        PackEntry("packs/../x", b"12345678", (0, 1), 10, False),
        PackEntry(entry(1).name, b"1234567", (0, 1), 10, False),
        PackEntry(entry(1).name, b"", (0,), 10, False),
        PackEntry(entry(1).name, b"12345678", (5, 6), 10, False),
        PackEntry(entry(1).name, b"12345678" * 2, (0, 5, 5), 10, False),
        PackEntry(entry(1).name, b"12345678", (0, 50), 10, False),
        PackEntry(entry(1).name, b"12345678", (0, -1), 10, False),
    ],
)
def test_unsound_entries_are_left_out(bad: PackEntry) -> None:
    name = segment(THEIRS, 0)
    assert decode_segment(str(name), encode_segment(name, [bad, entry(2)])) == [entry(2)]


def test_names_that_are_not_ours() -> None:
    for name in ("log/x/00000000", f"log/{THEIRS}/0", f"log/{THEIRS}/00000000/x", "packs/aa/bb"):
        assert segment_name(name) is None
    assert is_pack_name(entry(1).name)
    assert not is_pack_name(entry(1).name + "0") and not is_pack_name("packs/ff/" + "0" * 40)


def read_all(reader: LogReader, names: list[SegmentName]) -> None:
    for name in names:
        reader.read(name)


def test_a_reader_reads_each_segment_of_others_once() -> None:
    reader = LogReader(OURS)
    first = listed(segment(OURS, 0), segment(THEIRS, 4), segment(THEIRS, 5), "log/garbage")
    names, gap = reader.unread(first)
    assert (names, gap) == ([segment(THEIRS, 4), segment(THEIRS, 5)], False), (
        "at the start all packs are listed anyway"
    )
    read_all(reader, names)
    assert reader.unread(first) == ([], False)
    names, gap = reader.unread(listed(segment(THEIRS, 6), segment(OTHERS, 0)))
    assert (names, gap) == ([segment(THEIRS, 6), segment(OTHERS, 0)], False)
    assert reader.skipped == 1


def test_what_was_not_read_is_named_again() -> None:
    reader = LogReader(OURS)
    reader.unread([])
    for _ in range(2):
        assert reader.unread(listed(segment(THEIRS, 0))).names == [segment(THEIRS, 0)]


@pytest.mark.parametrize("then", [[(THEIRS, 3)], [(THEIRS, 1), (THEIRS, 3)], [(OTHERS, 1)]])
def test_missed_segments_are_a_gap(then: list[tuple[str, int]]) -> None:
    reader = LogReader(OURS)
    read_all(reader, reader.unread(listed(segment(THEIRS, 0))).names)
    names, gap = reader.unread(listed(*(segment(*name) for name in then)))
    assert gap and reader.gaps == 1
    read_all(reader, names)
    assert reader.unread(listed(*names)) == ([], False), "known to be missed, once"


def test_a_writer_that_was_silent_for_long_makes_no_gap() -> None:
    reader = LogReader(OURS)
    read_all(reader, reader.unread(listed(segment(THEIRS, 0))).names)
    assert reader.unread([]) == ([], False)
    assert reader.unread(listed(segment(THEIRS, 1))) == ([segment(THEIRS, 1)], False)


def test_a_writers_segment_stays_as_it_is_until_it_is_written() -> None:
    writer = LogWriter(OURS)
    assert writer.next() is None and not writer.pending
    writer.add(entry(1))
    first = writer.next()
    writer.add(entry(2))
    assert writer.next() == first and writer.pending
    assert writer.written() == []
    second = writer.next()
    assert first is not None and second is not None
    assert decode_segment(str(second[0]), second[1]) == [entry(2)]
    assert (first[0], second[0]) == (segment(OURS, 0), segment(OURS, 1))


def test_a_writer_keeps_its_last_segments_only() -> None:
    writer, there = LogWriter(OURS), set[str]()
    for number in range(100):
        writer.add(entry(number))
        found = writer.next()
        assert found is not None
        there.add(str(found[0]))
        for old in writer.written():
            there.remove(old)
        assert min(SEGMENTS_KEPT, number + 1) <= len(there) < 1.5 * SEGMENTS_KEPT
    assert str(segment(OURS, 99)) in there


def test_many_entries_are_cut_into_segments() -> None:
    writer = LogWriter(OURS)
    entries = [entry(number, 1000) for number in range(200)]
    for each in entries:
        writer.add(each)
    found: list[PackEntry] = []
    while (one := writer.next()) is not None:
        assert len(one[1]) <= SEGMENT_BYTES_MAX
        found += decode_segment(str(one[0]), one[1]) or []
        writer.written()
    assert found == entries
    assert fitting([]) == 0


def test_what_cannot_be_written_for_long_is_dropped() -> None:
    writer = LogWriter(OURS)
    for number in range(LogWriter.WAITING_MAX + 5):
        writer.add(entry(number, 1))
    assert writer.dropped == 5

"""What a node knows of a store: places, bounds, and what it tells of blocks."""

from __future__ import annotations

import hashlib
import tracemalloc

import msgspec

from kvbm.block import BlockKey
from kvbm.tiers.remote import catalogue
from kvbm.tiers.remote.catalogue import PLACES_PER_PACK, Catalogue
from kvbm.tiers.remote.contract import NOWHERE
from kvbm.tiers.remote.packs import PackEntry

BLOCK_BYTES = 4096
RECORD = 5000


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def entry(name: str, *numbers: int, tail: bool = False) -> PackEntry:
    offsets = tuple(range(0, RECORD * (len(numbers) + 1), RECORD))
    prints = b"".join(key(number)[:8] for number in numbers)
    return PackEntry(name, prints, offsets, offsets[-1] + 100, tail)


def test_places_follow_one_another_in_a_pack_and_in_no_two() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    assert known.add(entry("a", 0, 1, 2)) and known.add(entry("b", 3, 4, tail=True))
    places = known.places(keys(0, 1, 2, 3, 4, 5))
    assert places == [0, 1, 2, PLACES_PER_PACK, PLACES_PER_PACK + 1, NOWHERE]
    assert (known.tail(1), known.tail(places[3])) == (False, True)
    assert known.places(keys(9, 1, 9, 4, 3)) == [NOWHERE, 1, NOWHERE, places[4], places[3]]
    assert (known.block_count, known.pack_count) == (5, 2)


def test_a_span_is_of_the_records_alone() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    known.add(entry("a", 0, 1, 2, 3))
    assert known.span(1, 2) == ("a", RECORD, 3 * RECORD, [0, RECORD, 2 * RECORD])
    assert known.span(2, 3) is None, "beyond the pack"
    assert known.span(PLACES_PER_PACK, 1) is None


def test_a_pack_is_learned_once_and_its_number_never_used_again() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    assert known.add(entry("a", 0)) and not known.add(entry("a", 0))
    known.forget_pack("a")
    assert known.places(keys(0)) == [NOWHERE] and known.span(0, 1) is None
    assert known.add(entry("a", 0))
    assert known.places(keys(0)) == [PLACES_PER_PACK]


def test_a_compressed_pack_is_counted_once_and_passed_over_from_then_on() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    compressed = msgspec.structs.replace(entry("a", 0, 1), offsets=(0, 1000, 2000))
    assert not known.add(compressed) and not known.add(compressed)
    assert (known.compressed_packs, known.pack_count, known.knows("a")) == (1, 0, True)
    assert known.add(entry("a", 0, 1)), "written again, by a version that does not compress"
    assert (known.compressed_packs, known.pack_count) == (1, 1)


def test_of_a_name_that_is_known_the_last_word_counts() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    first = entry("a", 0, 1)
    known.add(first, keys=keys(0, 1))
    assert not known.add(first, keys=keys(0, 1)) and known.places(keys(0)) == [0]
    other = PackEntry("a", first.prints, (0, RECORD + 10, 2 * RECORD + 20), 3 * RECORD, False)
    assert known.add(other, keys=keys(0, 1))
    assert known.places(keys(0)) == [PLACES_PER_PACK] and known.span(PLACES_PER_PACK, 2) == (
        "a",
        0,
        2 * RECORD + 20,
        [0, RECORD + 10, 2 * RECORD + 20],
    )
    assert known.news() == (tuple(keys(0, 1)), ()) and known.block_count == 2
    known.forget_block(PLACES_PER_PACK)
    assert known.add(other, keys=keys(0, 1)), "the block that was wrong has been stored again"
    assert known.places(keys(0, 1)) == [2 * PLACES_PER_PACK, 2 * PLACES_PER_PACK + 1]


def test_a_pack_of_others_that_is_stored_again_is_seen() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    known.add(entry("a", 0, 1))
    assert not known.add(entry("a", 0, 1), keys=keys(0, 1))
    assert known.news() == (tuple(keys(0, 1)), ())


def test_the_least_recently_used_pack_goes_first() -> None:
    known = Catalogue(4, BLOCK_BYTES)
    known.add(entry("a", 0, 1))
    known.add(entry("b", 2, 3))
    known.use("a", 1.0)
    known.add(entry("c", 4))
    assert known.places(keys(0, 2, 4)) == [0, NOWHERE, 2 * PLACES_PER_PACK]
    assert known.forgotten_packs == 1 and known.block_count == 3
    assert not known.add(entry("d", *range(10, 15))), "larger than all"


def test_older_packs_take_nobodys_place_and_go_first() -> None:
    known = Catalogue(4, BLOCK_BYTES)
    known.add(entry("new", 0))
    known.add(entry("old", 1), older=True)
    known.add(entry("older", 2), older=True)
    known.add(entry("newest", 3, 4))
    assert [place >= 0 for place in known.places(keys(0, 1, 2, 3))] == [True, True, False, True]
    assert not known.add(entry("oldest", 5), older=True)


def test_of_two_packs_with_one_block_the_newer_is_read() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    known.add(entry("a", 0, 1))
    known.add(entry("b", 1, 2))
    known.add(entry("c", 2, 3), older=True)
    # A run of one pack is not torn apart for that.
    assert known.places(keys(0, 1, 2, 3)) == [0, 1, PLACES_PER_PACK + 1, 2 * PLACES_PER_PACK + 1]
    assert known.places(keys(1)) == [PLACES_PER_PACK]
    known.forget_pack("a")
    assert known.places(keys(1)) == [PLACES_PER_PACK]


def test_a_wrong_block_is_forgotten_and_no_other() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    known.add(entry("a", 0, 1, 2))
    known.forget_block(1)
    assert known.places(keys(0, 1, 2)) == [0, NOWHERE, 2]
    known.forget_block(1)
    known.forget_pack("a")
    assert known.places(keys(0, 1, 2)) == [NOWHERE] * 3


def test_a_print_at_an_odd_place_is_not_taken_for_one() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    first = b"\1" * 4 + b"\2" * 8 + b"\3" * 4
    known.add(PackEntry("a", first + b"\2" * 8, (0, RECORD, 2 * RECORD, 3 * RECORD), 4 * RECORD, False))
    assert known.places([BlockKey(b"\2" * 8 + bytes(24))]) == [2]


def test_news_are_of_blocks_that_were_seen() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    known.add(entry("others", 0, 1))
    known.add(entry("ours", 2, 3), keys=keys(2, 3))
    assert known.news() == (tuple(keys(2, 3)), ())
    known.seen(1, keys(1))
    known.seen(1, keys(1))
    assert known.news() == (tuple(keys(1)), ())
    known.forget_pack("others")
    known.forget_block(PLACES_PER_PACK)
    assert known.news() == ((), tuple(keys(1, 2))), "nothing of block 0, which nobody was told of"
    assert known.news() == ((), ())


def test_what_comes_and_goes_between_two_calls_is_no_news() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    known.add(entry("a", 0), keys=keys(0))
    known.forget_pack("a")
    assert known.news() == ((), ())
    known.add(entry("b", 1), keys=keys(1))
    known.news()
    known.forget_pack("b")
    known.add(entry("c", 1), keys=keys(1))
    assert known.news() == ((), ())


def test_a_block_that_is_stored_again_is_told_once_and_goes_once() -> None:
    known = Catalogue(100, BLOCK_BYTES)
    known.add(entry("a", 0), keys=keys(0))
    known.news()
    known.add(entry("b", 0), keys=keys(0))
    known.forget_pack("a")
    assert known.news() == ((), ())
    known.forget_pack("b")
    assert known.news() == ((), tuple(keys(0)))


def test_news_are_bounded_and_what_came_unsaid_does_not_go(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(catalogue, "NEWS_MAX", 2)
    known = Catalogue(100, BLOCK_BYTES)
    known.add(entry("a", 0, 1, 2), keys=keys(0, 1, 2))
    assert known.news().came == tuple(keys(0, 1))
    known.forget_pack("a")
    assert known.news().gone == tuple(keys(0, 1))


def test_a_block_takes_little_memory() -> None:
    count, per_pack = 1 << 15, 64
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        known = Catalogue(count, BLOCK_BYTES)
        for start in range(0, count, per_pack):
            known.add(entry(f"packs/{start:042x}", *range(start, start + per_pack)))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / count < 120

"""The checksum that a GPU can compute: the same everywhere, and another one for every damage that disks do."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.layout import PAGE_BYTES
from kvbm.testing.stored_runs import make_key
from kvbm.tiers.disk.page_sums import (
    PAGE_WORDS,
    SUM_COUNT,
    WORD_BYTES,
    coefficients,
    host_page_checksum,
    host_page_sums,
)
from rigs.property_tests import scale_examples

PAGES = 3
SIZE = PAGES * PAGE_BYTES
FINGERPRINT = b"f" * 32


def checksum(data: bytes) -> bytes:
    return host_page_checksum(FINGERPRINT, make_key(1), [memoryview(data)])


seeds = st.integers(0, 2**32)
blocks = st.one_of(
    seeds.map(lambda seed: random.Random(seed).randbytes(SIZE)),
    st.binary(min_size=1, max_size=9).map(lambda run: (run * SIZE)[:SIZE]),
    st.sampled_from([bytes(SIZE), b"\xff" * SIZE]),
)
places = st.integers(0, SIZE - 1)


@st.composite
def damages(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A block, and what a disk, a driver or a crash made of it."""
    whole = draw(blocks)
    data = bytearray(whole)
    kind = draw(st.sampled_from(["flip", "flips", "swap", "zero", "shift", "torn", "pages", "top bits"]))
    size = draw(st.sampled_from([1, WORD_BYTES, 8, 512]))
    # Mostly within one page: across pages a hash of the sums notices.
    start = draw(st.sampled_from([0, PAGE_BYTES]))
    first, second = (start + draw(st.integers(0, PAGE_BYTES // size - 1)) * size for _ in range(2))
    if kind == "flip":
        data[first] ^= 1 << draw(st.integers(0, 7))
    elif kind == "flips":
        for place in draw(st.lists(places, min_size=1, max_size=8)):
            data[place] ^= 1 << draw(st.integers(0, 7))
    elif kind == "swap":
        data[first : first + size], data[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
    elif kind == "zero":
        data[first : first + size] = bytes(size)
    elif kind == "shift":
        distance = draw(st.integers(1, SIZE - 1))
        data = data[distance:] + data[:distance]
    elif kind == "torn":
        data[first:] = draw(blocks)[first:]
    elif kind == "pages":
        order = draw(st.permutations(range(PAGES)))
        data = bytearray(b"".join(whole[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in order))
    else:  # what sums modulo a power of two notice last
        for place in {first | 3, second | 3}:
            data[place] ^= 0x80
    return whole, bytes(data)


@settings(max_examples=scale_examples(400))
@given(damages())
def test_every_damage_is_detected(damage: tuple[bytes, bytes]) -> None:
    whole, damaged = damage
    assert (checksum(whole) == checksum(damaged)) == (whole == damaged)


@given(blocks, places, st.integers(1, 2**32 - 1))
def test_damage_within_a_word_shows_in_every_sum(data: bytes, place: int, change: int) -> None:
    start = place - place % WORD_BYTES
    word = int.from_bytes(data[start : start + WORD_BYTES], "little") ^ change
    damaged = data[:start] + word.to_bytes(WORD_BYTES, "little") + data[start + WORD_BYTES :]
    page = start // PAGE_BYTES * SUM_COUNT * 8
    before, after = host_page_sums(memoryview(data)), host_page_sums(memoryview(damaged))
    for at in range(page, page + SUM_COUNT * 8, 8):
        assert before[at : at + 8] != after[at : at + 8]


def test_the_format_stays() -> None:
    """Blocks on disk carry it: whoever changes a coefficient names another kind of checksum."""
    assert coefficients().shape == (SUM_COUNT, PAGE_WORDS)
    assert (coefficients() & 1).all()
    data = memoryview(bytes(i * 7 % 251 for i in range(SIZE)))
    expected = b"".join(
        (
            sum(
                int.from_bytes(data[page + 4 * i : page + 4 * i + 4], "little", signed=True) * int(row[i])
                for i in range(PAGE_WORDS)
            )
            % 2**64
        ).to_bytes(8, "little")
        for page in range(0, SIZE, PAGE_BYTES)
        for row in coefficients()
    )
    assert host_page_sums(data) == expected
    assert checksum(bytes(data)).hex() == "0b9d52fefd146d08ab0a0fa64d04a293"


def test_the_same_in_parts_but_not_of_another_block() -> None:
    data = memoryview(random.Random(1).randbytes(SIZE))
    halves = [data[:PAGE_BYTES], data[PAGE_BYTES:]]
    whole = checksum(bytes(data))
    assert host_page_checksum(FINGERPRINT, make_key(1), halves) == whole
    assert host_page_checksum(FINGERPRINT, make_key(1), halves[::-1]) != whole
    assert host_page_checksum(FINGERPRINT, make_key(1), halves[:1]) != whole
    assert host_page_checksum(FINGERPRINT, make_key(2), halves) != whole
    assert host_page_checksum(bytes(32), make_key(1), halves) != whole


def test_only_whole_pages() -> None:
    with pytest.raises(AssertionError):
        host_page_sums(memoryview(bytes(PAGE_BYTES + 4)))

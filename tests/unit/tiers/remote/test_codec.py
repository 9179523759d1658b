"""Codecs: lossless, bounded, and chosen where they pay."""

from __future__ import annotations

import itertools
import math
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.clock import ManualClock
from kvbm.errors import KvbmError
from kvbm.tiers.remote.codec import (
    ELEMENT_BYTES,
    PLAIN,
    Codec,
    CodecChoice,
    CodecRates,
    StoreRates,
    codec_named,
    measured,
    zstd_shuffled,
)

zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")

SIZE = 8192
seeds = st.integers(0, 2**32)


def targets(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def like_bf16(count: int, seed: int = 0) -> bytes:
    """`count` elements of two bytes as a model's are: noise below, a sign and an exponent above."""
    draw = random.Random(seed)
    values = struct.pack(f"<{count}f", *(draw.gauss(0, 1) for _ in range(count)))
    return b"".join(values[at + 2 : at + 4] for at in range(0, len(values), 4))


@given(
    st.sampled_from(ELEMENT_BYTES),
    st.lists(st.integers(1, 64), min_size=1, max_size=4),
    st.lists(st.integers(1, 64), min_size=1, max_size=4),
    st.integers(1, 3),
    seeds,
)
def test_what_was_coded_comes_back_in_buffers_of_other_sizes(
    element_bytes: int, cuts: list[int], other_cuts: list[int], level: int, seed: int
) -> None:
    total = 8 * (sum(cuts) + sum(other_cuts))
    raw = bytes(random.Random(seed).choices(range(4), k=total))

    def cut(sizes: list[int], data: memoryview) -> list[memoryview]:
        parts, at = [], 0
        for size in [*(8 * size for size in sizes), total - 8 * sum(sizes)]:
            parts.append(data[at : at + size])
            at += size
        return parts

    codec = zstd_shuffled(element_bytes, level)
    coded = codec.encode(cut(cuts, memoryview(raw)))
    if coded is None:
        return
    assert len(coded) < total
    found = bytearray(total)
    decoder = codec_named(codec.name)
    assert decoder is not None
    assert decoder.decode(memoryview(coded), cut(other_cuts, memoryview(found)))
    assert found == raw


def test_bytes_like_those_of_a_model_get_smaller_when_shuffled() -> None:
    raw = memoryview(like_bf16(32 << 10))
    shuffled, as_they_lie = zstd_shuffled(2).encode([raw]), zstd_shuffled(1).encode([raw])
    assert shuffled is not None and as_they_lie is not None
    assert len(shuffled) < 0.72 * raw.nbytes < len(as_they_lie)


def test_noise_is_not_coded() -> None:
    assert zstd_shuffled().encode([memoryview(random.Random(1).randbytes(SIZE))]) is None
    assert PLAIN.encode([memoryview(bytes(SIZE))]) is None


@pytest.mark.parametrize("codec", [PLAIN, zstd_shuffled()], ids=lambda codec: codec.name)
def test_another_length_is_refused(codec: Codec) -> None:
    stored = memoryview(codec.encode([memoryview(bytes(SIZE))]) or bytes(SIZE))
    assert codec.decode(stored, targets(SIZE))
    for size in (0, 2, SIZE - 2, SIZE + 2, 2 * SIZE):
        assert not codec.decode(stored, targets(size)), size
    assert not codec.decode(stored[:-1], targets(SIZE))
    assert not codec.decode(memoryview(bytes(stored) + b"\0"), targets(SIZE))
    assert not codec.decode(memoryview(b""), targets(SIZE))


def bombs() -> Iterator[tuple[str, bytes]]:
    """Codes of far more than `SIZE` bytes, and what they say of themselves."""
    honest = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    yield "honest", honest
    content_size = (64 << 20).to_bytes(4, "little")
    assert honest.count(content_size) == 1
    yield "lies of its size", honest.replace(content_size, SIZE.to_bytes(4, "little"))
    stream = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    yield "says no size", stream.compress(bytes(64 << 20)) + stream.flush()
    small = zstandard.ZstdCompressor(level=1).compress(bytes(SIZE))
    yield "a second frame", small + honest
    yield "cut", small[:-1]
    yield "a wide window", frame_of_zeros(window_log=31)


def one_plane(frame: bytes) -> memoryview:
    """A code of elements of one byte."""
    return memoryview(len(frame).to_bytes(8, "little") + frame)


def frame_of_zeros(window_log: int) -> bytes:
    """A frame of `SIZE` zeros, made by hand (RFC 8878, 3.1.1): its size takes two bytes, its one block is a run."""
    header = b"\x28\xb5\x2f\xfd\x40" + bytes([(window_log - 10) << 3]) + (SIZE - 256).to_bytes(2, "little")
    return header + (SIZE << 3 | 0b011).to_bytes(3, "little") + b"\0"


def test_the_frame_that_is_made_by_hand_is_a_good_one() -> None:
    buffers = [memoryview(bytearray(b"x" * SIZE))]
    assert zstd_shuffled(1).decode(one_plane(frame_of_zeros(window_log=16)), buffers)
    assert buffers == [bytes(SIZE)]


@pytest.mark.parametrize("bomb", [pytest.param(code, id=name) for name, code in bombs()])
def test_decoding_takes_no_more_memory_than_the_block(bomb: bytes) -> None:
    buffers = targets(SIZE)
    tracemalloc.start()
    try:
        assert not zstd_shuffled(1).decode(one_plane(bomb), buffers)
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_foreign_bytes_never_raise(data: bytes, with_magic: bool, with_length: bool) -> None:
    stored = (b"\x28\xb5\x2f\xfd" if with_magic else b"") + data
    zstd_shuffled(1).decode(one_plane(stored) if with_length else memoryview(stored), targets(SIZE))


def test_lengths_of_planes_are_not_believed() -> None:
    code = bytearray(zstd_shuffled().encode([memoryview(bytes(SIZE))]) or b"")
    first, second = struct.unpack_from("<2Q", code)
    assert zstd_shuffled().decode(memoryview(code), targets(SIZE))
    for lengths in (
        (first + 1, second - 1),
        (0, first + second),
        (first + second, 0),
        (2**64 - 1, second),
        (0, 0),
    ):
        struct.pack_into("<2Q", code, 0, *lengths)
        assert not zstd_shuffled().decode(memoryview(code), targets(SIZE)), lengths


def test_codecs_are_known_by_name() -> None:
    assert codec_named("none") is PLAIN
    assert all(codec_named(zstd_shuffled(size).name) is not None for size in ELEMENT_BYTES)
    assert [codec_named(name) for name in ("", "zstd", "zstd-3", "zstd-22", "NONE")] == [None] * 5


def test_without_zstandard_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    codec_named.cache_clear()
    try:
        with pytest.raises(KvbmError, match=r"zstandard.*pip install openkvbm\[remote\]") as raised:
            zstd_shuffled()
        assert "\n" not in str(raised.value)
        assert codec_named("zstd-2") is None
    finally:
        codec_named.cache_clear()


# Which codec pays.

GB = 1e9
FAST = CodecRates(0.5 * GB, 1.5 * GB, 1.4)


def choice(store: StoreRates, rates: CodecRates = FAST, **options: float) -> CodecChoice:
    made = CodecChoice(["zstd-2"], **options)
    made.told_store(store)
    made.told_codec("zstd-2", rates)
    return made


@pytest.mark.parametrize(
    ("store_gb_per_s", "rates", "expected"),
    [
        ((0.05, 0.05), FAST, "zstd-2"),
        ((0.1, 0.1), FAST, "zstd-2"),
        ((1, 1), FAST, "none"),
        ((5, 5), FAST, "none"),
        ((0.05, 5), FAST, "zstd-2"),  # slow to write alone is reason enough
        ((5, 0.05), FAST, "zstd-2"),
        ((0.05, 0.05), CodecRates(0.5 * GB, math.inf, 1.0), "none"),  # nothing gets smaller
        ((0.05, 0.05), CodecRates(0.02 * GB, 1 * GB, 2.0), "none"),  # too slow a codec
        ((0.05, 0.05), CodecRates(100 * GB, 100 * GB, 1.05), "none"),  # less than the margin
        ((5, 5), CodecRates(100 * GB, 100 * GB, 2.0), "zstd-2"),
    ],
)
def test_a_codec_is_chosen_where_it_pays(
    store_gb_per_s: tuple[float, float], rates: CodecRates, expected: str
) -> None:
    assert choice(StoreRates(*(rate * GB for rate in store_gb_per_s)), rates).current == expected


rates_per_s = st.floats(1e5, 1e12)
stores = st.builds(StoreRates, rates_per_s, rates_per_s)
codecs = st.builds(CodecRates, rates_per_s, rates_per_s, st.floats(1, 100))


@given(stores, codecs, st.floats(0, 10))
def test_from_plain_it_changes_exactly_where_the_margin_is_beaten(
    store: StoreRates, rates: CodecRates, loads: float
) -> None:
    made = choice(store, rates, loads_per_store=loads)
    plain = 1 / store.write_bytes_per_s + loads / store.read_bytes_per_s
    coded = (
        1 / rates.encode_bytes_per_s
        + loads / rates.decode_bytes_per_s
        + 1 / rates.ratio / store.write_bytes_per_s
        + loads / rates.ratio / store.read_bytes_per_s
    )
    assert made.seconds("none") == pytest.approx(plain) and made.seconds("zstd-2") == pytest.approx(coded)
    if not math.isclose(coded, 0.9 * plain, rel_tol=1e-9):
        assert (made.current == "zstd-2") == (coded < 0.9 * plain)


@given(stores, codecs, st.floats(1.01, 1000))
def test_a_slower_store_never_speaks_against_a_codec(
    store: StoreRates, rates: CodecRates, slower: float
) -> None:
    made = choice(store, rates)
    before = made.current
    made.told_store(StoreRates(*(rate / slower for rate in store)))
    assert before == "none" or made.current == "zstd-2"


@given(stores, codecs, st.lists(st.floats(0.96, 1.04), max_size=20))
def test_noise_changes_the_choice_at_most_once(
    store: StoreRates, rates: CodecRates, noise: list[float]
) -> None:
    made = choice(store, rates)
    seen = [made.current]
    for factor in noise:
        made.told_store(StoreRates(*(rate * factor for rate in store)))
        seen.append(made.current)
    assert sum(a != b for a, b in itertools.pairwise(seen)) <= 1


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_codec_is_measured_again_when_the_store_changed_twofold(direction: int, factor: float) -> None:
    made = choice(StoreRates(GB, GB))
    assert made.due() is None
    for changed, due in ((factor**0.9, None), (factor, "zstd-2")):
        rates = [GB, GB]
        rates[direction] *= changed
        made.told_store(StoreRates(*rates))
        assert made.due() == due, changed
    made.told_codec("zstd-2", FAST)
    assert made.due() is None


def test_every_codec_is_measured_once_the_store_is_known() -> None:
    made = CodecChoice(["zstd-2", "zstd-4"])
    assert (made.due(), made.current, made.seconds("none")) == (None, "none", None)
    made.told_codec("zstd-2", FAST)
    made.told_store(StoreRates(0, GB))
    assert made.due() is None, "rates that say nothing"
    made.told_store(StoreRates(0.05 * GB, 0.05 * GB))
    assert made.due() == "zstd-2" and made.seconds("zstd-2") is None
    made.told_codec("zstd-2", FAST)
    assert (made.due(), made.current) == ("zstd-4", "zstd-2")
    made.told_codec("zstd-4", FAST._replace(ratio=3.0))
    assert (made.due(), made.current) == (None, "zstd-4")
    made.told_store(StoreRates(5 * GB, 5 * GB))
    assert made.current == "none"


class SlowCodec:
    """Takes a second to encode and two to decode, by a clock that stands still otherwise."""

    name = "slow"

    def __init__(self, clock: ManualClock, encode: Callable[[bytes], bytes | None]) -> None:
        self._clock = clock
        self._encode = encode

    def encode(self, parts: list[memoryview]) -> bytes | None:
        self._clock.advance(1)
        return self._encode(b"".join(parts))

    def decode(self, stored: memoryview, buffers: list[memoryview]) -> bool:
        self._clock.advance(2)
        return True


def test_a_codec_is_measured_there_and_back() -> None:
    clock = ManualClock()
    parts = [memoryview(bytes(100)), memoryview(bytes(100))]
    quarter = SlowCodec(clock, lambda raw: raw[: len(raw) // 4])
    assert measured(quarter, parts, clock) == CodecRates(200, 100, 4)
    assert measured(SlowCodec(clock, lambda raw: None), parts, clock) == CodecRates(200, math.inf, 1)
    standing = measured(zstd_shuffled(), [memoryview(bytes(SIZE))], ManualClock())
    assert standing.encode_bytes_per_s == standing.decode_bytes_per_s == math.inf and standing.ratio > 10

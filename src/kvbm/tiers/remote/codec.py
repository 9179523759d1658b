"""How the bytes of a block are coded for their way to a store and back, and whether that pays.

KV in 16 bits hardly gets smaller as it lies in memory: the low byte of each element is noise, between high bytes that
are alike. `zstd_shuffled` puts all first bytes of the elements before all second ones, and compresses that.
"""

from __future__ import annotations

import functools
import importlib
import math
import struct
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvbm.clock import Clock
from kvbm.errors import KvbmError
from kvbm.tiers.remote.blobs import Buffer

Bytes: TypeAlias = NDArray[np.uint8]

ELEMENT_BYTES = (1, 2, 4, 8)
EXTRA = "pip install openkvbm[remote]"
_WINDOW_MAX = 8 << 20
"""No level of zstd that is of use here looks back further; more memory than this is not spent on decoding."""


class Codec(Protocol):
    """A lossless code. Called by several threads at once."""

    name: str
    """What a record says of it: ASCII, at most 16 characters. Whoever knows the name can decode."""

    def encode(self, parts: Sequence[memoryview]) -> bytes | None:
        """The parts, one after the other, in fewer bytes; None where it does not get smaller."""

    def decode(self, stored: memoryview, targets: Sequence[memoryview]) -> bool:
        """Fill the targets. False where `stored` is no code of exactly so many bytes: they may be scribbled over then.

        Uses memory for as many bytes as the targets have, whatever `stored` says.
        """


class _Plain:
    """The bytes as they are."""

    name = "none"

    def encode(self, parts: Sequence[memoryview]) -> bytes | None:
        return None

    def decode(self, stored: memoryview, targets: Sequence[memoryview]) -> bool:
        if stored.nbytes != sum(target.nbytes for target in targets):
            return False
        start = 0
        for target in targets:
            # Not a slice assignment: that would hold up every other thread for as long as it takes.
            np.copyto(_bytes_of(target), _bytes_of(stored[start : start + target.nbytes]))
            start += target.nbytes
        return True


PLAIN: Codec = _Plain()


class _ZstdShuffled:
    """zstd over the bytes of the elements, plane by plane.

    A code is the length of each plane's code, 8 bytes little-endian each, then these codes: a frame of zstd, or the
    plane as it is where that does not get smaller. So the noisy planes cost nothing to decode, and do not share a table
    of symbols with the others.
    """

    def __init__(self, zstandard: ModuleType, element_bytes: int, level: int) -> None:
        self.name = f"zstd-{element_bytes}"
        self._zstandard = zstandard
        self._element_bytes = element_bytes
        self._lengths = struct.Struct(f"<{element_bytes}Q")
        self._level = level

    def encode(self, parts: Sequence[memoryview]) -> bytes | None:
        raw_bytes = sum(part.nbytes for part in parts)
        if raw_bytes % self._element_bytes:
            return None
        planes = np.empty(raw_bytes, np.uint8).reshape(self._element_bytes, -1)
        for start, part in self._places(parts):
            for plane, column in zip(planes, self._columns(part), strict=True):
                np.copyto(plane[start : start + len(column)], column)
        # One for each call: it must not be used by two threads at once.
        compressor = self._zstandard.ZstdCompressor(level=self._level)
        codes = []
        for plane in planes:
            code = compressor.compress(plane)
            codes.append(code if len(code) < len(plane) else plane.data)
        coded = b"".join((self._lengths.pack(*map(len, codes)), *codes))
        return coded if len(coded) < raw_bytes else None

    def decode(self, stored: memoryview, targets: Sequence[memoryview]) -> bool:
        raw_bytes = sum(target.nbytes for target in targets)
        if raw_bytes % self._element_bytes or stored.nbytes < self._lengths.size:
            return False
        lengths = self._lengths.unpack_from(stored)
        if sum(lengths) != stored.nbytes - self._lengths.size:
            return False
        planes: list[Bytes] = []
        start = self._lengths.size
        for length in lengths:
            plane = self._plane(stored[start : start + length], raw_bytes // self._element_bytes)
            if plane is None:
                return False
            planes.append(plane)
            start += length
        for start, target in self._places(targets):
            for plane, column in zip(planes, self._columns(target), strict=True):
                np.copyto(column, plane[start : start + len(column)])
        return True

    def _plane(self, code: memoryview, plane_bytes: int) -> Bytes | None:
        """A plane of so many bytes; None where this is no code of one."""
        if code.nbytes == plane_bytes:
            return _bytes_of(code)
        try:
            # zstd takes the frame's word for how much memory to use, so that word is read first.
            frame = self._zstandard.get_frame_parameters(code)
            if frame.content_size != plane_bytes or frame.window_size > max(plane_bytes, _WINDOW_MAX):
                return None
            plain = self._zstandard.ZstdDecompressor().decompress(
                code, max_output_size=plane_bytes, allow_extra_data=False
            )
        except self._zstandard.ZstdError:
            return None
        return _bytes_of(plain) if len(plain) == plane_bytes else None

    def _places(self, parts: Sequence[memoryview]) -> Iterable[tuple[int, memoryview]]:
        """Each part, and in which element of a plane it begins."""
        start = 0
        for part in parts:
            assert part.nbytes % self._element_bytes == 0, "slots are whole pages"
            yield start, part
            start += part.nbytes // self._element_bytes

    def _columns(self, part: memoryview) -> Bytes:
        """`[element_bytes, elements of the part]`, as they lie in it."""
        return _bytes_of(part).reshape(-1, self._element_bytes).T


def _bytes_of(part: Buffer) -> Bytes:
    return np.frombuffer(part, np.uint8)


def zstd_shuffled(element_bytes: int = 2, level: int = 1) -> Codec:
    """zstd for elements of so many bytes: 1, 2, 4 or 8. Raises KvbmError where `zstandard` is not installed."""
    assert element_bytes in ELEMENT_BYTES
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        raise KvbmError(f"zstd needs zstandard, which cannot be used ({error}): {EXTRA}") from error
    return _ZstdShuffled(zstandard, element_bytes, level)


@functools.lru_cache(maxsize=64)
def codec_named(name: str) -> Codec | None:
    """The codec that a record names, to decode with; None for one that is not known or not installed here."""
    if name == PLAIN.name:
        return PLAIN
    for element_bytes in ELEMENT_BYTES:
        if name == f"zstd-{element_bytes}":
            try:
                return zstd_shuffled(element_bytes)
            except KvbmError:
                return None
    return None


class CodecRates(NamedTuple):
    """How fast one thread codes, in raw bytes, and how many raw bytes make one that is stored (1: nothing gained)."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    ratio: float


class StoreRates(NamedTuple):
    """How fast bytes go to the store and come back while one thread waits for them: stored bytes."""

    write_bytes_per_s: float
    read_bytes_per_s: float


def measured(codec: Codec, parts: Sequence[memoryview], clock: Clock) -> CodecRates:
    """Code one block there and back. Takes memory for the block and its code."""
    raw_bytes = sum(part.nbytes for part in parts)
    began_s = clock()
    coded = codec.encode(parts)
    encode_s = clock() - began_s
    if coded is None:
        return CodecRates(_rate(raw_bytes, encode_s), math.inf, 1.0)
    targets = [memoryview(bytearray(part.nbytes)) for part in parts]
    began_s = clock()
    assert codec.decode(memoryview(coded), targets)
    return CodecRates(_rate(raw_bytes, encode_s), _rate(raw_bytes, clock() - began_s), raw_bytes / len(coded))


def _rate(byte_count: int, seconds: float) -> float:
    return byte_count / seconds if seconds > 0 else math.inf


class CodecChoice:
    """Which codec pays now; decides from what it is told, and measures nothing itself.

    A raw byte's way costs, written once and read `loads_per_store` times,

    - as it is: 1 / write + loads / read;
    - coded: 1 / encode + 1 / (ratio · write) + loads · (1 / decode + 1 / (ratio · read)).

    Coding and sending of one block follow one another, so the sum is what a block waits; that several blocks overlap
    is not counted in the codec's favour, because the CPU that it takes is wanted by others too. Another codec is chosen
    only when it is faster than the present one by `margin`, so that noise does not make the choice flicker.
    """

    CHANGED = 2.0
    """A codec is measured again when the store has become faster or slower by this."""

    def __init__(self, names: Sequence[str], *, loads_per_store: float = 1.0, margin: float = 0.1) -> None:
        assert loads_per_store >= 0 and 0 <= margin < 1 and PLAIN.name not in names
        self._loads = loads_per_store
        self._margin = margin
        self._store: StoreRates | None = None
        self._codecs: dict[str, CodecRates | None] = dict.fromkeys(names)
        self._measured_at: dict[str, StoreRates] = {}
        self.current = PLAIN.name
        """The name of the codec to store with now."""

    def told_store(self, rates: StoreRates) -> None:
        """How fast the store is now; smoothed by whoever measures. Rates that are not above 0 say nothing."""
        if min(rates) > 0:
            self._store = rates
            self._choose()

    def told_codec(self, name: str, rates: CodecRates) -> None:
        """How fast a codec is with blocks of the present kind."""
        assert name in self._codecs
        if min(rates) > 0 and self._store is not None:
            self._codecs[name] = rates
            self._measured_at[name] = self._store
            self._choose()

    def due(self) -> str | None:
        """A codec that should be measured now: it never was, or the store was another one then. None: all is known.

        Nothing is due before the store's rates are known: without them no codec can pay.
        """
        if self._store is None:
            return None
        for name in self._codecs:
            then = self._measured_at.get(name)
            if then is None or any(map(self._changed, then, self._store)):
                return name
        return None

    def seconds(self, name: str) -> float | None:
        """What a raw byte costs with this codec, by the model above; None where that is not known."""
        if self._store is None:
            return None
        write, read = self._store
        if name == PLAIN.name:
            return 1 / write + self._loads / read
        rates = self._codecs[name]
        if rates is None:
            return None
        coding = 1 / rates.encode_bytes_per_s + self._loads / rates.decode_bytes_per_s
        return coding + (1 / write + self._loads / read) / rates.ratio

    def _changed(self, then: float, now: float) -> bool:
        return now >= then * self.CHANGED or then >= now * self.CHANGED

    def _choose(self) -> None:
        costs = {
            name: cost for name in (PLAIN.name, *self._codecs) if (cost := self.seconds(name)) is not None
        }
        best = min(costs, key=costs.__getitem__)
        if costs[best] < costs[self.current] * (1 - self._margin):
            self.current = best

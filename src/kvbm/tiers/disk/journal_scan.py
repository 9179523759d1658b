"""Reads many records of a journal at once (see `journal`), as columns: each record costs one call of crc32.

Needs numpy, which takes too long to load to be imported before there is a tier.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvbm.block import KEY_BYTES, BlockState
from kvbm.tiers.disk.geometry import RECORD_BYTES
from kvbm.tiers.disk.journal import HAS_PARENT, MAGIC, VERSION, Journal
from kvbm.tiers.recovered import RECOVERED

_WORDS = (KEY_BYTES // 8,)
_RECORD = np.dtype(
    {
        "names": ["head", "sequence", "key", "parent", "length", "slot", "origin", "engine_hash", "group"],
        "formats": [
            "<u8",
            "<u8",
            ("<u8", _WORDS),
            ("<u8", _WORDS),
            "<u8",
            "<u8",
            "<u8",
            ("<u8", _WORDS),
            "<u2",
        ],
        "offsets": [0, 8, 16, 48, 96, 104, 112, 120, 152],
        "itemsize": RECORD_BYTES,
    }
)
_RAW = np.dtype((np.void, RECORD_BYTES))
_FLAGS = np.uint64(56)
"""The first bit of the flags in the head; below it are magic, version and state."""
_HEAD = int.from_bytes(struct.pack("<4sHB", MAGIC, VERSION, BlockState.RESIDENT), "little")
_CRC_OF_WHOLE = 0x2144DF1C
"""The crc32 of any bytes that end with their own crc32."""


class ScannedPart(NamedTuple):
    """Consecutive records: a row of `RECOVERED` for each that is whole, and the slots of those that are damaged."""

    whole: np.ndarray
    damaged: np.ndarray


def scan_journal(journal: Journal) -> Iterator[ScannedPart]:
    """The whole table, in parts in the order of slots. A record on a page that cannot be read is damaged. Raises
    OSError as `Journal.parts`."""
    for first, count, raw in journal.parts():
        if raw is None:
            yield ScannedPart(np.empty(0, RECOVERED), np.arange(first, first + count))
        else:
            yield decode_records(raw, first, journal.block_bytes, journal.fingerprint)


def decode_records(raw: bytes | bytearray, first: int, length: int, fingerprint: bytes) -> ScannedPart:
    """What `decode_record` says of each of these records, which are those of the slots from `first` on."""
    records = np.frombuffer(raw, _RECORD)
    slots = np.arange(first, first + len(records))
    void = ~np.frombuffer(raw, np.uint64).reshape(len(records), -1).any(axis=1)
    head = records["head"]
    whole = (head & np.uint64((1 << int(_FLAGS)) - 1)) == np.uint64(_HEAD)
    whole &= records["slot"] == slots.astype(np.uint64)
    whole &= records["length"] == np.uint64(length)
    whole &= records["origin"] == np.uint64(int.from_bytes(fingerprint[:8], "little"))
    at = np.flatnonzero(whole)
    each: list[bytes] = np.frombuffer(raw, _RAW)[at].tolist()
    whole[at] = np.fromiter(map(zlib.crc32, each), np.uint32, len(each)) == _CRC_OF_WHOLE
    found, rows = records[whole], np.empty(int(np.count_nonzero(whole)), RECOVERED)
    for name in ("key", "parent", "engine_hash", "sequence", "slot", "group"):
        rows[name] = found[name]
    rows["has_parent"] = (found["head"] >> _FLAGS) & np.uint64(HAS_PARENT)
    return ScannedPart(rows, slots[~(whole | void)])

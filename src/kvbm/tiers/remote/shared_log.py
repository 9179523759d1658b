"""How nodes tell one another of new packs: each *writer* keeps a short log of segments in the store. Pure.

A segment is the blob `log/<writer, 16 hex>/<sequence, 8 hex>` with entries of packs: a magic, the xxh3_128 of name and
body, and the body (msgpack). A writer deletes its own segments but for the last `SEGMENTS_KEPT`. A reader lists
them all and reads what it has not read yet; where it missed some, only a listing of all packs tells what they said. A
segment that is torn or foreign is skipped, and what one says is hearsay as everything that comes from a store.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import xxhash

from kvbm.tiers.remote.blobs import BlobInfo, Buffer
from kvbm.tiers.remote.packs import PACK_PREFIX, PRINT_BYTES, PackEntry

LOG_PREFIX = "log/"
SEGMENTS_KEPT = 16
SEGMENT_BYTES_MAX = 1 << 20
"""A segment is not larger; nor is more read of one."""

WRITERS_MAX = 4096
"""Of so many writers a reader remembers what it has read; segments of more are left alone."""

_MAGIC = b"KVBL\x01\0\0\0"
_SUM_BYTES = 16
_NAME = re.compile(r"log/([0-9a-f]{16})/([0-9a-f]{8})")
_PACK_NAME = re.compile(PACK_PREFIX + r"([0-9a-f]{2})/(\1[0-9a-f]{38})")
_ENTRY_BYTES = 160
"""An entry takes no more than this and `_BLOCK_BYTES` for each block."""
_BLOCK_BYTES = PRINT_BYTES + 9
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[PackEntry]).decode


class SegmentName(NamedTuple):
    """Whose segment it is, and which one."""

    writer: str
    sequence: int

    def __str__(self) -> str:
        return f"{LOG_PREFIX}{self.writer}/{self.sequence:08x}"


def segment_name(name: str) -> SegmentName | None:
    """None for a name that no writer of ours gives."""
    found = _NAME.fullmatch(name)
    return None if found is None else SegmentName(found[1], int(found[2], 16))


def is_pack_name(name: str) -> bool:
    """Whether a blob of this name may be a pack."""
    return _PACK_NAME.fullmatch(name) is not None


def fitting(entries: Sequence[PackEntry]) -> int:
    """How many of these entries, from the first on, fit in one segment; at least 1 where there is any."""
    room = SEGMENT_BYTES_MAX - len(_MAGIC) - _SUM_BYTES - 8
    for count, entry in enumerate(entries):
        room -= _ENTRY_BYTES + _BLOCK_BYTES * (entry.blocks + 1)
        if room < 0:
            return max(1, count)
    return len(entries)


def encode_segment(name: SegmentName, entries: Sequence[PackEntry]) -> bytes:
    """The segment's bytes."""
    body = _encode(entries)
    return _MAGIC + _sum(str(name), body) + body


def decode_segment(name: str, data: Buffer) -> list[PackEntry] | None:
    """What the segment says; None where it is torn, foreign or another one's copy. Unsound entries are left out."""
    view = memoryview(data).cast("B")
    head, body = bytes(view[: len(_MAGIC) + _SUM_BYTES]), view[len(_MAGIC) + _SUM_BYTES :]
    if head != _MAGIC + _sum(name, body):
        return None
    try:
        return [entry for entry in _decode(body) if _sound(entry)]
    except msgspec.MsgspecError:
        return None


def _sum(name: str, body: Buffer) -> bytes:
    digest = xxhash.xxh3_128(name.encode() + b"\0")
    digest.update(body)
    return digest.digest()


def _sound(entry: PackEntry) -> bool:
    return (
        is_pack_name(entry.name)
        and entry.blocks > 0
        and len(entry.prints) == PRINT_BYTES * entry.blocks
        and entry.offsets[0] == 0
        and all(a < b for a, b in pairwise(entry.offsets))
        and entry.offsets[-1] < entry.size < 1 << 62
    )


class Unread(NamedTuple):
    """What a listing of the logs asks for: segments to read, in order; `gap`: others were missed."""

    names: list[SegmentName]
    gap: bool


class LogReader:
    """What has been read of the logs of all writers but our own. It belongs to one thread."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._next: OrderedDict[str, int] = OrderedDict()
        self._begun = False
        self.skipped = 0
        """So many segments were torn or foreign, or of more writers than are remembered."""
        self.gaps = 0
        """So often segments were missed."""

    def unread(self, listed: Iterable[BlobInfo]) -> Unread:
        """What to read after a listing of segments. In the first one there is no gap: all packs are listed anyway."""
        by_writer: dict[str, list[int]] = {}
        foreign = 0
        for info in listed:
            name = segment_name(info.name)
            if name is None or (name.writer not in by_writer and len(by_writer) >= WRITERS_MAX):
                foreign += 1
            elif name.writer != self._own:
                by_writer.setdefault(name.writer, []).append(name.sequence)
        self.skipped = max(self.skipped, foreign)
        unread: list[SegmentName] = []
        gap = False
        for writer, sequences in by_writer.items():
            expected = self._next.get(writer)
            if expected is None and not self._begun:
                expected = min(sequences)
            new = sorted(sequence for sequence in sequences if sequence >= (expected or 0))
            gap |= bool(new) and (new[0] > (expected or 0) or any(b - a > 1 for a, b in pairwise(new)))
            unread += (SegmentName(writer, sequence) for sequence in new)
            self._next[writer] = expected or 0
            self._next.move_to_end(writer)
        while len(self._next) > WRITERS_MAX:
            self._next.popitem(last=False)
        self._begun = True
        self.gaps += gap
        return Unread(unread, gap)

    def read(self, name: SegmentName) -> None:
        """This segment, and all before it, need not be read again."""
        self._next[name.writer] = max(self._next.get(name.writer, 0), name.sequence + 1)

    def skip(self, name: SegmentName) -> None:
        """As `read`, for a segment that is no use."""
        self.skipped += 1
        self.read(name)

    def missed(self, name: SegmentName) -> None:
        """As `read`, for a segment that was deleted before it was read: a gap."""
        self.gaps += 1
        self.read(name)


class LogWriter:
    """Our own log: entries wait until they are written; a segment stays as it is until it is written.

    `add` may be called by any thread, the rest by one.
    """

    WAITING_MAX = 4096

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self._lock = threading.Lock()
        self._waiting: list[PackEntry] = []
        self._frozen: tuple[SegmentName, bytes] | None = None
        self._next = 0
        self._oldest = 0
        self.dropped = 0
        """So many entries were never written, because the store took none for long: others find them in listings."""

    @property
    def pending(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._waiting) or self._frozen is not None

    def add(self, entry: PackEntry) -> None:
        """A pack has been written."""
        with self._lock:
            if len(self._waiting) >= self.WAITING_MAX:
                self.dropped += 1
            else:
                self._waiting.append(entry)

    def next(self) -> tuple[SegmentName, bytes] | None:
        """The segment to write next; the same one again until `written`."""
        if self._frozen is None and self._waiting:
            with self._lock:
                count = fitting(self._waiting)
                entries = self._waiting[:count]
                del self._waiting[:count]
            name = SegmentName(self.writer, self._next)
            self._frozen = name, encode_segment(name, entries)
        return self._frozen

    def written(self) -> list[str]:
        """The segment is in the store (also when it was there already). Names of old ones, to be deleted now."""
        assert self._frozen is not None
        self._frozen = None
        self._next += 1
        old = range(self._oldest, self._next - SEGMENTS_KEPT)
        if len(old) < SEGMENTS_KEPT // 2:
            return []  # a few at once: a request each time would double the log's cost
        self._oldest = old.stop
        return [str(SegmentName(self.writer, sequence)) for sequence in old]

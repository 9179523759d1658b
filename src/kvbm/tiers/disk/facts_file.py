"""What engines said of the blocks on disk, beside the journal: one record per slot, in a file of its own.

Only kept where an engine publishes events, which need a block's tokens after a restart too. A record is the block's key
and a text that means nothing to the tier; a crc covers both. It is written after the block's own record and believed
only where its key is that block's, so nothing has to be voided. A block without a record is as good as any other: a
file that cannot be written or read costs events, never blocks.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.layout import BlockLayout, round_up
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.disk.syscalls import Syscalls, read_fully, write_fully

FACTS_NAME = "facts"
_HEAD = struct.Struct(f"<IH2x{KEY_BYTES}s")
_ROUND = 64
_ROOM_BYTES = 224
"""For what is said besides the tokens: a hash, an adapter's name, a salt."""


def fact_bytes(layout: BlockLayout) -> int:
    """The size of a slot's record."""
    return round_up(_HEAD.size + 4 * layout.block_tokens + _ROOM_BYTES, _ROUND)


class FactsFile:
    """The file. Reads and writes go through the page cache, and raise OSError."""

    def __init__(self, syscalls: Syscalls, fd: int, record_bytes: int) -> None:
        self._syscalls = syscalls
        self.fd = fd
        self._record_bytes = record_bytes

    def write(self, slot: int, blocks: Sequence[BlockHead]) -> None:
        """Keep what is said of the blocks in the slots from `slot` on, as far as it has room."""
        if not any(block.facts for block in blocks):
            return
        raw = b"".join(self._record(block).ljust(self._record_bytes, b"\0") for block in blocks)
        write_fully(self._syscalls, self.fd, [memoryview(raw)], slot * self._record_bytes, 1)

    def read(self, slot: int, keys: Sequence[BlockKey]) -> list[bytes]:
        """What was said of the blocks with these keys in the slots from `slot` on; empty where nothing is known."""
        raw = bytearray(len(keys) * self._record_bytes)
        size = self._syscalls.fstat(self.fd).st_size - slot * self._record_bytes
        if size > 0:
            view = memoryview(raw)[: min(size, len(raw))]
            read_fully(self._syscalls, self.fd, [view], slot * self._record_bytes, 1)
        found = list[bytes]()
        for place, key in enumerate(keys):
            start = place * self._record_bytes
            crc, length, name = _HEAD.unpack_from(raw, start)
            text = bytes(raw[start + _HEAD.size : start + _HEAD.size + length])
            whole = name == key and crc == zlib.crc32(text, zlib.crc32(name))
            found.append(text if whole else b"")
        return found

    def _record(self, block: BlockHead) -> bytes:
        text = block.facts
        if not text or _HEAD.size + len(text) > self._record_bytes:
            return b""
        return _HEAD.pack(zlib.crc32(text, zlib.crc32(block.key)), len(text), block.key) + text

"""A checksum that a GPU computes as fast as it reads: two sums per page, and a hash over them on the host.

A page of 4 KiB is 1,024 little-endian words w of 32 bits, signed. Each of its two sums is Σ wᵢ·cᵢ modulo 2⁶⁴, where the
1,024 coefficients are fixed, odd, and drawn at random. Only the sums, 16 bytes a page, leave the device. A block's
checksum is xxh3_128 over fingerprint, key, length and all sums in order.

What it detects, when the damage does not depend on the coefficients:

- Damage within one word of a page, whatever it is: always. The difference is below 2³², so it cannot vanish
  modulo 2⁶⁴ when multiplied by an odd number.
- Any other damage within a page (words in another order, zeroes, a torn sector): a sum misses it with a probability of
  at most 2⁻³², both together with at most 2⁻⁶⁴ (multilinear hashing; a difference of two words has at most 31 trailing
  zero bits, and an odd coefficient leaves 63 random bits).
- Pages in another order, of another slot, key or namespace: as well as xxh3_128 does.

It is no protection against somebody who computes a forgery; neither is xxh3.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.layout import PAGE_BYTES

WORD_BYTES = 4
PAGE_WORDS = PAGE_BYTES // WORD_BYTES
SUM_COUNT = 2
_CHUNK_PAGES = 1024
"""Pages summed at once: bounds the memory that the widened words take."""


@functools.cache
def coefficients() -> Any:
    """int64 `[SUM_COUNT, PAGE_WORDS]`, all odd. Part of the format: others would be another kind of checksum."""
    size = SUM_COUNT * PAGE_WORDS * 8
    drawn = np.frombuffer(hashlib.shake_128(b"kvbm page sums 1").digest(size), dtype="<i8")
    return (drawn | 1).reshape(SUM_COUNT, PAGE_WORDS)


def host_page_sums(data: memoryview) -> bytes:
    """The sums of whole pages in host memory, page by page, each 8 bytes little-endian."""
    assert data.nbytes % PAGE_BYTES == 0, data.nbytes
    words = np.frombuffer(data, dtype="<i4").reshape(-1, PAGE_WORDS)
    columns = coefficients().T
    parts = [
        (words[first : first + _CHUNK_PAGES].astype(np.int64) @ columns).astype("<i8").tobytes()
        for first in range(0, len(words), _CHUNK_PAGES)
    ]
    return b"".join(parts)


def block_page_checksum(fingerprint: bytes, key: BlockKey, length: int, sums: Iterable[bytes]) -> bytes:
    """16 bytes: the checksum of a block of `length` bytes whose pages have these sums."""
    assert len(key) == KEY_BYTES
    digest = xxhash.xxh3_128(fingerprint + key + length.to_bytes(8, "little"))
    for part in sums:
        digest.update(part)
    return digest.digest()


def host_page_checksum(fingerprint: bytes, key: BlockKey, buffers: Sequence[memoryview]) -> bytes:
    """The checksum of a block in host memory."""
    length = sum(buffer.nbytes for buffer in buffers)
    return block_page_checksum(fingerprint, key, length, map(host_page_sums, buffers))

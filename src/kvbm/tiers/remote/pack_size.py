"""How many blocks travel together: in a pack, which is one write, and in one read of a part of it; how many wait."""

from __future__ import annotations

LOAD_BYTES_MAX = 32 << 20
"""The first block of a load has arrived only when the last one has. Half of it would be more than a read for every ten
blocks of 2 MiB, which a store bills."""
PACK_BYTES = 32 << 20
PACK_BYTES_MAX = 64 << 20
PACK_BLOCKS = 16
"""A pack has so many blocks even if they are more than `PACK_BYTES`, but is never above `PACK_BYTES_MAX`."""
PACK_BLOCKS_MAX = 1024
OPEN_SHARE = 8
"""One part in this many of host memory may wait for the next blocks of its chains once there is nothing free."""
_RECORD_EXTRA = 8 << 10


def record_bytes(block_bytes: int) -> int:
    """What a block takes in a pack at most, with its record's head and its part of the index."""
    return block_bytes + _RECORD_EXTRA


def blocks_of_a_load(block_bytes: int) -> int:
    """The most blocks of one read."""
    return max(1, LOAD_BYTES_MAX // block_bytes)


def blocks_of_a_pack(block_bytes: int, blob_bytes_max: int = PACK_BYTES_MAX) -> int:
    """The most blocks of one pack in a store that takes blobs of so many bytes; 0 where not even one fits."""
    record = record_bytes(block_bytes)
    # A pack of one block may be however large the store takes it.
    fit = min(PACK_BYTES_MAX, blob_bytes_max) // record or int(record <= blob_bytes_max)
    return min(PACK_BLOCKS_MAX, fit, max(PACK_BLOCKS, PACK_BYTES // record))

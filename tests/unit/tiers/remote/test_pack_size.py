"""How many blocks travel together."""

from __future__ import annotations

import pytest

from kvbm.tiers.remote.pack_size import (
    PACK_BYTES_MAX,
    blocks_of_a_load,
    blocks_of_a_pack,
    record_bytes,
)

MB = 1 << 20
LARGEST = PACK_BYTES_MAX - record_bytes(0)
"""Of such a block a pack of the usual size still holds one."""


@pytest.mark.parametrize(
    ("block_bytes", "blob_bytes_max", "blocks"),
    [
        (4096, 5 << 30, 1024),  # so many at most, however small they are
        (128 << 10, 5 << 30, 240),  # 32 MiB
        (2 * MB, 5 << 30, 16),  # more than 32 MiB, for the sake of their number
        (8 * MB, 5 << 30, 7),  # but never more than 64 MiB
        (LARGEST, 5 << 30, 1),
        (LARGEST + 1, 5 << 30, 1),  # a larger block goes alone
        (LARGEST + 1, PACK_BYTES_MAX, 0),
        (2 * MB, 4 * MB, 1),
        (2 * MB, 2 * MB, 0),
    ],
)
def test_blocks_of_a_pack(block_bytes: int, blob_bytes_max: int, blocks: int) -> None:
    assert blocks_of_a_pack(block_bytes, blob_bytes_max) == blocks


@pytest.mark.parametrize(("block_bytes", "blocks"), [(4096, 8192), (2 * MB, 16), (16 * MB, 2), (100 * MB, 1)])
def test_blocks_of_a_load(block_bytes: int, blocks: int) -> None:
    assert blocks_of_a_load(block_bytes) == blocks

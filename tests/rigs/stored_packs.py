"""Packs of two namespaces in a store of blobs, for tests of what looks at a whole store."""

from __future__ import annotations

from kvbm.block import BlockKey
from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.remote.blob_tier import BlobTier

LAYOUT = BlockLayout(block_tokens=4, shard_bytes=4096)
ONE, TWO = (Namespace(model="m", fields=(("weights", weights),)) for weights in ("aa", "bb"))
KEYS = [BlockKey(bytes([n]) * 32) for n in range(1, 9)]


def put(tier: BlobTier, keys: list[BlockKey]) -> None:
    """Store these blocks as one pack."""
    heads = [BlockHead(key, None) for key in keys]
    sources = [[memoryview(block_bytes(key, 0, LAYOUT.slot_bytes))] for key in keys]
    tier.submit_store(1, heads, sources, None)
    assert tier.settle(10.0)
    assert [end.blocks[0].outcome.value for end in tier.poll()] == ["hit"]

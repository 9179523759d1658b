"""Tokens → chained block keys.

`key = H(namespace fingerprint, parent key, token ids, extras)`, 32 bytes of blake3 in its keyed mode (the key is
the fingerprint), deterministic across processes and restarts. Where an engine already has a deterministic chained
hash that covers tokens and extras, `derive_key` binds that hash to the namespace instead of hashing tokens again.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence

from blake3 import blake3

from kvbm.block import KEY_BYTES, BlockKey

ROOT = bytes(KEY_BYTES)
"""The parent of a chain's first block."""


def derive_key(fingerprint: bytes, engine_hash: bytes, extras: bytes = b"") -> BlockKey:
    """The key of the block that an engine calls `engine_hash`, inside the namespace.

    `extras` holds what the engine's hash leaves out (for instance the digest of an adapter's weights).
    """
    if extras:
        # A namespace of its own: no pair of hash and extras can be read as another one.
        fingerprint = blake3(b"extras" + extras, key=fingerprint).digest()
    return BlockKey(blake3(engine_hash, key=fingerprint).digest())


def chain_key(fingerprint: bytes, parent: bytes, token_ids: Sequence[int], extras: bytes = b"") -> BlockKey:
    """The key of one block: `token_ids` after the block `parent` (ROOT for the first)."""
    tokens = array("I", token_ids).tobytes()
    digest = blake3(parent, key=fingerprint)
    digest.update(len(tokens).to_bytes(8, "little"))
    digest.update(tokens)
    digest.update(extras)
    return BlockKey(digest.digest())


def chain_keys(
    fingerprint: bytes,
    token_ids: Sequence[int],
    block_tokens: int,
    extras: Iterable[bytes] | None = None,
) -> list[BlockKey]:
    """The keys of all full blocks of `token_ids`; a partial last block has none.

    `extras` gives one value per block (cache salt, adapter, multimodal hashes); None means no extras anywhere.
    """
    keys: list[BlockKey] = []
    parent: bytes = ROOT
    per_block = iter(extras) if extras is not None else None
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        extra = next(per_block) if per_block is not None else b""
        key = chain_key(fingerprint, parent, token_ids[start : start + block_tokens], extra)
        keys.append(key)
        parent = key
    return keys


def join_keys(keys: Iterable[bytes]) -> bytes:
    """Keys laid end to end, as messages carry them."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[BlockKey]:
    """The inverse of `join_keys`. The length must be a multiple of 32 bytes."""
    assert len(joined) % KEY_BYTES == 0, "keys are 32 bytes each"
    # One call into C for all of them: a lookup carries thousands.
    return list(_unpacker(len(joined) // KEY_BYTES).unpack(joined))


def _unpacker(count: int) -> struct.Struct:
    return struct.Struct(f"{KEY_BYTES}s" * count)

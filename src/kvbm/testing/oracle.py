"""The answers that a block manager may give, kept in a dict: the reference that tests compare it with.

A manager may forget any block at any time. It must never answer with bytes that were not committed for
the key, whole. `block_bytes` makes content that no two keys, and no two stores of one key, have in common, so that a
torn, stale, foreign or flipped block shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from kvbm.block import BlockKey


def block_bytes(key: BlockKey, nonce: int, size_bytes: int) -> bytes:
    """The content of store number `nonce` of the block: `size_bytes` bytes of a stream of its own."""
    return hashlib.shake_128(key + nonce.to_bytes(8, "little")).digest(size_bytes)


class BlockOracle:
    """Key to the contents that were ever committed for it. Not bounded: a test's memory is."""

    def __init__(self) -> None:
        self._committed: dict[BlockKey, set[bytes]] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._committed

    def commit(self, key: BlockKey, content: bytes) -> None:
        """From now on the block may be found with this content."""
        self._committed.setdefault(key, set()).add(_digest(content))

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """The blocks must not be found any more, until they are committed again."""
        for key in keys:
            self._committed.pop(key, None)

    def check(self, key: BlockKey, content: bytes) -> None:
        """Fail when a block was found that was never committed, or with any other bytes than were."""
        assert key in self._committed, f"block {key.hex()[:12]} was found and never committed"
        assert _digest(content) in self._committed[key], f"block {key.hex()[:12]} was found with wrong bytes"


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()

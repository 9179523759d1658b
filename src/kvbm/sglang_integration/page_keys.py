"""SGLang's page hashes as block keys.

A page's hash is SHA-256 in hex, chained over the pages before it and seeded with the request's `extra_key` (which has
the adapter) and `cache_salt`. It covers no model: what computes the page selects a key space of the namespace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from blake3 import blake3

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.hashing import join_keys, keys_in_space, split_keys

PARENTS_MAX = 1 << 16


def block_keys(hashes: Sequence[str], mask: bytes) -> list[BlockKey]:
    """The keys of pages in the key space of `mask` (`hashing.space_mask`), for their hashes in hex."""
    return split_keys(keys_in_space(join_keys(map(_of_hash, hashes)), mask)) if hashes else []


def _of_hash(page_hash: str) -> bytes:
    try:
        digest = bytes.fromhex(page_hash)
    except ValueError:
        digest = b""
    # Another form of hash than that of the versions we know: named by its digest, still chained.
    return digest if len(digest) == KEY_BYTES else blake3(b"page\0" + page_hash.encode()).digest()


class Parents:
    """Which page comes before which, as far as calls have shown: SGLang writes pages without saying so.

    Bounded: the pairs seen longest ago are forgotten, and then a page stands for the first of its chain.
    """

    def __init__(self, pairs_max: int = PARENTS_MAX) -> None:
        self._pairs_max = pairs_max
        self._before: OrderedDict[BlockKey, BlockKey] = OrderedDict()

    def chain(self, keys: Sequence[BlockKey], before: BlockKey | None = None) -> None:
        """These pages follow one another; `before` is the page before the first, where it is known."""
        for parent, key in zip((before, *keys), keys, strict=False):
            if parent is not None:
                self._before[key] = parent
                self._before.move_to_end(key)
        while len(self._before) > self._pairs_max:
            self._before.popitem(last=False)

    def of(self, key: BlockKey) -> bytes:
        """The page before; empty where it is not known."""
        return self._before.get(key, b"")

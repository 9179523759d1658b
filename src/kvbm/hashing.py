"""Tokens → chained block keys.

`key = H(namespace fingerprint, parent key, token ids, extras)`, 32 bytes of blake3 in its keyed mode (the key is
the fingerprint), deterministic across processes and restarts. Where an engine already has a deterministic chained
hash of 32 bytes that covers tokens and extras, that hash is the key; what it leaves out selects a *key space* inside
the namespace: `keys_in_space` moves the hashes of thousands of blocks there at once. A hash of another length goes
through `derive_key`. A `Chain` keeps the keys of a sequence while it grows.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat

from blake3 import blake3

from kvbm.block import KEY_BYTES, BlockKey
from kvbm.layout import BlockLayout, Namespace

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


@functools.lru_cache(maxsize=1024)
def space_mask(fingerprint: bytes, extras: bytes) -> bytes:
    """What tells the key space of these extras from the namespace's other ones: 32 bytes."""
    return blake3(b"key space\0" + extras, key=fingerprint).digest()


def keys_in_space(engine_hashes: bytes, mask: bytes) -> bytes:
    """The keys in the space of `mask` (`space_mask`) of blocks whose chained hashes of 32 bytes an engine has.

    Both are joined. A key is hash XOR mask: two blocks of different spaces have one key only if their hashes differ by
    exactly what the masks differ by, which is as unlikely as that two hashes are equal.
    """
    import numpy as np  # not for the manager, which imports this module too

    words = np.frombuffer(engine_hashes, dtype=np.uint64).reshape(-1, KEY_BYTES // 8)
    moved: bytes = (words ^ np.frombuffer(mask, dtype=np.uint64)).tobytes()
    return moved


def chain_key(fingerprint: bytes, parent: bytes, token_ids: Sequence[int], extras: bytes = b"") -> BlockKey:
    """The key of one block: `token_ids` after the block `parent` (ROOT for the first)."""
    tokens = array("I", token_ids).tobytes()
    content = b"".join((parent, len(tokens).to_bytes(8, "little"), tokens, extras))
    return BlockKey(blake3(content, key=fingerprint).digest())


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
    tokens = array("I", token_ids[: len(token_ids) // block_tokens * block_tokens])
    _grow(keys, fingerprint, tokens, block_tokens, iter(extras) if extras is not None else repeat(b""))
    return keys


def _grow(
    keys: list[BlockKey], fingerprint: bytes, tokens: array[int], block_tokens: int, extras: Iterator[bytes]
) -> None:
    """Add the keys of the full blocks of `tokens`, which follow those of `keys`: `chain_key` for many at once."""
    parent: bytes = keys[-1] if keys else ROOT
    content, size = tokens.tobytes(), block_tokens * tokens.itemsize
    length = size.to_bytes(8, "little")
    for start in range(0, len(content) - size + 1, size):
        hashed = b"".join((parent, length, content[start : start + size], next(extras)))
        parent = blake3(hashed, key=fingerprint).digest()
        keys.append(BlockKey(parent))


class Chain:
    """The block keys of one sequence of tokens that grows: each block is hashed once, when it fills.

    `BlockManager` takes it wherever it takes tokens; it must be of the manager's namespace and block size, and its
    keys are those of the tokens it was given, with these `extras` for every block. It copies what it needs of the
    tokens, and can only grow: a sequence that goes on differently after some token is another chain.

    Raises OverflowError or TypeError for a token that is not an integer from 0 to 2³² - 1; nothing is added then.
    """

    def __init__(
        self, layout: BlockLayout, namespace: Namespace, tokens: Iterable[int] = (), extras: bytes = b""
    ) -> None:
        self._begin(namespace.fingerprint, layout.block_tokens, lambda block: extras)
        self.extras = extras
        self.extend(tokens)

    @classmethod
    def under(
        cls, fingerprint: bytes, block_tokens: int, tokens: Iterable[int], extras: Callable[[int], bytes]
    ) -> Chain:
        """A chain whose block of each number has extras of its own."""
        chain = cls.__new__(cls)
        chain._begin(fingerprint, block_tokens, extras)
        chain.extras = b""
        chain.extend(tokens)
        return chain

    def _begin(self, fingerprint: bytes, block_tokens: int, extras: Callable[[int], bytes]) -> None:
        self.block_tokens = block_tokens
        self.fingerprint = fingerprint
        self._extras_of = extras
        self._keys: list[BlockKey] = []
        self._rest = array("I")  # after the last full block

    def append(self, token: int) -> None:
        """One more token."""
        self._rest.append(token)
        if len(self._rest) == self.block_tokens:
            self._hash_full()

    def extend(self, tokens: Iterable[int]) -> None:
        """More tokens, in order: `[n]`."""
        self._rest += array("I", tokens)
        self._hash_full()

    @property
    def blocks(self) -> int:
        """How many blocks are full."""
        return len(self._keys)

    @property
    def tokens(self) -> int:
        """How many tokens there are, those of a partial last block included."""
        return len(self._keys) * self.block_tokens + len(self._rest)

    @property
    def keys(self) -> list[BlockKey]:
        """The keys of the full blocks, first block first: a copy, `[blocks]` of 32 bytes each."""
        return self._keys[:]

    @property
    def live_keys(self) -> Sequence[BlockKey]:
        """The same, which grows with the chain: not to be changed."""
        return self._keys

    def _hash_full(self) -> None:
        extras = map(self._extras_of, count(len(self._keys)))
        _grow(self._keys, self.fingerprint, self._rest, self.block_tokens, extras)
        del self._rest[: len(self._rest) // self.block_tokens * self.block_tokens]


@dataclass(frozen=True)
class EngineKeys:
    """The keys of consecutive blocks that an engine hashed itself, `[blocks]` of 32 bytes each.

    They must be chained, cover all that shapes the blocks' content, and lie in the key space of what the engine's hash
    leaves out (`keys_in_space`). `parent` is the key of the block before the first; empty where there is none, or where
    nobody knows it.

    The rest is for people who ask why a request missed, and decides nothing: the engine's id of the `request`, a digest
    of the `prompt`'s first block, and what else shaped the keys (`extras`: names and values; digests of secrets).
    """

    keys: list[BlockKey]
    parent: bytes = b""
    request: str = ""
    prompt: bytes = b""
    extras: tuple[tuple[str, str], ...] = ()


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

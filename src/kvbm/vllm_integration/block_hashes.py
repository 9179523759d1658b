"""The block hashes of a vLLM request, deterministic across processes and restarts.

vLLM's own hashes are used where they are that (sha256 with a fixed seed, vLLM ≥ 0.29). Older releases seed them at
random in every process, and the xxhash algorithms always do: there we chain our own over the same tokens and extras.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, overload

from kvbm.hashing import ROOT, chain_key

_OWN_CHAIN = hashlib.sha256(b"kvbm-own-block-hash-1").digest()
DETERMINISTIC = ("sha256", "sha256_cbor")


def hashes_are_deterministic(vllm_config: Any) -> bool:
    """Whether `request.block_hashes` mean the same in every process."""
    from vllm.v1.core import kv_cache_utils

    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return hasattr(kv_cache_utils, "resolve_none_hash_seed") and algorithm in DETERMINISTIC


def own_chain(blocks: Sequence[Sequence[int]]) -> list[bytes]:
    """Our own chain (see `OwnHashes`) over the full blocks of a text without adapter, salt or media."""
    keys: list[bytes] = []
    for tokens in blocks:
        keys.append(chain_key(_OWN_CHAIN, keys[-1] if keys else ROOT, tokens, repr(None).encode()))
    return keys


class EngineHashes(Sequence[bytes]):
    """A live view of `request.block_hashes`, which grows as blocks fill."""

    of_key_length = True
    """32 bytes each: sha256, or keys of our own (`hashes_are_deterministic` says which)."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __len__(self) -> int:
        return len(self._request.block_hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return self._hashes()[index]

    def _hashes(self) -> list[bytes]:
        found: list[bytes] = self._request.block_hashes
        return found


class OwnHashes(EngineHashes):
    """Our own chain over the request's tokens and vLLM's extra keys (adapter, multimodal items, cache salt)."""

    def __init__(self, request: Any, block_tokens: int) -> None:
        super().__init__(request)
        self._block_tokens = block_tokens
        self._own: list[bytes] = []
        self._mm_index = 0

    def _hashes(self) -> list[bytes]:
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        tokens = self._request.all_token_ids
        while len(self._own) < len(self):
            start = len(self._own) * self._block_tokens
            end = start + self._block_tokens
            extras, self._mm_index = generate_block_hash_extra_keys(self._request, start, end, self._mm_index)
            parent = self._own[-1] if self._own else ROOT
            self._own.append(chain_key(_OWN_CHAIN, parent, tokens[start:end], repr(extras).encode()))
        return self._own

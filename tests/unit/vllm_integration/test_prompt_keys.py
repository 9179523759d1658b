"""The keys that `kvbm pin` derives from a prompt are those that vLLM gives the same tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core import kv_cache_utils

from kvbm.cli.prompts import candidates

TOKENS = [0, 255, 256, 65_535, 65_536, 2**31 - 1, *range(500, 520), 1, 2]
"""Those at the bounds of each length that a number is written in."""


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize(("form", "digest"), [(0, sha256), (1, sha256_cbor)])
def test_keys_are_vllms_hashes(size: int, form: int, digest: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if not hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        pytest.skip("this vLLM starts its hashes at random in every process")
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    kv_cache_utils.init_none_hash(digest)
    hashes, parent = [], None
    for start in range(0, len(TOKENS) // size * size, size):
        parent = kv_cache_utils.hash_block_tokens(digest, parent, TOKENS[start : start + size], None)
        hashes.append(bytes(parent))
    space = SimpleNamespace(block_tokens=size, fingerprint=bytes(32).hex())
    assert list(candidates(space, TOKENS, "prompt.txt"))[form] == hashes

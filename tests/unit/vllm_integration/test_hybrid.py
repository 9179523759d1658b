"""What vLLM's own specifications of KV cache groups become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="these are vLLM's specifications; vllm is not installed")

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvbm.groups import Group, GroupKind
from kvbm.vllm_integration.hybrid import Hybrid, hybrid_of

SIZES: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def full(block: int = 16) -> Any:
    return FullAttentionSpec(block_size=block, **SIZES)


def window(tokens: int, block: int = 16) -> Any:
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **SIZES)


def states(block: int = 16) -> Any:
    return MambaSpec(block_size=block, shapes=((2, 64),), dtypes=(torch.float32,), mamba_cache_mode="align")


def chunks(tokens: int, block: int = 16) -> Any:
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=tokens, **SIZES)


def config(*specs: Any, hash_block_size: int | None = None) -> Any:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=hash_block_size
    )


def test_a_model_of_one_kind_has_no_groups() -> None:
    assert hybrid_of(config(full())) is None


def test_full_attention_comes_first() -> None:
    hybrid = hybrid_of(config(window(100), states(), full(), chunks(64)))
    assert hybrid is not None
    assert hybrid.ids == (2, 0, 1, 3)
    assert hybrid.groups == (
        Group(),
        Group(kind=GroupKind.WINDOW, reach=7),
        Group(kind=GroupKind.STATE),
        Group(kind=GroupKind.CHUNK, reach=4),
    )
    assert hybrid.in_order([["w"], ["s"], ["f"], ["c"]]) == [["f"], ["w"], ["s"], ["c"]]  # type: ignore[list-item]


def test_one_kind_that_drops_its_blocks_is_a_group_of_its_own() -> None:
    assert hybrid_of(config(window(32))) == Hybrid(16, (Group(kind=GroupKind.WINDOW, reach=2),), (0,))


@pytest.mark.parametrize("hashed", [None, 16])
def test_blocks_of_several_sizes_span_those_that_are_hashed(hashed: int | None) -> None:
    hybrid = hybrid_of(config(full(48), window(64, 16), hash_block_size=hashed))
    assert hybrid is not None
    assert hybrid.block_tokens == 16
    assert hybrid.groups == (Group(span=3), Group(kind=GroupKind.WINDOW, reach=4))


@pytest.mark.parametrize("tokens", [17, 32, 33, 48, 49, 100])
def test_a_window_needs_what_vllm_itself_looks_for(tokens: int) -> None:
    """`get_num_skipped_tokens` says what vLLM takes away at a boundary: all that we load must be left."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    hybrid = hybrid_of(config(full(), window(tokens)))
    assert hybrid is not None
    manager: Any = SimpleNamespace(sliding_window=tokens, extra_retained_tokens=0)
    for boundary in range(1, 20):
        skipped = SlidingWindowManager.get_num_skipped_tokens(manager, boundary * 16) // 16
        assert hybrid.groups[1].needed(boundary) == range(skipped, boundary)


@pytest.mark.parametrize("tokens", [32, 64])
def test_a_chunk_needs_what_vllm_itself_keeps(tokens: int) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager

    hybrid = hybrid_of(config(full(), chunks(tokens)))
    assert hybrid is not None
    manager: Any = SimpleNamespace(attention_chunk_size=tokens)
    for boundary in range(1, 20):
        skipped = ChunkedLocalAttentionManager.get_num_skipped_tokens(manager, boundary * 16) // 16
        assert list(hybrid.groups[1].needed(boundary)) == list(range(skipped, boundary))


def test_hashes_are_those_of_the_smallest_block() -> None:
    """A wide block bears the name of its last hash, as vLLM's own view of the hashes has it in its end."""
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    hashes = [BlockHash(bytes([number]) * 32) for number in range(6)]
    wide = BlockHashListWithBlockSize(hashes, 16, 48)
    assert [bytes(wide[number])[-32:] for number in range(2)] == [hashes[2], hashes[5]]


def test_the_largest_request_is_counted_with_all_groups() -> None:
    hybrid = hybrid_of(config(full(), window(65), window(65)))
    assert hybrid is not None
    assert hybrid.request_blocks(1600) == 100 + 2 * 4
    assert hybrid.request_blocks(1590) == 100 + 2 * 4
    assert hybrid.request_blocks(32) == 2 + 2 * 2

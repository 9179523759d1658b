"""What KVBM serves and refuses meets here what vLLM itself makes of such models.

No engine is started: the specs, the groups they fall into and the answers about them are vLLM's own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.vllm_versions import VERSION
from kvbm.vllm_integration import support
from kvbm.vllm_integration.ranks import block_tokens
from kvbm.vllm_integration.support import unsupported_reason

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(VERSION < (0, 32), reason="this vLLM makes other objects of a configuration"),
]

BLOCK_TOKENS = 64


def vllm_config() -> Any:
    """As much of a configuration as is looked at."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, nnodes=1),
        cache_config=SimpleNamespace(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
    )


def cache_config(specs: dict[str, Any], hash_block_size: int = BLOCK_TOKENS) -> Any:
    """The configuration that vLLM's workers and scheduler get for layers with these specs."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import KVCacheConfig

    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=get_kv_cache_groups(vllm_config(), specs),
        hash_block_size=hash_block_size,
    )


def attention(head_size: int, dtype: torch.dtype) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=head_size, dtype=dtype)


def sparse_attention(cache_dtype: str) -> dict[str, Any]:
    """Two layers of DeepSeek V3.2: latent attention, and the cache of its indexer, from the class that makes it."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, get_kv_quant_mode

    indexer = SimpleNamespace(cache_config=vllm_config().cache_config, head_dim=132, dtype=torch.uint8)
    specs: dict[str, Any] = {}
    for layer in range(2):
        specs[f"model.layers.{layer}.self_attn.attn"] = MLAAttentionSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=1,
            head_size=576,
            dtype=torch.bfloat16 if cache_dtype == "auto" else torch.uint8,
            cache_dtype_str=cache_dtype,
            kv_quant_mode=get_kv_quant_mode(cache_dtype),
        )
        specs[f"model.layers.{layer}.self_attn.indexer.k_cache"] = DeepseekV32IndexerCache.get_kv_cache_spec(
            indexer, None
        )
    return specs


def test_layers_of_one_precision_are_served() -> None:
    found = cache_config({f"layer{i}": attention(64 * (1 + i), torch.bfloat16) for i in range(2)})
    assert unsupported_reason(vllm_config(), found) == ""


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("head_sizes", [(64, 64), (64, 128)], ids=["alike", "different"])
def test_ranks_that_share_the_tokens_of_a_block_name_it_as_vllm_does(
    ranks: int, head_sizes: tuple[int, ...]
) -> None:
    """decode_context_parallel_size: a contract test, since no CPU runs it."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes

    config = vllm_config()
    config.parallel_config.decode_context_parallel_size = ranks
    config.cache_config.prefix_match_unit = None
    config.kv_transfer_config = object()
    found = cache_config({f"layer{i}": attention(size, torch.bfloat16) for i, size in enumerate(head_sizes)})
    sizes = resolve_kv_cache_block_sizes(found, config)
    found.hash_block_size = sizes[1]
    for seen in (found, generate_scheduler_kv_cache_config([found])):  # a rank's, and the scheduler's
        spec = seen.kv_cache_groups[0].kv_cache_spec
        assert sizes == (block_tokens(config, spec),) * 2 == (BLOCK_TOKENS * ranks,) * 2
        assert unsupported_reason(config, seen) == ""


def test_layers_of_several_precisions_are_served() -> None:
    """V2 zeroes new blocks before it lets us read what they held: those that are stored are pinned."""
    found = cache_config({"layer0": attention(64, torch.bfloat16), "layer1": attention(64, torch.uint8)})
    assert len(found.kv_cache_groups) == 1
    assert found.needs_kv_cache_zeroing
    assert unsupported_reason(vllm_config(), found) == ""


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_sparse_attention_is_named_where_it_cannot_be_served(
    cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cache_config(sparse_attention(cache_dtype))
    assert len(found.kv_cache_groups) == 1
    assert found.needs_kv_cache_zeroing
    assert unsupported_reason(vllm_config(), found) == ""
    monkeypatch.setattr(support, "base", SimpleNamespace(KVConnectorBase_V1=object))
    reason = unsupported_reason(vllm_config(), found)
    assert (
        "sparse attention keeps the cache of an indexer (model.layers.0.self_attn.indexer.k_cache)" in reason
    )
    assert "mixes" not in reason
    assert "\n" not in reason


def test_latent_attention_without_an_indexer_is_served() -> None:
    found = cache_config(
        {name: spec for name, spec in sparse_attention("auto").items() if "indexer" not in name}
    )
    assert unsupported_reason(vllm_config(), found) == ""


def test_blocks_that_are_copied_when_written_to_are_refused() -> None:
    """V2 copies them before it lets us read what they held. Only hits inside a block lead to it."""
    from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator, get_kv_cache_coordinator

    found = cache_config({"layer0": attention(64, torch.bfloat16)}, hash_block_size=BLOCK_TOKENS // 2)
    assert "hashed every 32" in unsupported_reason(vllm_config(), found)
    # One group of layers never has such hits: vLLM says so itself. Beside recurrent layers stored blocks are pinned.
    assert not UnitaryKVCacheCoordinator.enable_partial_hash_hits
    arguments: dict[str, Any] = {
        "kv_cache_config": found,
        "max_model_len": 1024,
        "max_in_flight_tokens": 256,
        "use_eagle": False,
        "enable_caching": True,
        "enable_kv_cache_events": False,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        "scheduler_block_size": BLOCK_TOKENS,
    }
    assert isinstance(
        get_kv_cache_coordinator(**arguments, hash_block_size=BLOCK_TOKENS), UnitaryKVCacheCoordinator
    )
    with pytest.raises(AssertionError, match="hash_block_size == block_size"):
        get_kv_cache_coordinator(**arguments, hash_block_size=BLOCK_TOKENS // 2)


def test_vllm_says_which_runner_it_takes() -> None:
    """By a property of that name, which `runner.model_runner` asks for."""
    from vllm.config import VllmConfig

    assert isinstance(vars(VllmConfig)["use_v2_model_runner"], property)

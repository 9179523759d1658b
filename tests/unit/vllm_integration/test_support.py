"""The configurations that KVBM refuses to serve, each with one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.vllm_integration import support
from kvbm.vllm_integration.ranks import block_tokens
from kvbm.vllm_integration.runner import V1, V2, model_runner
from kvbm.vllm_integration.support import (
    kv_replicas,
    layerwise_is_free,
    layerwise_refusal,
    layout_notice,
    unsupported_reason,
)


class FullAttentionSpec:
    """Named as vLLM's, which is all that is looked at."""

    block_size = 16
    sliding_window: int | None = None


class SlidingWindowSpec(FullAttentionSpec):
    """The last tokens only."""

    sliding_window = 4096


class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """The tokens since the last multiple of a chunk."""

    attention_chunk_size = 4090


class MambaSpec(FullAttentionSpec):
    """Recurrent state."""

    mamba_cache_mode = "align"


class Unaligned(MambaSpec):
    mamba_cache_mode = "all"


class SinkFullAttentionSpec(FullAttentionSpec):
    """A kind that we do not know."""


class Windowed(FullAttentionSpec):
    """Layers with a window, of which vLLM keeps all tokens."""

    sliding_window = 4096


Windowed.__name__ = "FullAttentionSpec"
Unaligned.__name__ = "MambaSpec"


class UniformTypeKVCacheSpecs:
    """Layers of different shapes in one group."""

    block_size = 16

    def __init__(self, *specs: object, **named: object) -> None:
        self.kv_cache_specs = {**{f"layer{i}": spec for i, spec in enumerate(specs)}, **named}


INDEXED = UniformTypeKVCacheSpecs(**{"a.indexer.k": FullAttentionSpec()})
INDEXED_LINE = "indexer (a.indexer.k)"


def grouped(*specs: object) -> list[Any]:
    return [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer{i}"]) for i, spec in enumerate(specs)]


HYBRID = grouped(SlidingWindowSpec(), FullAttentionSpec())


def configuration(spec: object | None = None, **changes: Any) -> tuple[Any, Any]:
    parallel = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "nnodes": 1}
    cache = {"enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256"}
    groups = grouped(spec or FullAttentionSpec())
    found: dict[str, Any] = {"kv_cache_groups": groups, "needs_kv_cache_zeroing": False}
    for name, value in changes.items():
        owner = next((o for o in (parallel, cache, found) if name in o), parallel)
        owner[name] = value
    vllm = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(**cache),
    )
    return vllm, SimpleNamespace(**found)


def test_blocks_of_another_pool_are_not_served() -> None:
    vllm, cache = configuration()
    cache.kv_cache_groups[0].host_resident = True
    assert "host memory" in unsupported_reason(vllm, cache)


def test_full_attention_is_served() -> None:
    assert unsupported_reason(*configuration()) == ""
    same = UniformTypeKVCacheSpecs(FullAttentionSpec(), FullAttentionSpec())
    assert unsupported_reason(*configuration(same)) == ""
    assert unsupported_reason(*configuration(Windowed())) == ""


def test_several_ranks_of_one_node_are_served() -> None:
    assert unsupported_reason(*configuration(pipeline_parallel_size=2, tensor_parallel_size=2)) == ""


def test_ranks_that_share_the_tokens_of_a_block_are_served() -> None:
    """The specification has one rank's tokens of a block, and the hashes are of whole blocks."""
    vllm, cache = configuration(decode_context_parallel_size=4, tensor_parallel_size=4)
    cache.hash_block_size = 64
    assert block_tokens(vllm, FullAttentionSpec()) == 64
    assert unsupported_reason(vllm, cache) == ""
    cache.hash_block_size = 16
    assert "blocks of 64 tokens are hashed every 16" in unsupported_reason(vllm, cache)


def test_a_group_that_every_rank_has_in_whole_is_counted_so() -> None:
    whole = FullAttentionSpec()
    whole.dcp_sharded = False  # type: ignore[attr-defined]
    vllm, cache = configuration(whole, decode_context_parallel_size=4, hash_block_size=16)
    assert block_tokens(vllm, whole) == 16
    assert unsupported_reason(vllm, cache) == ""


@pytest.mark.parametrize(("sharing", "known", "replicas"), [(1, 1, 4), (1, 4, 4), (4, 1, 1), (2, 1, 1)])
def test_ranks_that_share_tokens_hold_no_copies(sharing: int, known: int, replicas: int) -> None:
    """Of MLA all tensor-parallel ranks hold the same, unless each has tokens of its own."""
    vllm, cache = configuration(decode_context_parallel_size=sharing, tensor_parallel_size=4)
    vllm.model_config = SimpleNamespace(use_mla=True)
    cache.kv_tp_replicas = known
    assert kv_replicas(vllm, cache) == replicas


@pytest.mark.parametrize("kind", [SlidingWindowSpec, MambaSpec, ChunkedLocalAttentionSpec])
def test_kinds_of_layers_that_do_not_need_all_tokens_are_served(kind: type[Any]) -> None:
    spec = kind()
    if kind is ChunkedLocalAttentionSpec:
        spec.attention_chunk_size = 4096
    for groups in (grouped(spec), grouped(spec, spec, FullAttentionSpec())):
        found = configuration(kv_cache_groups=groups, needs_kv_cache_zeroing=kind is MambaSpec)
        assert unsupported_reason(*found) == ""


def test_an_older_vllm_serves_models_of_one_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(KVConnectorBase_V1=object)
    monkeypatch.setattr(support, "base", older)
    assert "FullAttentionSpec, SlidingWindowSpec, whose failed loads" in unsupported_reason(
        *configuration(kv_cache_groups=HYBRID)
    )
    assert unsupported_reason(*configuration()) == ""
    for word, spec in (
        ("mixes precisions", None),
        ("recurrent layers", MambaSpec()),
        (INDEXED_LINE, INDEXED),
    ):
        reason = unsupported_reason(*configuration(spec, needs_kv_cache_zeroing=True))
        assert word in reason
        assert "vLLM 0.32" in reason
        assert "\n" not in reason


@pytest.mark.parametrize(
    ("word", "spec", "changes"),
    [
        ("enable_prefix_caching", None, {"enable_prefix_caching": False}),
        ("decode_context_parallel_size=2", None, {"kv_cache_groups": HYBRID, "decode_context_parallel_size": 2}),
        ("prefill_context_parallel_size=2", None, {"prefill_context_parallel_size": 2}),
        ("no KV cache group", None, {"kv_cache_groups": []}),
        ("prefix_caching_hash_algo", None, {"kv_cache_groups": HYBRID, "prefix_caching_hash_algo": "xxhash"}),
        ("is a SinkFullAttentionSpec", SinkFullAttentionSpec(), {}),
        ("attention_chunk_size=4090", ChunkedLocalAttentionSpec(), {}),
        ("mamba_cache_mode=all", Unaligned(), {}),
        ("FullAttentionSpec and S", UniformTypeKVCacheSpecs(FullAttentionSpec(), SlidingWindowSpec()), {}),
        ("hashed every 8", None, {"hash_block_size": 8}),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_said_in_one_line(word: str, spec: object, changes: dict[str, Any]) -> None:
    vllm, cache = configuration(spec, **{k: v for k, v in changes.items() if k != "hash_block_size"})
    if "hash_block_size" in changes:
        cache.hash_block_size = changes["hash_block_size"]
    reason = unsupported_reason(vllm, cache)
    assert word in reason
    assert "\n" not in reason


def test_a_layout_that_this_vllm_does_not_offer_is_said() -> None:
    assert layout_notice("block", has_block_layouts=False).startswith(
        "DYN_KVBM_KV_LAYOUT=block has no effect"
    )
    assert layout_notice("block", has_block_layouts=True) == ""
    assert layout_notice("engine", has_block_layouts=False) == ""


@pytest.mark.parametrize("graphs", ["NONE", "PIECEWISE", "FULL", None])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("runner", [V1, V2])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_loads_beside_the_forward_pass(
    policy: str, runner: str, asynchronous: bool, graphs: str | None
) -> None:
    """V2 survives no failure of such a load, V1 none under asynchronous scheduling, where failures are recomputed."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        use_v2_model_runner=runner == V2,
        compilation_config=SimpleNamespace(cudagraph_mode=graphs and SimpleNamespace(name=graphs)),
    )
    assert layerwise_is_free(config) == (
        (policy, runner, asynchronous, graphs) == ("recompute", V1, False, "NONE")
    )
    reason = layerwise_refusal(config)
    assert bool(reason) == (policy == "recompute" and (runner == V2 or asynchronous))
    assert ("Model Runner V2" in reason) == (policy == "recompute" and runner == V2)
    assert "\n" not in reason


def test_the_runner_is_what_vllm_says() -> None:
    assert model_runner(SimpleNamespace(use_v2_model_runner=True)) == V2
    assert model_runner(SimpleNamespace(use_v2_model_runner=False)) == V1
    assert model_runner(SimpleNamespace()) == V1

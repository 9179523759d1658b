"""Can this model be served? One clear line when not, so that an engine never starts half-working."""

from __future__ import annotations

from typing import Any

SUPPORTED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why KVBM stays off for this configuration, in one line; empty when it can serve."""
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if not vllm_config.cache_config.enable_prefix_caching:
        # Without it vLLM may name images by request instead of by content: other images would share a name after a
        # restart.
        return "prefix caching is off (enable_prefix_caching), so block hashes do not name contents"
    if parallel.pipeline_parallel_size > 1:
        return f"pipeline_parallel_size={parallel.pipeline_parallel_size}; accepted is 1"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name}={getattr(parallel, name)}; accepted is 1"
    if getattr(parallel, "nnodes", 1) > 1:
        return f"nnodes={parallel.nnodes}: ranks on other nodes cannot share host memory; accepted is 1"
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        return f"the model has {len(groups)} KV cache groups ({kinds or 'none'}); accepted is one"
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        # The engine then zeroes a block anew before we have read what it held.
        return (
            "its KV cache mixes precisions, so the engine zeroes blocks before use; accepted is one precision"
        )
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind == "UniformTypeKVCacheSpecs":
        layers = {type(layer).__name__ for layer in spec.kv_cache_specs.values()}
        kind = layers.pop() if len(layers) == 1 else kind
    if kind not in SUPPORTED_SPECS:
        return f"its KV cache is a {kind}; accepted are {', '.join(SUPPORTED_SPECS)}"
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        return (
            "its attention has a window, so old blocks are dropped by the engine; accepted is full attention"
        )
    hash_block_size = getattr(kv_cache_config, "hash_block_size", None) or spec.block_size
    if hash_block_size != spec.block_size:
        return f"blocks of {spec.block_size} tokens are hashed every {hash_block_size}; accepted is the same size"
    return ""


def layerwise_refusal(vllm_config: Any) -> str:
    """Why loads cannot run beside the forward pass that needs them, in one line; empty when they can.

    Such a load that fails has its request computed again. vLLM then keeps a place for the token of the step that
    it had planned ahead, and reads one that was never computed (its issue 45138; seen in 0.32).
    """
    transfer, scheduler = vllm_config.kv_transfer_config, vllm_config.scheduler_config
    if getattr(scheduler, "async_scheduling", False) and transfer.kv_load_failure_policy == "recompute":
        return (
            "under asynchronous scheduling vLLM does not survive such a load's failure with "
            "kv_load_failure_policy=recompute; start it with --no-async-scheduling"
        )
    return ""


def layout_notice(kv_layout: str, has_block_layouts: bool) -> str:
    """What there is to say of the layout that was asked for, in one line; empty where this vLLM can be asked for it."""
    if kv_layout == "block" and not has_block_layouts:
        return "DYN_KVBM_KV_LAYOUT=block has no effect: this vLLM leaves no choice; from 0.29 on it does"
    return ""


def kv_replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many consecutive ranks hold identical KV (MLA under tensor parallelism), at least 1."""
    known = int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)
    if known > 1:
        return known
    tensor_parallel = int(vllm_config.parallel_config.tensor_parallel_size)
    return tensor_parallel if vllm_config.model_config.use_mla else 1

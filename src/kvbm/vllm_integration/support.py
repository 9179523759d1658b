"""Can this model be served? One clear line when not, so that an engine never starts half-working."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvbm.groups import GroupKind
from kvbm.vllm_integration.block_hashes import hashes_are_deterministic
from kvbm.vllm_integration.hybrid import SUPPORTED_SPECS, cacheable_groups, hybrid_of, kind_of
from kvbm.vllm_integration.ranks import block_tokens, context_parallel
from kvbm.vllm_integration.runner import V2, model_runner
from kvbm.vllm_integration.under_ray import unheard_stages

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
except ImportError:  # without vLLM there is nothing to ask it for
    base = None


def answers_are_merged() -> bool:
    """Whether several connectors may tell a client something (`kv_transfer_params` of the response): in vLLM < 0.32 a
    second one that does so ends the engine, and a connector does not know whether it is alone."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    return hasattr(MultiConnector, "_aggregate_request_finished")


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why KVBM stays off for this configuration, in one line; empty when it can serve."""
    parallel = vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        # Without it vLLM may name images by request instead of by content: other images would share a name after a
        # restart.
        return "prefix caching is off (enable_prefix_caching), so block hashes do not name contents"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return f"prefill_context_parallel_size={parallel.prefill_context_parallel_size}; accepted is 1"
    return unheard_stages(vllm_config) or _unsupported_groups(vllm_config, kv_cache_config)


def _unsupported_groups(vllm_config: Any, kv_cache_config: Any) -> str:
    """The same, of the model's kinds of layers."""
    groups = kv_cache_config.kv_cache_groups
    if not groups or not cacheable_groups(kv_cache_config):
        return "the model has no KV cache group whose blocks are named by content"
    if any(getattr(group, "host_resident", False) for group in groups):
        return "a group of the model's layers has its blocks in host memory; accepted are the device's own"
    for number, spec in cacheable_groups(kv_cache_config):
        if reason := _unsupported_spec(groups[number], spec):
            return reason
    zeroes = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
    if zeroes and not hasattr(getattr(base, "KVConnectorBase_V1", None), "get_loaded_kv_cache_group_ids"):
        # Blocks that a load fills are zeroed too. (Those that are stored are pinned, see `leader.stores`.)
        return f"{_why_zeroed(groups)}, so the engine zeroes blocks before use; accepted from vLLM 0.32 on"
    hybrid = hybrid_of(kv_cache_config)
    if hybrid is None:
        size = block_tokens(vllm_config, groups[0].kv_cache_spec)
        hashed = getattr(kv_cache_config, "hash_block_size", None) or size
        if hashed != size:
            return f"blocks of {size} tokens are hashed every {hashed}; accepted is the same size"
        return ""
    if context_parallel(vllm_config) > 1:
        return (
            f"decode_context_parallel_size={context_parallel(vllm_config)} with several kinds of layers; "
            "accepted is 1, or a model whose layers all need all tokens"
        )
    if not hasattr(base, "KVConnectorTransferResults"):
        # It can only name blocks whose load failed, which it does not accept of several groups.
        kinds = ", ".join(sorted({type(spec).__name__ for _, spec in cacheable_groups(kv_cache_config)}))
        return f"the model's KV cache is a {kinds}, whose failed loads cannot be told; accepted from vLLM 0.32 on"
    if not hashes_are_deterministic(vllm_config):
        return "several KV cache groups need prefix_caching_hash_algo=sha256"
    return ""


def _unsupported_spec(group: Any, spec: Any) -> str:
    layers = {type(each).__name__ for _, each in _layers(group)}
    if kind_of(spec) is None or len(layers) > 1:
        kind = " and ".join(sorted(layers))
        return f"its KV cache is a {kind}; accepted are {', '.join(SUPPORTED_SPECS)}"
    chunk, size = getattr(spec, "attention_chunk_size", None), int(spec.block_size)
    if chunk and chunk % size:
        return f"attention_chunk_size={chunk} is no multiple of the block size {size}"
    if kind_of(spec) is GroupKind.STATE and getattr(spec, "mamba_cache_mode", "align") != "align":
        return f"mamba_cache_mode={spec.mamba_cache_mode}; accepted is align, which keeps states at block boundaries"
    return ""


def _why_zeroed(groups: Any) -> str:
    """The reason why the engine zeroes the blocks of these groups."""
    layers = {name: spec for group in groups for name, spec in _layers(group)}
    if any("Mamba" in type(spec).__name__ for spec in layers.values()):
        return "it has recurrent layers"
    indexed = [
        name
        for name, spec in layers.items()
        if getattr(getattr(spec, "cache_role", None), "name", "") == "INDEXER" or ".indexer." in name
    ]
    if indexed:
        # DeepSeek V3.2 and its like: a cache of its own tells which tokens a layer attends to.
        return f"its sparse attention keeps the cache of an indexer ({indexed[0]}) in another precision beside the KV"
    return "its KV cache mixes precisions"


def _layers(group: Any) -> Iterator[tuple[str, Any]]:
    """The layers of a group with their specs: one each where they differ in size, else the group's."""
    spec = group.kv_cache_spec
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        yield from spec.kv_cache_specs.items()
    else:
        yield from ((name, spec) for name in group.layer_names)


def layerwise_refusal(vllm_config: Any) -> str:
    """Why loads cannot run beside the forward pass that needs them, in one line; empty when they can.

    Such a load that fails has its request computed again under the policy `recompute`. V2 then goes on from where the
    load would have ended, however steps are scheduled (vLLM's issue 49250). V1 under asynchronous scheduling keeps a
    place for the token of the step that it had planned ahead, and reads one that was never computed (its issue 45138).
    Both seen in 0.32.
    """
    transfer, scheduler = vllm_config.kv_transfer_config, vllm_config.scheduler_config
    if transfer.kv_load_failure_policy != "recompute":
        return ""
    if model_runner(vllm_config) == V2:
        return (
            "after such a load's failure vLLM's Model Runner V2 computes wrong text with "
            "kv_load_failure_policy=recompute; start it with kv_load_failure_policy=fail, or with V1 "
            "(VLLM_USE_V2_MODEL_RUNNER=0) and --no-async-scheduling"
        )
    if getattr(scheduler, "async_scheduling", False):
        return (
            "under asynchronous scheduling vLLM does not survive such a load's failure with "
            "kv_load_failure_policy=recompute; start it with --no-async-scheduling"
        )
    return ""


def layerwise_is_free(vllm_config: Any) -> bool:
    """Whether loads beside the forward pass cost this engine nothing: no graph is replayed for whole steps, and a load
    that fails costs no request, only its computation."""
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    return (
        vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        and not layerwise_refusal(vllm_config)
        and getattr(mode, "name", "") == "NONE"
    )


def layout_notice(kv_layout: str, has_block_layouts: bool) -> str:
    """A warning, in one line, where this vLLM has no choice of layouts; empty where it has."""
    if kv_layout == "block" and not has_block_layouts:
        return "DYN_KVBM_KV_LAYOUT=block has no effect: this vLLM leaves no choice; from 0.29 on it does"
    return ""


def kv_replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many consecutive ranks hold identical KV (MLA under tensor parallelism), at least 1."""
    if context_parallel(vllm_config) > 1:
        return 1  # each has tokens of its own
    known = int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)
    if known > 1:
        return known
    tensor_parallel = int(vllm_config.parallel_config.tensor_parallel_size)
    return tensor_parallel if vllm_config.model_config.use_mla else 1

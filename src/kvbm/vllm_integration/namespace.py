"""The facts that must agree before two vLLM engines share bytes: taken from the loaded model, not from settings alone.

They are taken in the worker, when the model is loaded and its KV cache exists. Models write their own decisions into
their configuration (Llama 4 its attention temperature, from `max_model_len`), so it is read then, too. Names (paths,
served names, versions of files' writers) are left out, and facts that change results by no more than rounding.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvbm.errors import KvbmError
from kvbm.groups import Group, GroupKind
from kvbm.layout import Namespace
from kvbm.strict import record_swallowed
from kvbm.vllm_integration.hybrid import cacheable_groups, hybrid_of, kind_of
from kvbm.vllm_integration.ranks import block_tokens, context_parallel, gather
from kvbm.vllm_integration.rotary import rotary_digest, rotary_modules
from kvbm.vllm_integration.weight_files import (
    UNKNOWN_WEIGHTS,
    reads_the_files,
    this_start,
    weights_name,
)
from kvbm.weights import canonical_config

log = logging.getLogger("kvbm.vllm")

_ATTENTION_FACTS = (
    "num_heads",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "scale",
    "sliding_window",
    "logits_soft_cap",
    "alibi_slopes",
    "attn_type",
    "kv_cache_dtype",
    "kv_sharing_target_layer_name",
    "use_mm_prefix",
)
_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
_ENCODER_FACTS = (
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
)
_QUANTIZED_KERNELS = ("linear_backend", "linear_backend_per_quant", "moe_backend")
_QUANTIZING_VARIABLES = ("QUANT", "FP4", "FP8", "INT4", "W4A8", "MARLIN")
"""Parts of the names of vLLM's variables that choose how quantized weights are multiplied: some kernels quantize
activations too."""

_GUESSES_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""These look guesses up in the text: an engine that does so computes the same KV as one that does not."""

_ADAPTER_FACTS = ("lora_dtype", "lora_target_modules", "target_modules", "enable_tower_connector_lora")


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one rank that may differ between ranks. `error`: why they could not be found out."""

    weights: str = ""
    rotary: str = ""
    attention: str = ""
    kv_scales: str = ""
    packing: str = ""
    device_layout: str = ""
    start: str = ""
    error: str = ""


def engine_namespace(
    vllm_config: Any, kv_cache_config: Any, device_layout: str, memo_path: Path
) -> Namespace:
    """The namespace of an engine; every rank calls this at the same point, and gets the same one.

    `device_layout` describes the meaning of a block's bytes on this rank's device. Raises KvbmError in one line when
    the facts of some rank could not be found out.
    """
    parallel = vllm_config.parallel_config
    try:
        part = _rank_part(vllm_config, kv_cache_config, device_layout)
        if reads_the_files(parallel):
            part = msgspec.structs.replace(part, weights=weights_name(vllm_config, memo_path))
    except Exception as error:  # another rank waits for our part, whatever happened
        record_swallowed(error)
        log.debug("the facts of this rank could not be found out", exc_info=True)
        part = RankPart(error=f"rank {parallel.rank}: {type(error).__name__}: {' '.join(str(error).split())}")
    parts = tuple(
        msgspec.json.decode(each, type=RankPart) for each in gather(parallel, msgspec.json.encode(part))
    )
    errors = [part.error for part in parts if part.error]
    if errors:
        raise KvbmError(f"the facts of this engine's KV could not be found out: {errors[0]}")
    try:
        return _compose(vllm_config, kv_cache_config, parts)
    except Exception as error:  # a configuration that we cannot read is no reason not to serve
        record_swallowed(error)
        log.debug("the facts of this engine could not be put together", exc_info=True)
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise KvbmError(f"the facts of this engine's KV could not be found out: {text}") from None


def cpu_packing(vllm_config: Any, spec: Any, layers: Iterable[Any]) -> str:
    """How this CPU's attention packs a block: blocks of one instruction set are garbage to another.

    The packing is a kernel's, and its shape does not show it: another release may pack otherwise under the same name.
    """
    chosen = sorted({str(layer.isa) for layer in layers if getattr(layer, "isa", None)})
    if not chosen:
        chosen = [_instruction_set(vllm_config.model_config.dtype, spec)]
    return f"{'+'.join(chosen)}/{_release()}"


def _compose(vllm_config: Any, kv_cache_config: Any, parts: tuple[RankPart, ...]) -> Namespace:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    hybrid = hybrid_of(kv_cache_config)
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    weights = parts[0].weights
    fields = [
        ("weights", weights),
        ("loading", _loading(vllm_config)),
        ("config", _digest(canonical_config(model.hf_config.to_dict()))),
        ("implementation", _implementation(model)),
        ("release", _release()),
        ("dtype", str(model.dtype)),
        ("quantization", str(model.quantization)),
        ("kv_dtype", str(cache.cache_dtype)),
        ("block_tokens", str(block_tokens(vllm_config, spec) if hybrid is None else hybrid.block_tokens)),
        ("tensor_parallel", str(vllm_config.parallel_config.tensor_parallel_size)),
    ]
    for name in ("rotary", "attention", "kv_scales", "packing", "device_layout"):
        values = [getattr(part, name) for part in parts]
        fields.append((name, values[0] if len(set(values)) == 1 else _digest(repr(values))))
    fields += [(name, value) for name, value in _optional_facts(vllm_config).items() if value]
    if hybrid is not None:
        fields.append(("groups", " ".join(map(_group_fact, hybrid.groups))))
    # Scales that are computed from the first prompt are this engine's own.
    own_scales = bool(getattr(cache, "calculate_kv_scales", False))
    ephemeral = weights.startswith(UNKNOWN_WEIGHTS) or own_scales
    if own_scales:
        fields.append(("computed_kv_scales", parts[0].start))
    name = str(model.served_model_name or model.model)
    return Namespace(model=name, fields=tuple(fields), ephemeral=ephemeral)


def _rank_part(vllm_config: Any, kv_cache_config: Any, device_layout: str) -> RankPart:
    groups = kv_cache_config.kv_cache_groups
    _refuse_moving_rotary(vllm_config.model_config)
    context = vllm_config.compilation_config.static_forward_context
    layers = {name: context[name] for group in groups for name in group.layer_names if name in context}
    attention = next(
        (spec for _, spec in cacheable_groups(kv_cache_config) if kind_of(spec) is not GroupKind.STATE), None
    )
    return RankPart(
        rotary=rotary_digest(rotary_modules()),
        attention=_digest("\n".join(_attention(layer) for layer in layers.values())),
        kv_scales=_digest("\n".join(_scales(layer) for layer in layers.values())),
        packing=cpu_packing(vllm_config, attention, layers.values()) if _on_cpu() and attention else "none",
        device_layout=_digest(device_layout),
        start=this_start(vllm_config),
    )


def _group_fact(group: Group) -> str:
    return f"{group.kind.value}:{group.span}:{group.reach}"


def _attention(layer: Any) -> str:
    """The facts of one attention layer: its computation, and its form of K and V."""
    implementation: Any = getattr(layer, "impl", None)
    backend: Any = getattr(layer, "attn_backend", None)
    facts = [type(layer).__name__, type(implementation).__name__]
    facts.append(str(backend.get_name()) if backend is not None else "")
    for name in _ATTENTION_FACTS:
        value = getattr(implementation, name, None)
        facts.append(f"{name}={_plain(getattr(layer, name, None) if value is None else value)}")
    facts.append(f"sinks={_plain(getattr(implementation, 'sinks', None))}")
    return " ".join(facts)


def _scales(layer: Any) -> str:
    """The scales of a quantized cache; those of queries change the input of deeper layers, and so their KV."""
    return " ".join(f"{name}={_plain(getattr(layer, name, None))}" for name in _SCALES)


def _plain(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.detach().float().cpu().tolist())
    return str(value)


def _instruction_set(dtype: torch.dtype, spec: Any) -> str:
    """vLLM's choice, where its layers do not show it."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    return str(_get_attn_isa(dtype, spec.block_size, getattr(spec, "head_size", None)))


def _loading(vllm_config: Any) -> str:
    """How files become weights."""
    model, load = vllm_config.model_config, vllm_config.load_config
    facts: Mapping[str, Any] = {
        "format": str(load.load_format),
        "ignored": load.ignore_patterns,
        "extra": load.model_loader_extra_config,
        "quantization": getattr(model, "quantization_config", None),
        "classes": getattr(model, "model_class_overrides", None),
    }
    return _digest(repr(sorted((name, str(value)) for name, value in facts.items() if value)))


def _optional_facts(vllm_config: Any) -> dict[str, str]:
    """Facts that only some engines have: an encoder for images and sound, adapters, a draft model."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    lora = getattr(vllm_config, "lora_config", None)
    speculative = getattr(vllm_config, "speculative_config", None)
    return {
        "encoder": _facts(multimodal, _ENCODER_FACTS),
        "adapters": _facts(lora, _ADAPTER_FACTS),
        "speculative": guessing(speculative),
        "pipeline_parallel": _if_several(vllm_config.parallel_config.pipeline_parallel_size),
        "context_parallel": _context_parallel(vllm_config),
        "quantized_kernels": _quantized_kernels(vllm_config),
        "matmul_precision": _matmul_precision(),
    }


def guessing(speculative: Any) -> str:
    """How an engine guesses tokens, where that has layers with KV of its own; empty elsewhere."""
    method = str(getattr(speculative, "method", "") or "")
    return "" if method in _GUESSES_WITHOUT_LAYERS else method


def _if_several(count: Any) -> str:
    return str(count) if int(count) > 1 else ""


def _context_parallel(vllm_config: Any) -> str:
    """Which rank has which tokens of a block."""
    ranks = context_parallel(vllm_config)
    interleaved = getattr(vllm_config.parallel_config, "cp_kv_cache_interleave_size", 1)
    return f"{ranks} in turns of {interleaved}" if ranks > 1 else ""


def _quantized_kernels(vllm_config: Any) -> str:
    """The settings that choose the kernels of quantized weights; for others kernels differ by rounding only."""
    if vllm_config.model_config.quantization is None and getattr(vllm_config, "quant_config", None) is None:
        return ""
    from vllm import envs

    names = [name for name in dir(envs) if name.startswith("VLLM_")]
    chosen = [name for name in names if any(part in name for part in _QUANTIZING_VARIABLES)]
    facts = [f"{name}={getattr(envs, name, None)}" for name in sorted(chosen)]
    kernels = getattr(vllm_config, "kernel_config", None)
    facts += [f"{name}={getattr(kernels, name, None)}" for name in _QUANTIZED_KERNELS]
    facts.append(f"all2all={getattr(vllm_config.parallel_config, 'all2all_backend', None)}")
    if torch.cuda.is_available():
        facts.append(f"device={torch.cuda.get_device_capability()}")
    return _digest("\n".join(facts))


def _matmul_precision() -> str:
    """How float32 matrices are multiplied, where it is not in float32."""
    from vllm import envs

    chosen = str(getattr(envs, "VLLM_FLOAT32_MATMUL_PRECISION", "highest"))
    return "" if chosen == "highest" else chosen


def _implementation(model: Any) -> str:
    """The class that computes: the same architecture may be implemented more than once."""
    try:
        from vllm.model_executor.model_loader import get_model_cls

        found = get_model_cls(model)
    except Exception as error:  # its module differs between releases
        record_swallowed(error)
        log.debug("the model's class is not known", exc_info=True)
        return str(getattr(model, "model_impl", "auto"))
    return f"{found.__module__}.{found.__qualname__}"


def _release() -> str:
    """vLLM's release: another one may compute or pack otherwise, and no configuration shows it."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def _refuse_moving_rotary(model: Any) -> None:
    """Raise KvbmError where one position's K depends on which others are computed beside it."""
    parameters = getattr(model.hf_text_config, "rope_parameters", None) or {}
    kinds = {
        str(value.get("rope_type")) for value in (parameters, *parameters.values()) if isinstance(value, dict)
    }
    moving = sorted(kinds & {"dynamic", "longrope"})
    if moving and "Transformers" in _implementation(model).rpartition(".")[2]:
        raise KvbmError(
            f"rope_type={moving[0]} under model_impl=transformers changes with the longest prompt of a batch; "
            "accepted is vLLM's own implementation of the model"
        )


def _facts(config: Any, names: Iterable[str]) -> str:
    if config is None:
        return ""
    found = [(name, str(getattr(config, name))) for name in names if getattr(config, name, None) is not None]
    return _digest(repr(found))


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]

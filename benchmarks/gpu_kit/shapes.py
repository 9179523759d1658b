"""Models that are a `config.json` and nothing else: the shapes of well-known ones, with weights made in memory.

vLLM's own dummy weights are so small that what is computed hardly depends on the KV. `peaky_weights` replaces them,
so that wrong KV shows in the text. Nothing is downloaded, and no file of weights is written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SEED = 1234
QK_NORM = 2.0
_ALL: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 40_960,
}
_LLAMA = {
    **_ALL,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,  # Llama-3.1-8B
    "fp8": _LLAMA,
    "mla": {  # DeepSeek-V2-Lite
        **_ALL,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102_400,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rope_theta": 1e4,
    },
}
_SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
}
_SMALL_MORE: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "fp8": {"num_key_value_heads": 2},
    "mla": {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
}


def write_shape(folder: Path, shape: str, *, small: bool, layers: int = 0) -> Path:
    """The model's directory, with that many layers (0: all). With `small` it keeps its kind and loses its size."""
    config = dict(CONFIGS[shape])
    if small:
        config |= {name: value for name, value in _SMALL.items() if name in config} | _SMALL_MORE[shape]
    elif layers:
        config["num_hidden_layers"] = layers
    target = folder / f"{shape}-{'small' if small else layers or 'all'}"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return target


def peaky_weights() -> None:
    """From now on vLLM's dummy weights in this process are those of `_fill`; equal for every engine."""
    from vllm.model_executor.model_loader import dummy_loader

    count = 0

    def fill(weight: Any, *_: Any, **__: Any) -> None:
        nonlocal count
        count += 1
        _fill(weight, SEED + count)

    dummy_loader.initialize_single_dummy_weight = fill


def _fill(weight: Any, seed: int) -> None:
    import torch

    if not weight.is_floating_point():
        return
    if weight.dim() < 2:
        # A norm; those of one head's size make attention peaky.
        weight.data.fill_(QK_NORM if weight.numel() in (64, 128) else 1.0)
        return
    generator = torch.Generator(device=weight.device).manual_seed(seed)
    weight.data.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)

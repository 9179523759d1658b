"""A tiny Phi-3 with LongRoPE and real weights: which of its factors an engine takes depends on `max_model_len`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

ORIGINAL_POSITIONS = 768
"""An engine with a larger `max_model_len` takes the long factors, at every position."""

_LAYERS, _HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD, _VOCABULARY = 2, 256, 512, 4, 2, 64, 4096


def make_longrope_model(directory: Path) -> Path:
    """The model in `directory`, in fp32. Its attention is peaky: other K shows as other text."""
    directory.mkdir(parents=True)
    half = _HEAD // 2
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": 4 * ORIGINAL_POSITIONS,
        "original_max_position_embeddings": ORIGINAL_POSITIONS,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + i / half for i in range(half)],
            "long_factor": [4.0 + 8.0 * i / half for i in range(half)],
        },
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_weights(), str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(77)

    def random(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.empty(rows, columns).normal_(0.0, gain * columns**-0.5, generator=generator)

    weights = {"model.embed_tokens.weight": random(_VOCABULARY, _HIDDEN, gain=_HIDDEN**0.5)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        query_key = random((_HEADS + _KV_HEADS) * _HEAD, _HIDDEN, gain=2.0)
        value = random(_KV_HEADS * _HEAD, _HIDDEN)
        weights |= {
            f"{prefix}.self_attn.qkv_proj.weight": torch.cat((query_key, value)),
            f"{prefix}.self_attn.o_proj.weight": random(_HIDDEN, _HEADS * _HEAD),
            f"{prefix}.mlp.gate_up_proj.weight": random(2 * _INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": random(_HIDDEN, _INTERMEDIATE),
            f"{prefix}.input_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
        }
    weights["model.norm.weight"] = torch.ones(_HIDDEN)
    weights["lm_head.weight"] = random(_VOCABULARY, _HIDDEN)
    return weights

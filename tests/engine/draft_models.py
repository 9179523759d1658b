"""Draft models for speculative decoding, with random weights: their guesses are bad, and their KV is as real as any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SEED = 7
LAYER = "layers.0"
EAGLE3_READS = [0, 1]
"""Behind which of the target's layers EAGLE-3 reads the hidden states."""


def make_eagle(directory: Path, target: Path, kv_heads: int) -> Path:
    """An EAGLE head of one layer, with other heads of KV than the target whose embeddings and output head it shares."""
    config = _config(target)
    hidden = config["hidden_size"]
    weights = {
        "fc.weight": (hidden, 2 * hidden),
        f"{LAYER}.post_attention_layernorm.weight": (hidden,),
        **_layer({**config, "num_key_value_heads": kv_heads}, hidden),
    }
    return _write(
        directory,
        {
            **config,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "num_key_value_heads": kv_heads,
        },
        weights,
    )


def make_eagle3(directory: Path, target: Path, window: int) -> Path:
    """An EAGLE-3 head of one layer that attends to the last `window` tokens only: a group of its own."""
    config = _config(target)
    hidden = config["hidden_size"]
    weights = {
        "fc.weight": (hidden, len(EAGLE3_READS) * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
        f"{LAYER}.input_layernorm.weight": (hidden,),
        f"{LAYER}.hidden_norm.weight": (hidden,),
        f"{LAYER}.post_attention_layernorm.weight": (hidden,),
        f"{LAYER}.self_attn.q_norm.weight": (config["head_dim"],),
        f"{LAYER}.self_attn.k_norm.weight": (config["head_dim"],),
        **_layer(config, 2 * hidden),
    }
    return _write(
        directory,
        {
            **config,
            "architectures": ["Eagle3Qwen3ForCausalLM"],
            "num_hidden_layers": 1,
            "eagle_aux_hidden_state_layer_ids": EAGLE3_READS,
            "draft_vocab_size": config["vocab_size"],
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention"],
        },
        weights,
    )


def make_draft_model(directory: Path, target: Path, noise: float) -> Path:
    """The target itself with its weights disturbed by this share of their size: some of its guesses are right."""
    generator = torch.Generator().manual_seed(SEED)
    weights = load_file(target / "model.safetensors")
    for weight in weights.values():
        scale = noise * weight.std() if weight.dim() > 1 else 0.0
        weight += scale * torch.empty(weight.shape).normal_(generator=generator)
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(_config(target), indent=1))
    return directory


def _config(target: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    return config


def _layer(config: dict[str, Any], inputs: int) -> dict[str, tuple[int, int]]:
    """The matrices of a layer whose attention has so many inputs."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        f"{LAYER}.self_attn.q_proj.weight": (queries, inputs),
        f"{LAYER}.self_attn.k_proj.weight": (keys, inputs),
        f"{LAYER}.self_attn.v_proj.weight": (keys, inputs),
        f"{LAYER}.self_attn.o_proj.weight": (hidden, queries),
        f"{LAYER}.mlp.gate_proj.weight": (inner, hidden),
        f"{LAYER}.mlp.up_proj.weight": (inner, hidden),
        f"{LAYER}.mlp.down_proj.weight": (hidden, inner),
    }


def _write(directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    generator = torch.Generator().manual_seed(SEED)
    dtype = getattr(torch, config["torch_dtype"])
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        weight = torch.ones(shape)
        if len(shape) == 2:
            weight.normal_(0.0, shape[1] ** -0.5, generator=generator)
        weights[name] = weight.to(dtype)
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory

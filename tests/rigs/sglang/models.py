"""Models for tests under SGLang beyond the tiny one: latent attention, and an adapter. Random weights from a seed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvbm.testing.tiny_model import SHAPES

LATENT_SEED = 3
LATENT = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "rope_theta": 10000.0,
    },
}
ADAPTER_RANK = 4


def make_latent_model(directory: Path) -> Path:
    """A DeepSeek-V2 of two dense layers: one row of 96 values per token and layer, alike on all ranks."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(LATENT_SEED)
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**LATENT)).float()
    model.save_pretrained(directory)
    path = directory / "config.json"
    # SGLang asks for a field that transformers has dropped.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"moe_layer_freq": 1}))
    return directory


def make_adapter(directory: Path, model: Path, seed: int) -> Path:
    """A LoRA adapter of the tiny model that changes queries, keys and values by about as much as they are."""
    shape = SHAPES["tiny"]
    generator = torch.Generator().manual_seed(seed)
    heads = {"q_proj": shape.query_heads, "k_proj": shape.kv_heads, "v_proj": shape.kv_heads}
    weights = {}
    for layer in range(shape.layers):
        for projection, count in heads.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{name}.lora_A.weight"] = torch.randn(ADAPTER_RANK, shape.hidden, generator=generator)
            width = count * shape.head_dim
            weights[f"{name}.lora_B.weight"] = torch.randn(width, ADAPTER_RANK, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    words = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model),
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": [*heads],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(words))
    return directory

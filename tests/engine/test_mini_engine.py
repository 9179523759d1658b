"""`examples/mini_engine.py` against transformers: its own forward pass says what theirs says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rigs.mini_engine import mini, numbers, serve


def greedy(directory: Path, prompt: list[int], count: int) -> list[int]:
    """The answer of transformers' own model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def test_transformers_says_the_same(model: Path) -> None:
    prompts = [numbers(seed, length) for seed, length in enumerate((5, 64, 150))]
    assert serve(mini.Engine(mini.Model.load(model), 64), prompts) == [
        greedy(model, prompt, 20) for prompt in prompts
    ]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["plain", "llama3"],
)
def test_transformers_says_the_same_of_a_llama(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Without query and key norms, with tied embeddings, biases and two files."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True, initializer_range=0.3,
        rope_parameters=rope, max_position_embeddings=512,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config)
    made.save_pretrained(tmp_path, max_shard_size="600KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompt = numbers(3, 150)
    (said,) = serve(mini.Engine(mini.Model.load(tmp_path), 64), [prompt])
    assert said == greedy(tmp_path, prompt, 20)

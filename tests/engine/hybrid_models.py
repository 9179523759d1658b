"""Tiny models with several KV cache groups, with random weights, so that their answers depend on the KV they read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.model_configs import CONFIGS

SEED = 1
DECAY = 0.01
"""How fast the recurrent layers forget: a few hundred tokens are in a state."""

WINDOWS = CONFIGS["gemma3_text"]
"""Two groups of layers with a window of 128 tokens, one of full attention."""
MOSTLY_FULL = {
    **WINDOWS,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"] * 2,
}
"""One group of layers with a window, two of full attention."""
RECURRENT = CONFIGS["qwen3_next"]
"""Three groups of recurrent layers, one of full attention. vLLM computes them on a CPU in bfloat16 only."""

HYBRID_DEVICE_BLOCKS = 100
"""Blocks of all groups together: far too few for the workload, and enough for its longest request."""

HybridModel = Callable[[str], Path]
KINDS = {"windows": WINDOWS, "mostly full": MOSTLY_FULL, "recurrent": RECURRENT}


def make_hybrid_model(directory: Path, config: dict[str, Any]) -> Path:
    """A model of this configuration as a directory: each weight is normal, with the variance that keeps a layer's
    output as large as its input."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in config.items() if name not in ("architectures", "torch_dtype")}
    chosen = AutoConfig.for_model(**settings)
    recurrent = "linear_attention" in config["layer_types"]
    torch.manual_seed(SEED)  # norms, decays and the like are as the model's own code begins with
    model = AutoModelForCausalLM.from_config(chosen).to(torch.float32)
    source = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                scale = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=source) * scale)
            elif name.endswith("linear_attn.A_log"):
                # As the model's code begins, most of a state is forgotten within some tokens: none would be missed.
                weight.fill_(math.log(DECAY))
            elif recurrent and name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(
                    1.0
                )  # the norm is one more: attention looks at few tokens, not at the mean of all
    model.save_pretrained(directory)
    return directory

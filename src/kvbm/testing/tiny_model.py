"""Small random-weight models for tests, the demo and the benchmarks. Nothing is downloaded.

Three sizes of Qwen3, and a Gemma 3, whose layers with a sliding window are groups of their own. Their attention is
peaky (query and key norms of 2.0), so the output of a model depends on the KV it reads: wrong KV shows as other text.
The weights are not trained; the text means nothing.

The result is a directory that any engine loads like a model from a hub: `config.json`, `model.safetensors`,
a byte-level BPE tokenizer trained on the Python standard library, and a ChatML template.
torch, tokenizers and safetensors are imported when a model is made, not before.
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

Size = Literal["tiny", "demo", "small", "windows"]
DType = Literal["float32", "bfloat16"]

VOCAB_SIZE = 4096
SEED = 1234
QK_NORM = 2.0
FULL_EVERY = 3
WINDOW_TOKENS = 512
MAX_POSITIONS = 32_768
TOKENIZER_SOURCE_FILES = 120
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
RECIPE_FILE = "kvbm-model.json"
RECIPE_VERSION = 1

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The dimensions of one model. With a `window`, in tokens, only every third layer sees all tokens before it."""

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int = 64
    window: int = 0

    @property
    def groups(self) -> int:
        """How many groups vLLM makes of the layers, all of one size. The first sees all tokens."""
        return FULL_EVERY if self.window else 1

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Bytes of KV that one token takes over all layers, those with a window included."""
        width = 4 if dtype == "float32" else 2
        return self.layers * 2 * self.kv_heads * self.head_dim * width


SHAPES: dict[Size, Shape] = {
    "tiny": Shape(layers=2, hidden=256, intermediate=512, query_heads=4, kv_heads=2),
    "demo": Shape(layers=6, hidden=512, intermediate=1408, query_heads=8, kv_heads=4),
    "small": Shape(layers=12, hidden=1024, intermediate=2816, query_heads=16, kv_heads=8),
    "windows": Shape(
        layers=12, hidden=1024, intermediate=2816, query_heads=16, kv_heads=8, window=WINDOW_TOKENS
    ),
}


def make_model(directory: str | os.PathLike[str], size: Size = "tiny", dtype: DType = "bfloat16") -> Path:
    """Make the model in `directory`, or reuse the one that is there. Returns the directory.

    The directory appears whole or not at all, so two processes may make the same one at once. `dtype` is that of
    the saved weights; an engine may still be told to compute in another one.

    Raises ValueError for an unknown size or dtype, and FileExistsError when the directory holds anything other
    than this very model: nothing of a user's is ever overwritten.
    """
    if size not in SHAPES:
        raise ValueError(f"size={size!r}: expected one of {', '.join(SHAPES)}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: expected float32 or bfloat16")
    target = Path(directory).absolute()
    recipe = {"version": RECIPE_VERSION, "size": size, "dtype": dtype, "seed": SEED}
    if _is_there(target, recipe):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_config(draft, SHAPES[size], dtype)
        _write_weights(draft, SHAPES[size], dtype)
        _write_tokenizer(draft)
        (draft / RECIPE_FILE).write_text(json.dumps(recipe) + "\n")
        draft.chmod(0o755)
        try:
            draft.rename(target)
        except OSError:
            # Another process was faster; any other cause is reported as what it is.
            if not _is_there(target, recipe):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _is_there(target: Path, recipe: dict[str, Any]) -> bool:
    """Whether `target` is this model already. False when it is free to be made."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    try:
        found = json.loads((target / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        found = None
    if found != recipe:
        raise FileExistsError(f"{target}: holds {found or 'something else'}, wanted the model {recipe}")
    return True


def _write_config(directory: Path, shape: Shape, dtype: DType) -> None:
    eos = SPECIAL_TOKENS.index("<|im_end|>")
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }
    if shape.window:
        config |= _gemma3_config(shape)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": eos, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _gemma3_config(shape: Shape) -> dict[str, Any]:
    """What differs where some layers have a window."""
    kinds = [
        "full_attention" if (layer + 1) % FULL_EVERY == 0 else "sliding_attention"
        for layer in range(shape.layers)
    ]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "layer_types": kinds,
        "sliding_window": shape.window,
        "query_pre_attn_scalar": shape.head_dim,
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _weight_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every weight's name and shape. The order is part of the recipe: one generator fills them in turn."""
    query, key_value = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (VOCAB_SIZE, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (query, shape.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (key_value, shape.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (key_value, shape.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (shape.hidden, query)
        yield f"{prefix}.self_attn.q_norm.weight", (shape.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
        if shape.window:
            yield f"{prefix}.pre_feedforward_layernorm.weight", (shape.hidden,)
            yield f"{prefix}.post_feedforward_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.up_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (VOCAB_SIZE, shape.hidden)


def _write_weights(directory: Path, shape: Shape, dtype: DType) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    weights: dict[str, Any] = {}
    for name, dimensions in _weight_shapes(shape):
        if len(dimensions) == 1:
            value = QK_NORM if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            # Gemma's norms multiply by one more than their weight.
            weight = torch.full(dimensions, value - 1.0 if shape.window else value)
        else:
            # 1/sqrt(fan_in) keeps activations at unit scale through any depth.
            std = 1.0 if "embed_tokens" in name else dimensions[1] ** -0.5
            weight = torch.empty(dimensions).normal_(0.0, std, generator=generator)
        weights[name] = weight.to(getattr(torch, dtype)).contiguous()
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    source = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(str(path) for path in source.glob("*.py"))[:TOKENIZER_SOURCE_FILES]
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(files, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

"""Reads the bytes of KV for each token, or the kinds of layers, from a model's `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvbm.errors import SettingsError
from kvbm.sim.serving.hybrid import MODELS, HybridModel, hybrid_of, layer_kinds

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_FIELD = "--model"


def kv_bytes_per_token(directory: Path) -> int:
    """Keys and values of all layers for one token, in the model's own dtype, on all ranks together.

    2 × layers × KV heads × head size × bytes of the dtype; with multi-head latent attention layers × (latent + rotary
    size) × bytes. Hybrid models, whose layers differ, are refused: no number of bytes is that of each token.
    """
    found = model_of(directory)
    if isinstance(found, HybridModel):
        kinds = ", ".join(sorted({each.kind.value for each in found.layers}))
        accepted = (
            f"a model whose layers are alike (these are of several kinds: {kinds}); or give --bytes-per-token"
        )
        raise SettingsError(_FIELD, str(directory), accepted)
    return found


def model_of(directory: Path) -> int | HybridModel:
    """`kv_bytes_per_token` of a model whose layers are alike, or the layers of a hybrid one.

    `directory` is a model's, its config.json, or a name of `hybrid.MODELS` where there is no such path.
    """
    if str(directory) in MODELS and not directory.exists():
        return MODELS[str(directory)]
    path = directory / "config.json" if directory.is_dir() else directory
    try:
        config: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            _FIELD,
            str(directory),
            f"a model's directory, its config.json, or one of {', '.join(MODELS)}; {reason}",
        ) from None
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    try:
        return _read(config, directory.resolve().name)
    except (KeyError, TypeError, ValueError) as error:
        accepted = f"a config.json with the usual fields ({error}); or give --bytes-per-token"
        raise SettingsError(_FIELD, str(directory), accepted) from None


def _read(config: dict[str, Any], name: str) -> int | HybridModel:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"dtype {dtype}")
    layers, size = int(config["num_hidden_layers"]), _DTYPE_BYTES[dtype]
    hybrid = layer_kinds(config)
    if config.get("kv_lora_rank") and not hybrid:
        return layers * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])) * size
    heads = int(config["num_attention_heads"])
    head_size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    token_bytes = 2 * int(config.get("num_key_value_heads") or heads) * head_size * size
    return hybrid_of(name, config, token_bytes, size) if hybrid else layers * token_bytes

"""The groups and sizes of models with several kinds of layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbm.errors import SettingsError
from kvbm.groups import Group, GroupKind
from kvbm.sim.serving.hybrid import MODELS, HybridModel, Layers
from kvbm.sim.serving.model import kv_bytes_per_token, model_of

WINDOW, STATE, FULL, CHUNK = GroupKind.WINDOW, GroupKind.STATE, GroupKind.FULL, GroupKind.CHUNK

GEMMA = {
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
QWEN = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "dtype": "bfloat16",
}


def written(directory: Path, config: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("name", "config"), [("gemma-3-27b", GEMMA), ("qwen3-next-80b", QWEN)])
def test_a_config_says_what_the_preset_says(name: str, config: object, tmp_path: Path) -> None:
    found = model_of(written(tmp_path, config))
    assert isinstance(found, HybridModel)
    assert set(found.layers) == set(MODELS[name].layers)
    assert model_of(Path(name)) == MODELS[name]
    with pytest.raises(SettingsError, match="several kinds"):
        kv_bytes_per_token(tmp_path)


def test_layers_of_a_kind_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    config = QWEN | {"layer_types": ["full_attention"] * 40 + ["telepathy"] * 8}
    with pytest.raises(SettingsError, match="telepathy"):
        model_of(written(tmp_path, config))


def test_gemma_has_one_group_of_all_tokens_and_six_windows() -> None:
    slots = MODELS["gemma-3-27b"].slots(512)
    assert slots.groups == (Group(), *[Group(kind=WINDOW, reach=2)] * 6)
    assert slots.slot_bytes == 10 * 512 * 8192
    assert slots.everything_bytes == 62 * 512 * 8192
    assert MODELS["gemma-3-27b"].slots(16).groups[1].reach == 64


def test_groups_of_almost_as_many_layers_are_evened_out() -> None:
    model = HybridModel("drafts", (Layers(FULL, 13, 100), Layers(WINDOW, 12, 100, 128)))
    slots = model.slots(16)
    assert len(slots.groups) == 2
    assert slots.slot_bytes == 13 * 16 * 100
    assert slots.everything_bytes == 25 * 16 * 100


def test_blocks_are_as_long_as_a_state_is_large() -> None:
    """vLLM makes attention blocks of 544 tokens for this model: the first multiple of 16 that holds a state."""
    model = MODELS["qwen3-next-80b"]
    assert {group.span for group in model.slots(16).groups} == {34}
    assert {group.span for group in model.slots(544).groups} == {1}
    slots = model.slots(64)
    assert slots.groups == (Group(span=9), *[Group(kind=STATE, span=9)] * 3)
    assert slots.slot_bytes == 12 * max(9 * 64 * 2048, 1_097_728)
    assert slots.everything_bytes == (12 * 9 * 64 * 2048 + 36 * 1_097_728) // 9
    larger = model.slots(512)
    assert {group.span for group in larger.groups} == {2}


def test_chunks_count_in_blocks() -> None:
    slots = HybridModel("local", (Layers(FULL, 2, 10), Layers(CHUNK, 6, 10, 8192))).slots(64)
    assert slots.groups == (Group(), *[Group(kind=CHUNK, reach=128)] * 3)

"""The README stays short, and its table of models follows from their public configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbm.sim.serving.model import kv_bytes_per_token
from rigs.checkout import ROOT

README_LINES_MAX = 130


def config(
    layers: int, heads: int, kv_heads: int, hidden: int, positions: int, **more: Any
) -> dict[str, Any]:
    """The part of a model's `config.json` that gives the sizes of its KV."""
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
        **more,
    }


CONFIGS = {
    "Llama-3.2-1B": config(16, 32, 8, 2048, 131072),
    "Llama-3.1-8B": config(32, 32, 8, 4096, 131072),
    "Llama-3.1-70B": config(80, 64, 8, 8192, 131072),
    "Qwen2.5-7B-Instruct": config(28, 28, 4, 3584, 32768),
    "Qwen2.5-32B-Instruct": config(64, 40, 8, 5120, 32768),
    "Qwen3-8B": config(36, 32, 8, 4096, 40960, head_dim=128),
    "Qwen3-32B": config(64, 64, 8, 5120, 40960, head_dim=128),
}


def rows() -> dict[str, list[str]]:
    """The table under `How much memory`: model → the other cells."""
    section = (ROOT / "README.md").read_text().partition("## How much memory")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {model: rest for model, *rest in cells}


@pytest.mark.parametrize("model", CONFIGS)
def test_a_row_follows_from_the_models_configuration(model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
    bytes_per_token, positions = kv_bytes_per_token(tmp_path), CONFIGS[model]["max_position_embeddings"]
    gigabytes = bytes_per_token * positions / 1e9
    assert rows()[model] == [f"{bytes_per_token:,}", f"{positions:,} tokens", f"{gigabytes:.1f} GB"]


def test_every_row_has_a_configuration() -> None:
    assert set(rows()) == set(CONFIGS)


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX

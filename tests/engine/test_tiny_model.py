"""The random-weight models: made whole, reused, never over anything else, and read by the usual libraries."""

from __future__ import annotations

import concurrent.futures
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvbm.testing.tiny_model import CHAT_TEMPLATE, SHAPES, SPECIAL_TOKENS, VOCAB_SIZE, make_model

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny", "float32")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_two_makings_are_equal_to_the_byte(tiny: Path, tmp_path: Path) -> None:
    assert contents(make_model(tmp_path / "again", "tiny", "float32")) == contents(tiny)


def test_a_complete_model_is_reused(tiny: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()}
    assert make_model(tiny, "tiny", "float32") == tiny
    assert {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()} == before


def test_makers_at_the_same_time_agree(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "shared"
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        made = [pool.submit(make_model, target, "tiny", "float32") for _ in range(3)]
        assert {future.result() for future in made} == {target}
    assert contents(target) == contents(tiny)
    assert [path.name for path in tmp_path.iterdir()] == ["shared"], "drafts are left behind"


def test_another_model_is_never_overwritten(tiny: Path) -> None:
    before = contents(tiny)
    with pytest.raises(FileExistsError, match="float32"):
        make_model(tiny, "tiny", "bfloat16")
    assert contents(tiny) == before


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="something else"):
        make_model(tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (make_model(tmp_path / "empty") / "model.safetensors").exists()


@pytest.mark.parametrize(("size", "dtype", "named"), [("huge", "float32", "huge"), ("tiny", "int4", "int4")])
def test_unknown_sizes_and_types_are_named(tmp_path: Path, size: str, dtype: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_model(tmp_path / "never", size, dtype)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("size", "bytes_per_token"), [("tiny", 1 << 10), ("small", 24 << 10), ("windows", 24 << 10)]
)
def test_kv_takes_what_the_reference_says(size: str, bytes_per_token: int) -> None:
    assert SHAPES[size].kv_bytes_per_token("bfloat16") == bytes_per_token  # type: ignore[index]
    assert SHAPES[size].kv_bytes_per_token("float32") == 2 * bytes_per_token  # type: ignore[index]


def test_weights_follow_the_recipe(tiny: Path) -> None:
    with safe_open(str(tiny / "model.safetensors"), "pt") as weights:
        embedding = weights.get_tensor("model.embed_tokens.weight")
        head = weights.get_tensor("lm_head.weight")
        query_norm = weights.get_tensor("model.layers.0.self_attn.q_norm.weight")
        down = weights.get_tensor("model.layers.1.mlp.down_proj.weight")
        dtypes = {str(weights.get_tensor(name).dtype) for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {"torch.float32"}
    assert tuple(embedding.shape) == (VOCAB_SIZE, 256)
    assert not embedding.equal(head), "embeddings are untied"
    assert embedding.std().item() == pytest.approx(1.0, rel=0.01)
    assert down.std().item() == pytest.approx(512**-0.5, rel=0.01)
    assert query_norm.tolist() == [2.0] * 64


def test_a_model_with_windows_is_the_gemma_that_transformers_would_make(tmp_path: Path) -> None:
    made = make_model(tmp_path / "windows", "windows", "bfloat16")
    config = AutoConfig.from_pretrained(made)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config).state_dict()
    with safe_open(str(made / "model.safetensors"), "pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        query_norm = weights.get_tensor("model.layers.0.self_attn.q_norm.weight")
    assert shapes == {name: tuple(weight.shape) for name, weight in expected.items()}
    assert query_norm.tolist() == [1.0] * 64, "its norms add one"
    assert config.layer_types.count("full_attention") * SHAPES["windows"].groups == config.num_hidden_layers


def test_transformers_reads_config_and_tokenizer(tiny: Path) -> None:
    config = AutoConfig.from_pretrained(tiny)
    assert (config.model_type, config.num_hidden_layers, config.vocab_size) == ("qwen3", 2, VOCAB_SIZE)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    for text in ("import os\n\ndef f(x):\n    return x", "naïve — ✓ 漢字", ""):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_chat_template_is_chatml(tiny: Path) -> None:
    assert json.loads((tiny / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    chat = [{"role": "system", "content": "short"}, {"role": "user", "content": "why?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert (
        text
        == "<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )

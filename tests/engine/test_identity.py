"""Engines share bytes exactly when they compute the same: arguments are varied and KV is compared."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import identity
from engine.amx import HAS_FP8_KV
from engine.engine_arguments import VARIED, without_a_reason
from engine.engine_process import EngineProcess
from engine.launcher import Launcher, differences
from engine.longrope import ORIGINAL_POSITIONS, make_longrope_model
from engine.model_runners import chosen
from engine.tier_settings import disk, host
from engine.workload import Request, random_tokens, workload

TOKENS = random_tokens(random.Random(5), 6 * 32 + 7)
BESIDE = [Request(f"beside{i}", random_tokens(random.Random(i), 90 + 40 * i), 1) for i in range(4)]


class Found(NamedTuple):
    """The KV that one engine computed, and its namespace."""

    kv: Any
    fields: dict[str, str]


def look(launcher: Launcher, beside: bool = False, threads: int = 1, **options: Any) -> Found:
    """Start an engine with these options and look at it."""
    launcher.start(host(), **{"num_gpu_blocks_override": 200, **options})
    requests = BESIDE if beside else ()
    kv = launcher.process.call(identity.kv_of, TOKENS, requests, threads, timeout_s=180.0)
    return Found(kv, launcher.process.call(identity.fields, timeout_s=20.0))


def changed(model: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the model with other weights."""
    shutil.copytree(model, target)
    weights = load_file(str(target / "model.safetensors"))
    change(weights)
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


def resharded(model: Path, target: Path) -> Path:
    """The same weights in two files with other names."""
    shutil.copytree(model, target)
    (target / "model.safetensors").unlink()
    weights = load_file(str(model / "model.safetensors"))
    names, index = sorted(weights), {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, str(target / file), metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return target


def renamed_inside(model: Path, target: Path) -> Path:
    """The same model, whose configuration says another name and another version of the library that wrote it."""
    shutil.copytree(model, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"_name_or_path": "somebody/else", "transformers_version": "4.0.0"}
    (target / "config.json").write_text(json.dumps(config))
    return target


def nudge(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.mlp.down_proj.weight"] += 0.01


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
VARIATIONS: dict[str, dict[str, Any]] = {
    "rope_theta": rope(10_000.0),
    "rope_scaling": rope(1e6, **YARN),
    "rms_norm_eps": {"hf_overrides": {"rms_norm_eps": 1e-2}},
    "dtype=bfloat16": {"dtype": "bfloat16"},
    "dtype=float16": {"dtype": "float16"},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "block_size": {"block_size": 64},
    "load_format": {"load_format": "dummy"},
    "model_impl": {"model_impl": "transformers"},
    "enable_lora": {"enable_lora": True, "max_lora_rank": 8},
    "max_model_len": {"max_model_len": 512},
    "seed": {"seed": 7},
}
"""By the argument that they are about; some change the bytes and some do not: the comparison says which."""

SHORT = ("rope_theta", "dtype=bfloat16", "kv_cache_dtype")


@pytest.fixture(scope="module")
def base(
    process_of: Callable[[str, str], EngineProcess], model: Path, runtime_dir: Path
) -> tuple[Found, float]:
    """The engine to compare with, and by how much chunking, batch and threads alone change its KV."""
    launcher = Launcher(process_of(f"engine-{chosen()}", chosen()), model, runtime_dir)
    first = look(launcher)
    controls = [
        look(launcher, max_num_batched_tokens=64),
        look(launcher, max_num_batched_tokens=1024, max_num_seqs=3, beside=True),
        look(launcher, threads=2, beside=True),
    ]
    assert all(found.fields == first.fields for found in controls)
    rounding = max(identity.difference(first.kv, found.kv) for found in controls)
    assert rounding < 1e-4, "a control that moves that much proves nothing"
    return first, rounding


def demand(base: tuple[Found, float], found: Found, what: str) -> float:
    """Bytes differ by more than rounding: so must fingerprints."""
    first, rounding = base
    moved = identity.difference(first.kv, found.kv)
    if moved > rounding:
        assert found.fields["fingerprint"] != first.fields["fingerprint"], f"{what}: KV moved by {moved:.3g}"
    return moved


def test_every_argument_is_varied_or_left_out_for_a_reason(launcher: Launcher) -> None:
    arguments = launcher.process.call(identity.engine_arguments, timeout_s=60.0)
    assert without_a_reason(arguments) == []
    assert {*VARIED} <= arguments


@pytest.mark.parametrize("name", SHORT)
def test_other_bytes_have_another_fingerprint(
    launcher: Launcher, base: tuple[Found, float], name: str
) -> None:
    if name == "kv_cache_dtype" and not HAS_FP8_KV:
        pytest.skip("vLLM has no FP8 KV on a CPU without AVX-512")
    moved = demand(base, look(launcher, **VARIATIONS[name]), name)
    assert moved > 1e-3, "these are known to change KV"


@pytest.mark.parametrize("name", sorted(VARIATIONS.keys() - SHORT))
def test_whatever_changes_bytes_changes_the_fingerprint(
    launcher: Launcher, base: tuple[Found, float], name: str
) -> None:
    demand(base, look(launcher, **VARIATIONS[name]), name)


@pytest.mark.quick
def test_other_weights_have_another_fingerprint(
    launcher: Launcher, base: tuple[Found, float], model: Path, tmp_path: Path
) -> None:
    found = look(launcher, model=str(changed(model, tmp_path / "nudged", nudge)))
    assert demand(base, found, "weights") > 1e-3
    assert found.fields["weights"] != base[0].fields["weights"]


def test_names_make_no_difference(
    launcher: Launcher, base: tuple[Found, float], model: Path, tmp_path: Path
) -> None:
    """Other paths, other names, the same weights in other files, another length where no module asks for it."""
    first, _ = base
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    for options in (
        {"model": str(copy), "served_model_name": "another", "tokenizer": str(model)},
        {"model": str(resharded(model, tmp_path / "shards")), "seed": 3},
        {"model": str(renamed_inside(model, tmp_path / "renamed")), "max_model_len": 512},
    ):
        found = look(launcher, **options)
        assert identity.difference(first.kv, found.kv) == 0.0
        assert found.fields == first.fields, options


def test_longrope_factors_are_told_apart(launcher: Launcher, tmp_path: Path) -> None:
    """The length decides on the factors: other K, another fingerprint."""
    phi3 = str(make_longrope_model(tmp_path / "phi3"))
    short = look(launcher, model=phi3, max_model_len=ORIGINAL_POSITIONS - 256)
    same = look(launcher, model=phi3, max_model_len=ORIGINAL_POSITIONS)
    long = look(launcher, model=phi3, max_model_len=ORIGINAL_POSITIONS + 32)
    assert identity.difference(short.kv, same.kv) == 0.0
    assert short.fields == same.fields
    assert identity.difference(short.kv, long.kv) > 1.0
    assert {name for name in short.fields if short.fields[name] != long.fields[name]} == {
        "rotary",
        "fingerprint",
    }


def test_longrope_engines_share_a_disk_and_no_block(launcher: Launcher, tmp_path: Path) -> None:
    """One engine takes the short factors, the next the long ones: it answers as if there had been no first one."""
    phi3 = str(make_longrope_model(tmp_path / "phi3"))
    lengths = (ORIGINAL_POSITIONS, ORIGINAL_POSITIONS + 256)
    requests = [request for request in workload() if request.abort_after is None][:32]
    expected = []
    for length in lengths:
        plain = launcher.start(transfer=None, num_gpu_blocks_override=1000, model=phi3, max_model_len=length)
        expected.append(plain.run(requests).outputs)
    assert sum(expected[0][name] != expected[1][name] for name in expected[0]) > 28, "the factors do not show"
    for turn in (0, 1, 0):
        launcher.start(disk(tmp_path / "cache", host_blocks=100), model=phi3, max_model_len=lengths[turn])
        answers = launcher.process.run(requests)
        assert differences(expected[turn], answers) == []
        launcher.stop()

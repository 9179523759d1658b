"""Blocks are shared only where they may be: salts, adapters and resets keep them apart."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine import reach
from engine.engine_process import EngineProcess
from engine.launcher import Launcher
from engine.patience import wait_for_every_store
from engine.tier_settings import SMALL_HOST_BLOCKS, disk, host
from engine.workload import Request, random_tokens

LONG = 10 * 32 + 5
"""Tokens of a prompt with ten complete blocks."""


def prompts(seed: int, count: int = 4) -> list[Request]:
    """A few long prompts."""
    source = random.Random(seed)
    return [Request(f"p{seed}-{i}", random_tokens(source, LONG), 4) for i in range(count)]


def renamed(requests: list[Request], suffix: str, salt: str = "") -> list[Request]:
    """The same prompts under other names."""
    return [dataclasses.replace(request, name=request.name + suffix, salt=salt) for request in requests]


def cached(engine: EngineProcess, requests: list[Request]) -> list[int]:
    """How many tokens of each request came from a cache, when the device's own is empty."""
    assert engine.call(reach.reset, connector=False, timeout_s=20.0)
    answers = engine.run(requests)
    return [answers.cached_tokens[request.name] for request in requests]


def test_reset_of_the_device_keeps_ours(launcher: Launcher) -> None:
    engine = launcher.start(host())
    asked = prompts(1)
    assert cached(engine, asked) == [0] * 4
    assert cached(engine, renamed(asked, "+")) == [320] * 4


def test_reset_drops_everything(launcher: Launcher, tmp_path: Path) -> None:
    """`reset_prefix_cache(reset_connector=True)`: host and disk hold nothing more, and then everything works again."""
    engine = launcher.start(disk(tmp_path, SMALL_HOST_BLOCKS))
    engine.call(wait_for_every_store, timeout_s=20.0)
    asked = prompts(2, count=8)
    for each in asked:  # together they may find host memory full, and are then not stored
        engine.run([each])
    launcher.assert_nothing_held()
    assert launcher.metrics()['kvbm_pool_blocks{tier="disk",state="resident"}'] == 80
    assert engine.call(reach.reset, connector=True, timeout_s=20.0)
    assert cached(engine, renamed(asked, "+1")) == [0] * 8
    # Host memory holds four of these prompts at a time; who finds it full of leases computes.
    assert cached(engine, renamed(asked, "+2")).count(320) >= 2
    assert engine.call(reach.reset, connector=True, timeout_s=20.0)
    launcher.assert_nothing_held()
    metrics = launcher.metrics()
    assert metrics['kvbm_pool_blocks{tier="host",state="resident"}'] == 0
    assert metrics['kvbm_pool_blocks{tier="disk",state="resident"}'] == 0


def test_cache_salt_isolates(launcher: Launcher) -> None:
    """A tenant hits what it stored itself, and nobody else's."""
    engine = launcher.start(host())
    asked = prompts(3)
    assert cached(engine, renamed(asked, "a", salt="one")) == [0] * 4
    before = launcher.metrics()
    assert cached(engine, renamed(asked, "b", salt="other")) == [0] * 4
    assert cached(engine, renamed(asked, "c")) == [0] * 4
    assert (
        launcher.metrics()['kvbm_hit_blocks_total{tier="host"}']
        == before['kvbm_hit_blocks_total{tier="host"}']
    )
    assert cached(engine, renamed(asked, "d", salt="one")) == [320] * 4
    assert cached(engine, renamed(asked, "e", salt="other")) == [320] * 4


def write_adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter of the tiny model, strong enough to change its answers."""
    directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(2):
        for name, width in (("q_proj", 256), ("v_proj", 128)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, 256, generator=generator) / 16
            weights[f"{place}.lora_B.weight"] = torch.randn(width, 8, generator=generator)
    save_file(weights, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def test_adapters_isolate(launcher: Launcher, tmp_path: Path) -> None:
    """Two adapters never meet, nor do two that lie at one path, one after the other.

    The base model is left out: vLLM's LoRA on a CPU applies some adapter to requests without one.
    """
    with_lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    one, two = write_adapter(tmp_path / "one", 1), write_adapter(tmp_path / "two", 2)
    asked = prompts(4)
    mixed = [
        dataclasses.replace(request, name=f"{request.name}/{lora.name}", lora=str(lora))
        for request in asked
        for lora in (one, two)
    ]
    plain = launcher.start(transfer=None, num_gpu_blocks_override=1000, **with_lora).run(mixed)
    answers = {tuple(tokens) for tokens in plain.outputs.values()}
    assert len(answers) == len(mixed), "the adapters do not change what the model says"

    settings = disk(tmp_path / "cache", host_blocks=400)
    engine = launcher.start(settings, **with_lora)
    assert cached(engine, mixed) == [0] * 8
    engine.call(reach.reset, connector=False, timeout_s=20.0)
    hits = engine.run(renamed(mixed, "+"))
    assert list(hits.cached_tokens.values()) == [320] * 8
    assert [hits.outputs[request.name + "+"] for request in mixed] == list(plain.outputs.values())

    launcher.stop()
    write_adapter(one, 3)
    engine = launcher.start(settings, **with_lora)
    expected = [0 if request.lora == str(one) else 320 for request in mixed]
    assert cached(engine, mixed) == expected

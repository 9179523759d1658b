"""Multi-head latent attention: one row of 576 per token, alike on all ranks."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import reach
from engine.amx import HAS_AMX
from engine.engine_process import EngineFailed
from engine.launcher import Launcher
from engine.model_configs import write_config
from engine.tier_settings import host
from engine.workload import some, workload
from kvbm.transfer import DeviceCache, arena_tensor, make_copier


@pytest.mark.skipif(not HAS_AMX, reason="vLLM's MLA has no prefix caching on a CPU without AMX")
def test_mla_blocks_come_back(launcher: Launcher, tmp_path: Path) -> None:
    """Random weights say nothing, so bytes are compared: what is loaded is what was stored."""
    directory = write_config(tmp_path / "mla", "deepseek_v2")
    options = {"load_format": "dummy", "dtype": "bfloat16", "block_size": 128, "num_gpu_blocks_override": 16}
    engine = launcher.start(host(200), model=str(directory), **options)
    engine.call(reach.audit_copies, timeout_s=20.0)
    engine.run(workload())
    compared, different = engine.call(reach.audit_result, timeout_s=20.0)
    assert compared > some(50)
    assert different == 0
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > some(50)


@pytest.mark.skipif(HAS_AMX, reason="this CPU has AMX, so vLLM's MLA caches prefixes")
def test_mla_without_prefix_caching(launcher: Launcher, tmp_path: Path) -> None:
    """One line, and the engine serves."""
    directory = write_config(tmp_path / "mla", "deepseek_v2")
    options: dict[str, Any] = {"load_format": "dummy", "num_gpu_blocks_override": 96}
    try:
        engine = launcher.start(host(), model=str(directory), **options)
    except EngineFailed:
        try:
            launcher.start(transfer=None, model=str(directory), **options)
        except EngineFailed as error:
            pytest.skip(f"this vLLM cannot serve MLA on a CPU, with or without KVBM: {error}")
        raise
    assert engine.log().count("KVBM is off for this engine: prefix caching is off") == 1
    requests = [request for request in workload() if not request.parent][:12]
    assert len(engine.run(requests).outputs) == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mla_layout_is_copied_whole(dtype: torch.dtype) -> None:
    """The layout of vLLM's MLA tensors, `[blocks, 1, tokens, 576]`, through host memory and back."""
    layers = {f"layer.{i}": torch.randn(12, 1, 128, 576).to(dtype) for i in range(3)}
    before = {name: tensor.clone() for name, tensor in layers.items()}
    cache = DeviceCache.from_tensors(layers, 12)
    region = mmap.mmap(-1, 4 * cache.shard_bytes)
    copier = make_copier(cache, arena_tensor(region, 4, cache.shard_bytes))
    copier.store([(1, 3), (5, 0), (11, 2)], copier.mark())
    copier.load([(7, 3), (8, 0), (0, 2)], copier.mark())
    copier.close()
    moved = {7: 1, 8: 5, 0: 11}
    for name, tensor in layers.items():
        for block in range(12):
            assert torch.equal(tensor[block], before[name][moved.get(block, block)])

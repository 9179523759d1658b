"""Blocks that a CPU with AMX packed are garbage to one without, so the name of the packing is part of the namespace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvbm.errors import KvbmError
from kvbm.vllm_integration import namespace
from kvbm.vllm_integration.namespace import RankPart, cpu_packing, engine_namespace

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("dtype", "differs"), [(torch.bfloat16, True), (torch.float32, False)])
def test_packing_on_both_kinds_of_cpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, differs: bool
) -> None:
    """Whichever this one is: vLLM asks torch, and so do we."""
    found = []
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        spec = SimpleNamespace(block_size=32, head_size=64)
        config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))
        found.append(cpu_packing(config, spec, layers=()))
    assert (found[0] != found[1]) == differs
    assert found[0].startswith("amx/") == differs


def test_layers_that_say_how_they_pack_are_believed() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    layers = [SimpleNamespace(isa="vec"), SimpleNamespace(isa="vec"), SimpleNamespace()]
    assert cpu_packing(config, SimpleNamespace(block_size=32), layers).startswith("vec/")


@pytest.mark.swallows("^AttributeError: 'types.SimpleNamespace' object has no attribute 'model_config'")
def test_a_configuration_that_cannot_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine then serves without us."""
    monkeypatch.setattr(namespace, "_rank_part", lambda *_: RankPart())
    monkeypatch.setattr(namespace, "weights_name", lambda *_: "digest")
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0, world_size=1))
    with pytest.raises(KvbmError, match="could not be found out: AttributeError"):
        engine_namespace(config, SimpleNamespace(), "layout", tmp_path / "memo")

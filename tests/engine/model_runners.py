"""The two model runners of vLLM, on a CPU: V1, which a CPU's vLLM takes by itself, and V2, which CUDA's takes.

V2 is written for Triton, and a CPU's vLLM uses Triton only where that has a backend for CPUs. Triton's interpreter
runs every kernel without one. So a process that is to have V2 offers a backend that exists, is active, and is asked
for its name at most (by torch's compiler); ranks in processes of their own inherit it through `PYTHONPATH`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.vllm_versions import VERSION

V1, V2 = "V1", "V2"
CHOICE = "KVBM_TESTS_RUNNER"
"""The environment variable that says which runner the engine tests are run on: V1 if it is not set."""

RUNS_V2 = VERSION >= (0, 32) and importlib.util.find_spec("triton") is not None
"""Older releases have V2 as well; nobody has tried it on their CPU builds."""

runs_v2 = pytest.mark.skipif(
    not RUNS_V2, reason="V2 is run on a CPU from vLLM 0.32 on, where Triton is installed"
)

_COMPILER = """
from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend):
    supports_target = staticmethod(lambda target: target.backend == "cpu")
    hash = lambda self: "interpreted"
    parse_options = add_stages = load_dialects = get_module_map = None
"""
_DRIVER = """
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Interpreted(DriverBase):
    is_active = classmethod(lambda cls: True)
    get_current_target = lambda self: GPUTarget("cpu", 0, 0)
    map_python_to_cpp_type = get_active_torch_device = get_benchmarker = None
"""


def chosen() -> str:
    """The runner that the engine tests are run on, but for those that name theirs."""
    runner = os.environ.get(CHOICE, V1)
    if runner not in (V1, V2):
        raise pytest.UsageError(f"{CHOICE}={runner!r}; accepted are {V1} and {V2}")
    return runner


def choose(runner: str, directory: Path) -> None:
    """Engines that this process starts have that runner. Before vLLM or Triton is imported; `directory` is kept."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == V2 else "0"
    if runner == V1:
        return
    assert "vllm" not in sys.modules and "triton" not in sys.modules
    package = directory / "interpreted_triton"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "compiler.py").write_text(_COMPILER)
    (package / "driver.py").write_text(_DRIVER)
    distribution = directory / "interpreted_triton-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted-triton\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text("[triton.backends]\ncpu = interpreted_triton\n")
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(directory), os.environ.get("PYTHONPATH", "")))
    )
    sys.path.insert(0, str(directory))


def sample_without_a_kernel() -> None:
    """Greedy tokens are the largest logits: half of a step's time goes into a kernel that says no more than that."""
    import vllm.v1.worker.gpu.sample.sampler as sampler

    def greedy(logits: Any, mapping: Any, temperature: Any, *arguments: Any, **more: Any) -> Any:
        assert not temperature.any()
        return logits.float().argmax(dim=-1)

    sampler.gumbel_sample = greedy

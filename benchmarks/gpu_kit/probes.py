"""What the machine is, whether vLLM's libraries find their symbols in torch, and whether an engine's modules import."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.ledger import Row, make_row

MODULES = (
    "vllm",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.deepseek_v2",
    "kvbm.vllm_integration.connector",
    "kvbm.manager.process",
)
CUDA_MODULES = ("vllm._moe_C_stable_libtorch", "vllm._flashmla_C", "vllm.vllm_flash_attn")
CPU_SKIPPED = ("vllm.v1.worker.gpu.model_runner",)
"""What needs Triton, which a CPU machine may lack."""
RTLD_NOW = 2


def measure(request: dict[str, Any]) -> Row:
    """The row of one probe."""
    probe = {
        "machine": describe_machine,
        "tools": find_tools,
        "libraries": load_libraries,
        "imports": import_modules,
    }
    return probe[request["options"]["probe"]](request)


def describe_machine(request: dict[str, Any]) -> Row:
    """What this machine is, and whether torch sees a card."""
    import numpy
    import torch

    data: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cores": os.cpu_count(),
        "memory GiB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30,
        "/dev/shm GiB": shutil.disk_usage("/dev/shm").total >> 30,
        "disk GiB free": shutil.disk_usage(request["folder"]).free >> 30,
    }
    if request["rehearse"]:
        return make_row([], {**data, "card": "none: a rehearsal"})
    if not torch.cuda.is_available():
        return make_row(["torch sees no CUDA card"], data)
    data["card"] = torch.cuda.get_device_name(0)
    data["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    data["card GiB"] = torch.cuda.get_device_properties(0).total_memory >> 30
    data["driver"] = f"CUDA {torch._C._cuda_getDriverVersion()}"
    return make_row([], data)


def find_tools(request: dict[str, Any]) -> Row:
    """What Triton needs: it builds each kernel's launcher, in C, where it runs."""
    found = {
        "triton": importlib.util.find_spec("triton") is not None,
        "a C compiler": any(map(shutil.which, ("cc", "gcc", "clang"))),
        "Python.h (python3-dev)": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    lacking = [f"lacks {name}" for name, there in found.items() if not there and not request["rehearse"]]
    return make_row(lacking, found)


def load_libraries(request: dict[str, Any]) -> Row:
    """Load each of vLLM's libraries with all its symbols at once: those that torch lacks are named here."""
    import torch  # noqa: F401  # its libraries first

    loaded: list[str] = []
    refused: dict[str, str] = {}
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return make_row(["vLLM is neither installed nor unpacked here: see docs/operating/gpu.md"])
    vllm = Path(found.origin).parent
    for path in sorted(vllm.rglob("*.so")):
        name = str(path.relative_to(vllm))
        # A build for other instructions registers the same operators: only one of them may be loaded.
        if request["rehearse"] and path.name.startswith("_C"):
            continue
        try:
            ctypes.CDLL(str(path), mode=RTLD_NOW)
            loaded.append(name)
        except OSError as error:
            refused[name] = str(error).split(": ", 1)[-1][:300]
    wrong = [f"{name}: {reason}" for name, reason in refused.items()]
    return make_row(wrong, {"loaded": loaded, "refused": refused})


def import_modules(request: dict[str, Any]) -> Row:
    """Import what an engine needs, in order; the first that cannot be imported is the verdict."""
    modules = MODULES if request["rehearse"] else (*MODULES, *CUDA_MODULES)
    data: dict[str, Any] = {"imported": []}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            if request["rehearse"] and name in CPU_SKIPPED:
                data["skipped"] = f"{name}: {error}"[:300]
                continue
            why = f"{name} cannot be imported: {type(error).__name__}: {error}"[:600]
            return make_row([why], data)
        data["imported"].append(name)
    from vllm.platforms import current_platform

    data["vllm"] = importlib.metadata.version("vllm")
    data["platform"] = current_platform.device_type
    wanted = "cpu" if request["rehearse"] else "cuda"
    wrong = f"vLLM takes this for a {data['platform']!r} machine, not {wanted!r}"
    return make_row([] if data["platform"] == wanted else [wrong], data)

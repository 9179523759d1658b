"""The first questions: what machine this is, whether torch has what vLLM's libraries ask for, what imports."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.ledger import FAILED, LEFT_OUT, RIGHT, WRONG

MODULES = (
    "vllm",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.deepseek_v2",
    "kvbm.vllm_integration.connector",
    "kvbm.manager.process",
)
CUDA_MODULES = ("vllm._moe_C_stable_libtorch", "vllm._flashmla_C", "vllm.vllm_flash_attn")
CPU_SKIPPED = ("vllm.v1.worker.gpu.model_runner",)
"""What needs Triton, which a CPU machine may lack."""
RTLD_NOW = 2


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The row of one probe."""
    probe = {"machine": machine, "libraries": libraries, "imports": imports, "parts": parts}
    return probe[request["options"]["probe"]](request)


def machine(request: dict[str, Any]) -> dict[str, Any]:
    """What this machine is, and what it lacks that nothing in the kit can bring."""
    import numpy
    import torch

    data: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "glibc": platform.libc_ver()[1],
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "memory GiB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30,
        "/dev/shm GiB": shutil.disk_usage("/dev/shm").total >> 30,
        "disk GiB free": shutil.disk_usage(request["folder"]).free >> 30,
        "compiler": shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or "none",
        "Python.h": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    missing = []
    try:
        data["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        data["triton"] = "none"
    if request["rehearse"]:
        data["card"] = "none: a rehearsal"
        return {"state": RIGHT, "data": data}
    if not torch.cuda.is_available():
        missing.append("a CUDA card that torch sees")
    else:
        data["card"] = torch.cuda.get_device_name(0)
        data["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
        data["card GiB"] = torch.cuda.get_device_properties(0).total_memory >> 30
        data["driver"] = _driver()
    # Triton builds each kernel's launcher, in C, where it runs.
    if data["triton"] == "none":
        missing.append("triton")
    if data["compiler"] == "none":
        missing.append("a C compiler, which Triton needs")
    if not data["Python.h"]:
        missing.append("Python.h (python3-dev), which Triton needs")
    return {
        "state": WRONG if missing else RIGHT,
        "data": data,
        "why": "lacks " + ", ".join(missing) if missing else "",
    }


def _driver() -> str:
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


def libraries(request: dict[str, Any]) -> dict[str, Any]:
    """Load each of vLLM's libraries with all its symbols at once: those that torch lacks are named here."""
    import torch  # noqa: F401  # its libraries first

    loaded: list[str] = []
    refused: dict[str, str] = {}
    site = Path(request["folder"]) / "site"
    for path in sorted((site / "vllm").rglob("*.so")):
        name = str(path.relative_to(site))
        # A build for other instructions registers the same operators: only one of them may be loaded.
        if request["rehearse"] and path.name.startswith("_C"):
            continue
        try:
            ctypes.CDLL(str(path), mode=RTLD_NOW)
            loaded.append(name)
        except OSError as error:
            refused[name] = str(error).split(": ", 1)[-1][:300]
    why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return {"state": WRONG if refused else RIGHT, "data": {"loaded": loaded, "refused": refused}, "why": why}


def imports(request: dict[str, Any]) -> dict[str, Any]:
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
            return {"state": WRONG, "data": data, "why": why}
        data["imported"].append(name)
    from vllm.platforms import current_platform

    data["vllm"] = importlib.metadata.version("vllm")
    data["platform"] = current_platform.device_type
    wanted = "cpu" if request["rehearse"] else "cuda"
    right = data["platform"] == wanted
    why = "" if right else f"vLLM takes this for a {data['platform']!r} machine, not {wanted!r}"
    return {"state": RIGHT if right else WRONG, "data": data, "why": why}


def parts(request: dict[str, Any]) -> dict[str, Any]:
    """The parts of KVBM on a device without vLLM: `benchmarks/gpu.py`, as it stands."""
    output = Path(request["work"]) / "gpu.json"
    script = Path(__file__).resolve().parents[1] / "gpu.py"
    if not script.exists():
        return {"state": LEFT_OUT, "why": f"no {script.name} in this checkout"}
    command = [sys.executable, str(script), "--output", str(output)]
    command += ["--rehearse"] if request["rehearse"] else []
    answer = subprocess.run(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, check=False)
    print(answer.stdout)
    if not output.exists():
        return {
            "state": FAILED,
            "why": f"status {answer.returncode}",
            "log": answer.stdout.splitlines()[-25:],
        }
    data = json.loads(output.read_text())
    wrong = data.get("wrong", [])
    right = not wrong and not answer.returncode
    return {"state": RIGHT if right else WRONG, "data": data, "why": ", ".join(map(str, wrong))}

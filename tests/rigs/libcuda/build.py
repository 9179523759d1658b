"""Compiles the stand-in for `libcuda.so.1` from the C files of this folder and NVIDIA's own `cuda.h`."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

from rigs import system_packages

SOURCES = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden")


def find_headers() -> Path | None:
    """The folder of `cuda.h` in NVIDIA's package of the CUDA 13 runtime; None where that is not installed."""
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia.submodule_search_locations or ()) if nvidia else ():
        directory = Path(root) / "cu13" / "include"
        if (directory / "cuda.h").exists():
            return directory
    return None


def missing_reason() -> str:
    """Why the stand-in cannot be compiled here, and the command that mends it; empty where it can be."""
    if reason := system_packages.find_missing("cc", "/usr/include/stdio.h"):
        return reason
    if find_headers() is None:
        return "the stand-in for the CUDA driver needs cuda.h (make setup)"
    return ""


def build_library(directory: Path) -> Path:
    """The library, compiled into `directory`.

    Raises subprocess.CalledProcessError where the compiler fails, as for a signature that differs from `cuda.h`.
    """
    headers = find_headers()
    assert headers is not None, missing_reason()
    library = directory / "libcuda.so.1"
    sources = map(str, sorted(SOURCES.glob("*.c")))
    subprocess.run(["cc", *FLAGS, f"-I{headers}", "-o", str(library), *sources, "-lpthread"], check=True)
    return library

"""Where SGLang is installed for the tests: in what `make sglang-test` makes, or where a variable says."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from rigs.checkout import ROOT

PYTHON_VARIABLE = "KVBM_TESTS_SGLANG"
"""Names another Python that has SGLang."""
WITHOUT_CUDA = Path(__file__).parent / "without_cuda"


def sglang_python() -> Path:
    """The Python that has SGLang; it may not exist."""
    named = os.environ.get(PYTHON_VARIABLE)
    return Path(named) if named else ROOT / ".venvs" / "sglang" / "bin" / "python"


@functools.cache
def missing() -> str:
    """Why SGLang cannot be run here, or an empty string."""
    python = sglang_python()
    if not python.exists():
        return "SGLang is not installed (make sglang-test)"
    probe = (
        "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in ('sglang', 'torch')))"
    )
    if subprocess.run([python, "-c", probe], capture_output=True, timeout=60).returncode:
        return f"{python.parent.parent.name} has no SGLang, or no torch (make sglang-test)"
    return ""


def environment(**more: str) -> dict[str, str]:
    """The variables of an engine's processes: our source, the stub of what needs CUDA, and no way to a hub."""
    paths = [str(WITHOUT_CUDA), str(ROOT / "src")]
    outside = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DYN_KVBM_", "SGLANG_", "PYTEST_"))
    }
    mine = {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return outside | mine | more

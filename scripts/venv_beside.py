"""An environment beside `.venv` that shares its packages, torch above all, and has some more: made in seconds."""

from __future__ import annotations

from venvs import ROOT, Venv, fingerprint, probe_python, say


class CannotBeHad(Exception):
    """Why there can be no such environment; one line."""


def beside(name: str, script: str, what: str, *pip_words: str) -> Venv:
    """`.venvs/NAME` with `what`, which `pip install` of these words brings; made if needed. `script` asks for it.

    Raises CannotBeHad where it cannot be made.
    """
    main, venv = Venv(ROOT / ".venv"), Venv(ROOT / ".venvs" / name)
    version = probe_python(main.python)
    if version is None or not main.has("torch"):
        raise CannotBeHad(".venv has no torch (make setup)")
    wanted = fingerprint(script, (ROOT / ".venv" / ".kvbm-stamp").read_text())
    if venv.is_current(wanted):
        return venv
    venv.path.parent.mkdir(exist_ok=True)
    say(f"installing {what} beside the packages of .venv")
    if main.run("-m", "venv", "--clear", "--without-pip", str(venv.path), quiet=True).returncode:
        raise CannotBeHad(f"{main.python} cannot make a virtual environment")
    _share(main, venv)
    answer = venv.pip("install", "--no-compile", *pip_words)
    if answer.returncode:
        wished = ", ".join(word for word in pip_words if not word.startswith("-"))
        raise CannotBeHad(f"pip cannot have {wished}: {answer.stderr.strip()[-300:]}")
    venv.finish(wanted)
    say(f"ready: {venv.path.relative_to(ROOT)}")
    return venv


def _share(main: Venv, venv: Venv) -> None:
    """Let the environment see the packages of another, after its own, and what those see."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (v.run("-c", where, quiet=True).stdout.strip() for v in (main, venv))
    with open(f"{ours}/packages-of-the-main-environment.pth", "w") as file:
        file.write(f"import site; site.addsitedir({theirs!r})\n")

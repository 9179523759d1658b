"""Run the tests that need no engine and no torch on the oldest and the newest Python: 3.10 and 3.13, if installed.

Each gets a small environment of its own under `.venvs/`. A Python that is not installed is named and passed over;
`--require 3.13` makes that an error instead. Other arguments go to pytest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from venvs import ROOT, Venv, find_pythons, fingerprint, say

VERSIONS = [(3, 10), (3, 13)]


def prepare(interpreter: str, version: tuple[int, int]) -> Venv:
    """The environment of one Python: kvbm and the test tools, without torch and without an engine."""
    venv = Venv(ROOT / ".venvs" / f"py{version[0]}{version[1]}")
    wanted = fingerprint(__file__, interpreter)
    if not venv.is_current(wanted):
        venv.path.parent.mkdir(exist_ok=True)
        venv.create(interpreter, version)
        venv.install_checkout("test")
        venv.finish(wanted)
    return venv


def run_tests(venv: Venv, pytest_arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the engine-free tests in one environment; pytest's output is kept."""
    arguments = (
        "-m",
        "not engine and not sglang and not slow",
        "-q",
        "-p",
        "no:cacheprovider",
        "--disable-warnings",
        "-r",
        "fE",
    )
    return venv.run("-m", "pytest", *arguments, str(ROOT / "tests"), *pytest_arguments, quiet=True)


def main() -> int:
    """Run the tests, on two Pythons at a time; 1 when any of them fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--require", action="append", default=[], metavar="X.Y", help="fail unless it is installed"
    )
    options, pytest_arguments = parser.parse_known_args()
    found = find_pythons(VERSIONS)
    names = {version: f"{version[0]}.{version[1]}" for version in VERSIONS}
    failed = [name for version, name in names.items() if version not in found and name in options.require]
    for name in (name for version, name in names.items() if version not in found):
        say(f"Python {name} is not installed: passed over")
    venvs = {names[version]: prepare(interpreter, version) for version, interpreter in found.items()}
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = {name: pool.submit(run_tests, venv, pytest_arguments) for name, venv in venvs.items()}
        for name, run in runs.items():
            answer = run.result()
            lines = answer.stdout.strip().splitlines() or ["pytest said nothing"]
            say(f"engine-free tests on Python {name}: {lines[-1].strip('= ')}")
            if answer.returncode != 0:
                print(answer.stdout, answer.stderr, sep="\n", flush=True)
                failed.append(name)
    if failed:
        say(f"failed on Python {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

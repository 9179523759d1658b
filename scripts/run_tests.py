"""The tests, in two sets. Together they are all tests of this checkout in its own environment.

    run_tests.py          for every change: each test that is not marked slow
    run_tests.py --rest   the others, and the property tests again, with more examples

Other arguments go to pytest. Tests that start no engine run as many at a time as there are cores, those with engines
two at a time: an engine loads its modules on one core. Tests under Dynamo and Ray, and on other releases of vLLM, have
targets of their own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import sglang_venv

NOTHING_COLLECTED = 5
SLOWEST = ("--durations=40", "--durations-min=2")


class Part(NamedTuple):
    """One run of pytest: what it is, the tests that it selects, and more options."""

    name: str
    selects: str
    folders: tuple[str, ...]
    options: tuple[str, ...] = ()


NO_ENGINE = tuple(f"tests/{folder}" for folder in ("unit", "contract", "model", "fault", "process"))
ON_ALL_CORES = ("-n", "auto", "--dist", "loadfile")
TWO_AT_A_TIME = ("-n", "2", "--dist", "loadfile")
EVERY_CHANGE = (
    Part("tests that start no engine", "not slow", NO_ENGINE, ON_ALL_CORES),
    Part("tests with vLLM", "engine and not slow", ("tests/engine",), TWO_AT_A_TIME),
)
REST = (
    Part(
        "longer tests that start no engine",
        "(slow or hypothesis) and not engine",
        NO_ENGINE,
        ("--hypothesis-profile", "thorough", *ON_ALL_CORES),
    ),
    Part("longer tests with vLLM", "engine and slow", ("tests/engine",), TWO_AT_A_TIME),
    Part("tests with SGLang", "sglang", ("tests/under_sglang",), TWO_AT_A_TIME),
)


def install_test_programs() -> None:
    """Debian packages that tests run against, where they are missing and can be installed."""
    subprocess.run([sys.executable, str(Path(__file__).parents[1] / "tests" / "rigs" / "system_packages.py")])


def has_path(arguments: list[str]) -> bool:
    """Whether some argument is a path, which replaces the folders of every part."""
    return any(not each.startswith("-") and Path(each.partition("::")[0]).exists() for each in arguments)


def run_parts(parts: tuple[Part, ...], arguments: list[str]) -> int:
    """Run one part after the other, all of them; 0 when none failed and at least one had a test to run."""
    statuses = []
    for part in parts:
        began_s = time.monotonic()
        print(f"[tests] {part.name}", flush=True)
        folders = () if has_path(arguments) else part.folders
        options = ("-m", part.selects, *part.options, *SLOWEST, *arguments, *folders)
        statuses.append(subprocess.run([sys.executable, "-m", "pytest", *options]).returncode)
        minutes, seconds = divmod(int(time.monotonic() - began_s), 60)
        print(f"[tests] {part.name}: {minutes} min {seconds:02} s", flush=True)
    failed = [status for status in statuses if status not in (0, NOTHING_COLLECTED)]
    if failed:
        return failed[0]
    return 0 if 0 in statuses else NOTHING_COLLECTED


def main(arguments: list[str]) -> int:
    """Pytest's status."""
    install_test_programs()
    if "--rest" in arguments:
        sglang_venv.main()
        return run_parts(REST, [argument for argument in arguments if argument != "--rest"])
    return run_parts(EVERY_CHANGE, arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

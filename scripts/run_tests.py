"""The tests, in two sets. Together they are all tests of this checkout in its own environment.

    run_tests.py          for every change: each test that is not marked slow
    run_tests.py --rest   the others, and the property tests again, with more examples

Other arguments go to pytest. Tests that start no engine run as many at a time as there are cores. Engines run one after
the other: an engine and its manager take two cores, and where the manager gets no processor time, blocks are not stored
that tests expect. Tests under Dynamo and Ray, and on other releases of vLLM, have targets of their own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import sglang_venv

NOTHING_COLLECTED = 5
PARALLEL = ("-n", "auto", "--dist", "loadfile")
SLOWEST = ("--durations=40", "--durations-min=2")
EVERY_CHANGE = {
    "tests that start no engine": ("-m", "not slow and not engine and not sglang and not dynamo", *PARALLEL),
    "tests with vLLM": ("-m", "not slow and engine"),
}
REST = {
    "longer tests that start no engine": (
        *("-m", "(slow or hypothesis) and not engine and not sglang and not dynamo"),
        *("--hypothesis-profile", "thorough", *PARALLEL),
    ),
    "longer tests with vLLM": ("-m", "slow and engine"),
    "tests with SGLang": ("-m", "sglang"),
}


def install_test_programs() -> None:
    """Debian packages that tests run against, where they are missing and can be installed."""
    subprocess.run([sys.executable, str(Path(__file__).parents[1] / "tests" / "rigs" / "system_packages.py")])


def run_parts(parts: dict[str, tuple[str, ...]], arguments: list[str]) -> int:
    """Run one part after the other, all of them; 0 when none failed and at least one had a test to run."""
    statuses = []
    for name, options in parts.items():
        began_s = time.monotonic()
        print(f"[tests] {name}", flush=True)
        command = [sys.executable, "-m", "pytest", *options, *SLOWEST, *arguments]
        statuses.append(subprocess.run(command).returncode)
        minutes, seconds = divmod(int(time.monotonic() - began_s), 60)
        print(f"[tests] {name}: {minutes} min {seconds:02} s", flush=True)
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

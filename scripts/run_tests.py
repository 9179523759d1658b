"""All tests: first those that start no engine, then those that do; files side by side, one for each core.

Arguments go to pytest, both times. An engine computes on one core and takes memory, so there are at most four. Engine
tests that are marked slow are left to `make support-matrix`.
"""

from __future__ import annotations

import subprocess
import sys

NOTHING_COLLECTED = 5
FILES_BESIDE = ["-n", "auto", "--dist", "loadfile"]
PARTS = (
    ["-m", "not engine", *FILES_BESIDE],
    ["-m", "engine and not slow", *FILES_BESIDE, "--maxprocesses", "4"],
)


def main() -> int:
    """0 when both parts passed and at least one had a test to run."""
    statuses = []
    for part in PARTS:
        statuses.append(subprocess.run([sys.executable, "-m", "pytest", *part, *sys.argv[1:]]).returncode)
        if statuses[-1] not in (0, NOTHING_COLLECTED):
            return statuses[-1]
    return 0 if 0 in statuses else NOTHING_COLLECTED


if __name__ == "__main__":
    raise SystemExit(main())

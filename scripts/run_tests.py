"""All tests: first those that start no engine, as many at a time as there are cores, then the engines one by one.

Arguments go to pytest, each time. An engine and its manager take two cores, so nothing runs beside them: a manager
that gets no processor time grants no slots, and then blocks are not stored that tests expect. Tests that are marked
slow are left to `make slow-test`, with an engine to `make support-matrix`, under SGLang to `make sglang-test`; and all
under NVIDIA's Dynamo to `make dynamo-test`.
"""

from __future__ import annotations

import subprocess
import sys

NOTHING_COLLECTED = 5
PARTS = (
    ["-m", "not engine and not dynamo and not sglang and not slow", "-n", "auto", "--dist", "loadfile"],
    ["-m", "engine and not slow"],
    ["-m", "sglang and not slow"],
)


def main() -> int:
    """0 when all parts passed and at least one had a test to run."""
    statuses = []
    for part in PARTS:
        statuses.append(subprocess.run([sys.executable, "-m", "pytest", *part, *sys.argv[1:]]).returncode)
        if statuses[-1] not in (0, NOTHING_COLLECTED):
            return statuses[-1]
    return 0 if 0 in statuses else NOTHING_COLLECTED


if __name__ == "__main__":
    raise SystemExit(main())

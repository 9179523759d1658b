"""`make slow-test`: the tests that start no engine and take long; writes their row of the support matrix.

They run in `.venv`, as many at a time as there are cores. Arguments go to pytest.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from support_matrix import describe, read_junit, read_report, write_report
from venvs import ROOT, Venv, say

SLOW = "slow and not engine and not dynamo and not sglang"


def main() -> int:
    """0 when something ran and nothing failed."""
    venv = Venv(ROOT / ".venv")
    junit = venv.path / "slow-tests.xml"
    junit.unlink(missing_ok=True)
    say("tests that take long")
    words = ("-m", "pytest", "-m", SLOW, "-q", "-n", "auto", "--dist", "loadfile", f"--junitxml={junit}")
    venv.run(*words, *sys.argv[1:])
    row = {**describe(venv, "V1"), **read_junit(junit)}
    report = read_report()
    report["slow"] = {version("openkvbm"): row}
    if not sys.argv[1:]:
        write_report(report)
    return 0 if row["passed"] and not row["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())

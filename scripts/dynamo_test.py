"""`make dynamo-test`: the tests under NVIDIA's Dynamo, in its own environment; writes their row of the support matrix.

Arguments go to pytest. Prefill and decode apart without Dynamo is among the engine tests (`make support-matrix`).
"""

from __future__ import annotations

import os
import sys

import dynamo_venv
from support_matrix import describe, read_junit, read_report, write_report
from venvs import ROOT, say


def main() -> int:
    """0 when something ran and nothing failed."""
    venv = dynamo_venv.prepare()
    junit = venv.path / "dynamo-tests.xml"
    junit.unlink(missing_ok=True)
    # The programs of its packages, as nats-server.
    os.environ["PATH"] = f"{venv.path / 'bin'}:{os.environ['PATH']}"
    say(f"tests under Dynamo {dynamo_venv.DYNAMO} with vLLM {dynamo_venv.VLLM}")
    words = ("-m", "pytest", "-m", "dynamo", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}")
    logs = f"--basetemp={venv.path / 'tests'}"
    venv.run(*words, logs, str(ROOT / "tests" / "under_dynamo"), *sys.argv[1:])
    row = {**describe(venv, "V1"), **read_junit(junit), "vllm": dynamo_venv.VLLM}
    report = read_report()
    report.setdefault("dynamo", {})[dynamo_venv.DYNAMO] = row
    if not sys.argv[1:]:
        write_report(report)
    return 0 if row["passed"] and not row["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())

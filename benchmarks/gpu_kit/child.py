"""The process of one case: `python -m benchmarks.gpu_kit.child MODULE REQUEST RESULT`."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import signal
import sys
from pathlib import Path

from benchmarks.gpu_kit.ledger import FAILED

PR_SET_PDEATHSIG = 1
STACK_AT = 0.95
"""After this share of its time a process that hangs writes where its threads are."""


def main() -> int:
    """Write what the module's `measure` finds, or the error it ended with."""
    module, request_path, result = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # no case outlives its runner
    request = json.loads(Path(request_path).read_text())
    faulthandler.enable()
    faulthandler.dump_traceback_later(request["limit_s"] * STACK_AT)
    try:
        measure = importlib.import_module(f"benchmarks.gpu_kit.{module}").measure
        row = measure(request)
    except Exception as error:
        import traceback

        traceback.print_exc()
        row = {
            "state": FAILED,
            "why": f"{type(error).__name__}: {error}"[:600],
            "log": traceback.format_exc().splitlines()[-12:],
        }
    Path(result).write_text(json.dumps(row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The process of one case: `python -m benchmarks.gpu_kit.child MODULE REQUEST RESULT`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks.gpu_kit.ledger import FAILED


def main() -> int:
    """Write what the module's `measure` says of the request, or the error it ended with."""
    module, request, result = sys.argv[1:]
    try:
        measure = importlib.import_module(f"benchmarks.gpu_kit.{module}").measure
        row = measure(json.loads(Path(request).read_text()))
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

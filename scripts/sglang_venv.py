"""Make `.venvs/sglang`: SGLang beside the packages of `.venv`, which it shares: torch above all.

Run by `make sglang-test` and `make test-all`. Does nothing when the environment is up to date. SGLang's own metadata
asks for CUDA builds of torch and of its kernels, so it is installed without its requirements. Of those, `.venv` has
what an engine imports except for `NEEDED`; the rest is stood in for by `tests/rigs/sglang/without_cuda`.
"""

from __future__ import annotations

import sys

from venv_beside import CannotBeHad, beside
from venvs import Venv, say

SGLANG = "0.5.23"
NEEDED = ("orjson>=3.10", "gguf>=0.19")
"""What SGLang imports at its start beyond what vLLM brings."""


def prepare() -> Venv:
    """The environment, made if needed. Raises CannotBeHad where SGLang cannot be had or imported."""
    return beside("sglang", __file__, f"SGLang {SGLANG}", "--no-deps", f"sglang=={SGLANG}", *NEEDED)


def main() -> int:
    """0, also where SGLang cannot be had: its tests are then skipped."""
    try:
        prepare()
    except CannotBeHad as reason:
        say(f"no tests under SGLang: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

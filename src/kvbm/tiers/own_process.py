"""How a child that runs a module of ours is called."""

from __future__ import annotations

import os

_SOURCES = os.path.abspath(__file__).removesuffix(os.path.join("kvbm", "tiers", "own_process.py"))


def program_of(module: str) -> str:
    """A program for `python -c` that calls `main` of this module.

    It never finds a `kvbm` of the working directory; ours is found last where it is found by other means.
    """
    return (
        "import sys; sys.path[:] = [path for path in sys.path if path]; "
        f"sys.path.append({_SOURCES!r}); "
        f"from {module} import main; main()"
    )

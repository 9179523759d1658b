"""The default runtime directory."""

from __future__ import annotations

import os


def default_runtime_dir() -> str:
    """The directory of sockets and locks when none is set: `$XDG_RUNTIME_DIR/kvbm`, or `/tmp/kvbm-<uid>`."""
    return runtime_dir_under(os.environ.get("XDG_RUNTIME_DIR", ""))


def runtime_dir_under(xdg_runtime_dir: str) -> str:
    """`default_runtime_dir` for a given `$XDG_RUNTIME_DIR`; one that cannot be written counts as unset."""
    if os.path.isabs(xdg_runtime_dir) and os.access(xdg_runtime_dir, os.W_OK | os.X_OK):
        return os.path.join(xdg_runtime_dir, "kvbm")
    return f"/tmp/kvbm-{os.getuid()}"

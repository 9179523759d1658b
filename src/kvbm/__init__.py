"""KVBM: keeps an LLM engine's KV cache in host memory and on disk, and brings it back.

`BlockManager` is the library; engines use `kvbm.vllm_integration`, operators the `kvbm` command. Importing this
package imports neither torch nor an engine, and the library only when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbm.block import BlockKey, BlockState, Outcome, Tier
from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable, SettingsError, TierError
from kvbm.layout import BlockLayout, Namespace

if TYPE_CHECKING:
    from kvbm.library import BlockManager, Hit

__all__ = [
    "BlockKey",
    "BlockLayout",
    "BlockManager",
    "BlockState",
    "Hit",
    "KvbmError",
    "ManagerRefused",
    "ManagerUnavailable",
    "Namespace",
    "Outcome",
    "SettingsError",
    "Tier",
    "TierError",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`BlockManager` and `Hit`, imported on first use: the command line starts without them."""
    if name in ("BlockManager", "Hit"):
        from kvbm import library

        return getattr(library, name)
    raise AttributeError(f"module 'kvbm' has no attribute {name!r}")

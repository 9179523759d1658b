"""KVBM: keeps an LLM engine's KV cache in host memory and on disk, and brings it back.

`BlockManager` is the library; engines use `kvbm.vllm_integration`, operators the `kvbm` command. Importing this
package imports nothing: each name is fetched from its module when it is first asked for. It only looks whether the
files around it are its own: the distribution is `openkvbm`, and NVIDIA's `kvbm` would share this folder.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from openkvbm.installation import refuse_mixture

if TYPE_CHECKING:
    from kvbm.block import BlockKey, BlockState, Outcome, Tier
    from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable, SettingsError, TierError
    from kvbm.groups import Group, GroupKind
    from kvbm.hashing import Chain
    from kvbm.layout import BlockLayout, Namespace
    from kvbm.library.block_manager import BlockManager
    from kvbm.library.hit import Hit

__all__ = [
    "BlockKey",
    "BlockLayout",
    "BlockManager",
    "BlockState",
    "Chain",
    "Group",
    "GroupKind",
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

refuse_mixture()

_MODULES = {
    "block": ("BlockKey", "BlockState", "Outcome", "Tier"),
    "errors": ("KvbmError", "ManagerRefused", "ManagerUnavailable", "SettingsError", "TierError"),
    "groups": ("Group", "GroupKind"),
    "hashing": ("Chain",),
    "layout": ("BlockLayout", "Namespace"),
    "library": ("BlockManager", "Hit"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            found: object = getattr(import_module(f"kvbm.{module}"), name)
            return found
    if name in ("KvbmLeader", "KvbmWorker"):
        import_module("kvbm.elsewhere").refuse(f"kvbm.{name}")
    raise AttributeError(f"module 'kvbm' has no attribute {name!r}")

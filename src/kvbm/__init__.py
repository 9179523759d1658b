"""KVBM: keeps an LLM engine's KV cache in host memory and on disk, and brings it back.

`BlockManager` is the library; engines use `kvbm.vllm_integration`, operators the `kvbm` command. Importing this
package imports neither torch nor an engine.
"""

from kvbm.block import BlockKey, BlockState, Outcome, Tier
from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable, SettingsError, TierError
from kvbm.layout import BlockLayout, Namespace
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

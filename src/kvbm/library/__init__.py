"""KVBM as a Python library: blocks are kept in this process, or at a shared manager."""

from kvbm.library.block_manager import BlockManager
from kvbm.library.hit import Hit

__all__ = ["BlockManager", "Hit"]

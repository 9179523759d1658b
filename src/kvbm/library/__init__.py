"""KVBM as a Python library, without a server."""

from kvbm.library.block_manager import BlockManager, Hit

__all__ = ["BlockManager", "Hit"]

"""What an engine tells of its device blocks, and the one thing that it is asked to do with them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol


class DeviceBlocks(Protocol):
    """The engine's pool of device blocks, as far as the leader needs it."""

    def tag(self, block: int) -> Hashable | None:
        """What the block holds in the engine's own terms; None when it holds nothing that can be found again."""

    def next_out(self, limit: int) -> Sequence[int]:
        """Up to `limit` free blocks in the order in which the engine will hand them out."""

    def forget_all(self) -> None:
        """No request that comes finds any block any more; who has blocks keeps them."""

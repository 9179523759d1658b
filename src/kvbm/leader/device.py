"""The leader's questions to an engine about its device blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol


class DeviceBlocks(Protocol):
    """The engine's pool of device blocks, as far as the leader needs it."""

    def tag(self, block: int) -> Hashable | None:
        """The engine's own name of the block's content; None when no later request could find that content."""

    def next_out(self, limit: int) -> Sequence[int]:
        """Up to `limit` free blocks in the order in which the engine will hand them out."""

    def forget_all(self) -> None:
        """Later requests find no block on the device; requests that hold blocks keep them."""

    def pin(self, blocks: Sequence[int]) -> bool:
        """Keep blocks that are in use from being handed out again; False where the engine cannot."""

    def unpin(self, blocks: Sequence[int]) -> None:
        """End a pin of these blocks; what nobody uses any more may be handed out again."""

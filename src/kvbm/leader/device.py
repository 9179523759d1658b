"""The leader's questions to an engine about its device blocks, and the blocks that it keeps from being handed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

PINNED_SHARE = 8
"""One in so many of the device's blocks may be pinned when the blocks of a request that ends are pinned too."""


class DeviceBlocks(Protocol):
    """The engine's pool of device blocks, as far as the leader needs it."""

    @property
    def block_count(self) -> int:
        """How many blocks the pool has; 0 while that is unknown."""

    def forget_all(self) -> None:
        """Later requests find no block on the device; requests that hold blocks keep them."""

    def pin(self, blocks: Sequence[int]) -> bool:
        """Keep blocks that are in use from being handed out again; False where the engine cannot."""

    def unpin(self, blocks: Sequence[int]) -> None:
        """End a pin of these blocks; what nobody uses any more may be handed out again."""


class Pins:
    """Counts the blocks of a device that are pinned; without a `device` none is. A block that is pinned twice counts
    twice."""

    def __init__(self, device: DeviceBlocks | None) -> None:
        self._device = device
        self._count = 0

    def has_room(self, count: int) -> bool:
        """Whether so many blocks of a request that ends may be pinned: the engine needs most of its blocks itself."""
        return self._device is not None and self._count + count <= self._device.block_count // PINNED_SHARE

    def pin(self, blocks: Sequence[int]) -> bool:
        """See `DeviceBlocks`."""
        pinned = self._device is not None and self._device.pin(blocks)
        self._count += len(blocks) if pinned else 0
        return pinned

    def unpin(self, blocks: Sequence[int]) -> None:
        """See `DeviceBlocks`."""
        assert self._device is not None and self._count >= len(blocks)
        self._count -= len(blocks)
        self._device.unpin(blocks)

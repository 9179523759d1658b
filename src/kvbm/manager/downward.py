"""What is told of blocks in host memory to all tiers below it: the disk and the stores each choose for themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbm.block import BlockKey
from kvbm.manager.offload import Offloader
from kvbm.manager.remote_side import RemoteSide


@dataclass(frozen=True, slots=True, eq=False)
class Downward:
    """The queues down. `offloader` is the disk's of now: a disk that was off has a new one."""

    offloader: Callable[[], Offloader[BlockKey] | None]
    remotes: Sequence[RemoteSide]

    def __bool__(self) -> bool:
        """Whether there is anything below."""
        return bool(self.remotes) or self.offloader() is not None

    def committed(self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None]) -> None:
        """These blocks, behind those of `parents`, came into host memory from the device."""
        if (offloader := self.offloader()) is not None:
            offloader.committed(keys, parents)
        for remote in self.remotes:
            if remote.writer is not None:
                remote.writer.committed(keys, parents)

    def used(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Consecutive blocks of a chain, which are held somewhere, were asked for again; `parent` is before them."""
        if (offloader := self.offloader()) is not None:
            offloader.used(keys, parent)
        for remote in self.remotes:
            remote.used(keys, parent)

    def pump(self) -> None:
        """Submit what the disk takes: blocks in a staging area wait for nothing."""
        if (offloader := self.offloader()) is not None:
            offloader.pump()

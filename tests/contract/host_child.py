"""A process that maps one shard of a host arena as a rank does, and executes commands, line by line.

Run as a program: WITH REGION_FD GENERATION_FD SLOT_COUNT SHARD_BYTES. WITH "mapping" takes the worker's own `Mapping`,
copies and all (needs torch); "open_arena" maps without it. Each command is answered by one line:

- ``read SLOT GENERATION``: the digest of the bytes, or ``changed`` when the slot was not intact before or after;
- ``write SLOT TEXT``: fill the slot with the bytes that belong to the text; ``written``;
- ``close``: drop the mapping; how many mappings and descriptors of the arena are left.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from contract.host_arena_tier import RankMapping
from kvbm.layout import BlockLayout

if TYPE_CHECKING:
    from kvbm.worker.mapping import Mapping

MEMFD = "memfd:kvbm-region"


def make_bytes(text: str, length: int) -> bytes:
    """The bytes that belong to a text."""
    return hashlib.shake_128(text.encode()).digest(length)


def digest(content: bytes) -> str:
    """Bytes as an answer shows them."""
    return hashlib.sha256(content).hexdigest()


def traces() -> int:
    """Mappings and descriptors of arenas that this process holds, garbage included."""
    found = sum(MEMFD in line for line in Path("/proc/self/maps").read_text().splitlines())
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += MEMFD in os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            pass  # the descriptor that the listing itself needed
    return found


class Side(Protocol):
    """The interface of both kinds of mapping."""

    def intact(self, slot: int, generation: int) -> bool: ...
    def read(self, slot: int) -> bytes: ...
    def write(self, slot: int, content: bytes) -> None: ...
    def close(self) -> None: ...


class WorkerSide:
    """`Mapping` over a device of one block in main memory."""

    def __init__(self, fds: list[int], slot_count: int, layout: BlockLayout) -> None:
        import torch

        from kvbm.protocol import PROTOCOL_VERSION, Welcome
        from kvbm.transfer import DeviceCache
        from kvbm.worker.mapping import Mapping

        self._block = torch.zeros(1, 2, 1, 1, layout.shard_bytes // 2, dtype=torch.uint8)
        cache = DeviceCache.from_tensors({"layer": self._block}, 1)
        assert cache.shard_bytes == layout.shard_bytes
        welcome = Welcome(
            version=PROTOCOL_VERSION, epoch=1, slot_count=slot_count, slot_bytes=layout.slot_bytes
        )
        self._mapping: Mapping | None = Mapping(welcome, fds, cache)

    @property
    def mapping(self) -> Mapping:
        assert self._mapping is not None
        return self._mapping

    def intact(self, slot: int, generation: int) -> bool:
        return self.mapping.intact([slot], [generation]) == 1

    def read(self, slot: int) -> bytes:
        self._block.zero_()
        self.mapping.copier.load([(0, slot)])
        return bytes(self._block.flatten().tolist())

    def write(self, slot: int, content: bytes) -> None:
        import torch

        words = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._block.copy_(words.view(self._block.shape))
        self.mapping.copier.store([(0, slot)])

    def close(self) -> None:
        self.mapping.close()
        self._mapping = None


def answer(side: Side, command: list[str], shard_bytes: int) -> str:
    """Do what one line asks."""
    if command[0] == "read":
        slot, generation = int(command[1]), int(command[2])
        before = side.intact(slot, generation)
        content = side.read(slot)[:shard_bytes]
        return digest(content) if before and side.intact(slot, generation) else "changed"
    if command[0] == "write":
        side.write(int(command[1]), make_bytes(command[2], shard_bytes))
        return "written"
    assert command == ["close"]
    side.close()
    gc.collect()
    return str(traces())


def main() -> None:
    taken, *numbers = sys.argv[1:]
    region_fd, generation_fd, slot_count, shard_bytes = map(int, numbers)
    layout = BlockLayout(block_tokens=1, shard_bytes=shard_bytes)
    fds = [region_fd, generation_fd]
    worker = taken == "mapping"
    side = WorkerSide(fds, slot_count, layout) if worker else RankMapping(fds, layout.slot_bytes)
    for line in sys.stdin:
        sys.stdout.write(answer(side, line.split(), shard_bytes) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""How a disk tier moves blocks between memory and a slab file, and how it computes a block's checksum.

`HostBlockIo` is the ordinary way: vectored system calls between the page-aligned views of host memory and the file,
xxh3 over the bytes. `nixl.block_io.NixlBlockIo` is the direct one: a driver moves the bytes, which may lie on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import msgspec

from kvbm.block import BlockKey
from kvbm.errors import TierError
from kvbm.layout import Namespace
from kvbm.tiers.disk.journal import block_checksum
from kvbm.tiers.disk.syscalls import Syscalls, read_fully, write_fully

CHECKSUM_FIELD = "disk_checksum"
"""The field of a disk namespace that names its kind of checksum; absent for xxh3."""

PAGE_SUMS = "page-sums-1"
"""The checksum that a GPU can compute as well: see `page_sums`."""


class DeviceSpan(msgspec.Struct, frozen=True):
    """A run of bytes that only a device can read; for GPU memory it stands in the place of a `memoryview`."""

    address: int
    nbytes: int


Buffer = memoryview | DeviceSpan


class RunBuffers(NamedTuple):
    """The memory of a run: each block's buffers, one per shard, and all of it in the order in which it lies on disk."""

    blocks: Sequence[Sequence[Buffer]]
    whole: Sequence[Buffer]

    @classmethod
    def of_shards(cls, shards: Sequence[Buffer], count: int) -> RunBuffers:
        """From one buffer per shard with the parts of `count` blocks one after the other."""
        if count == 1:
            return cls((shards,), shards)
        size = shards[0].nbytes // count
        if len(shards) == 1:
            shard = shards[0]
            return cls([(_part(shard, i * size, size),) for i in range(count)], shards)
        return cls.of_blocks([[_part(shard, i * size, size) for shard in shards] for i in range(count)])

    @classmethod
    def of_blocks(cls, blocks: Sequence[Sequence[Buffer]]) -> RunBuffers:
        """From the buffers of each block, wherever they lie."""
        return cls(blocks, [buffer for block in blocks for buffer in block])

    def part(self, first: int, end: int) -> RunBuffers:
        """The blocks from `first` to before `end`."""
        if end - first == len(self.blocks):
            return self
        return RunBuffers.of_blocks(self.blocks[first:end])


def _part(buffer: Buffer, start: int, size: int) -> Buffer:
    if isinstance(buffer, DeviceSpan):
        return DeviceSpan(buffer.address + start, size)
    return buffer[start : start + size]


Checksum = Callable[[bytes, BlockKey, Sequence[memoryview]], bytes]
"""(fingerprint, key, the block's bytes in order) → 16 bytes."""


class DirectRefused(TierError):
    """The direct path between this memory and this disk cannot be used; another one may be."""


class BufferStillInUse(OSError):
    """A transfer failed, and the device may still touch its buffer: do not use that before `BlockIo.idle` is True.

    Of several buffers the one that failed begins `moved_bytes` after the first and has `buffer_bytes`; 0: any of them.
    """

    moved_bytes = 0
    buffer_bytes = 0


class BlockIo(Protocol):
    """Reads and writes whole slots, one or several that are neighbours on disk.

    `read`, `write` and `checksum` are called by several threads at once.
    """

    checksum_kind: str

    def attach(self, dir_fd: int, files: Sequence[tuple[int, int]], direct: bool) -> None:
        """Slab files were opened: (descriptor, size) of each; `direct`: they bypass the page cache.

        Raises OSError, and DirectRefused when these files cannot be reached this way.
        """

    def detach(self) -> None:
        """The files of the last `attach` are about to be closed; nothing is under way. Never raises."""

    def read(self, fd: int, targets: Sequence[Buffer], offset: int) -> None:
        """Fill all targets from `offset` on. Raises OSError."""

    def write(self, fd: int, sources: Sequence[Buffer], offset: int) -> None:
        """Write all sources from `offset` on. Raises OSError."""

    def checksum(self, fingerprint: bytes, key: BlockKey, buffers: Sequence[Buffer]) -> bytes:
        """16 bytes over fingerprint, key and the bytes in order. Raises OSError when the device cannot read them."""

    def idle(self) -> bool:
        """False while a transfer that failed may still touch its buffer. Never blocks."""

    def close(self) -> None:
        """Release everything but buffers that are still in use: those stay until the process ends."""


class HostBlockIo:
    """System calls between host memory and files."""

    checksum_kind = ""

    def __init__(self, syscalls: Syscalls) -> None:
        self._syscalls = syscalls

    def attach(self, dir_fd: int, files: Sequence[tuple[int, int]], direct: bool) -> None:
        """Nothing to prepare."""

    def detach(self) -> None:
        """Nothing to give back."""

    def read(self, fd: int, targets: Sequence[Buffer], offset: int) -> None:
        read_fully(self._syscalls, fd, _views(targets), offset)

    def write(self, fd: int, sources: Sequence[Buffer], offset: int) -> None:
        write_fully(self._syscalls, fd, _views(sources), offset)

    def checksum(self, fingerprint: bytes, key: BlockKey, buffers: Sequence[Buffer]) -> bytes:
        # Not through `_views`: this is called for each of many small blocks, and xxh3 takes nothing but memory.
        return block_checksum(fingerprint, key, cast(Sequence[memoryview], buffers))

    def idle(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing to give up."""


def disk_namespace(namespace: Namespace, checksum_kind: str) -> Namespace:
    """The namespace of directories whose blocks carry this kind of checksum: others are never read that way."""
    if not checksum_kind:
        return namespace
    return msgspec.structs.replace(namespace, fields=(*namespace.fields, (CHECKSUM_FIELD, checksum_kind)))


def host_checksum(namespace: Namespace) -> Checksum | None:
    """The checksum of a directory's blocks, computed in host memory; None for a kind that is not known here."""
    kind = dict(namespace.fields).get(CHECKSUM_FIELD, "")
    if not kind:
        return block_checksum
    if kind != PAGE_SUMS:
        return None
    from kvbm.tiers.disk.page_sums import host_page_checksum

    return host_page_checksum


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """The buffer as host memory. A caller that passes device memory has opened the wrong tier."""
    views = [buffer for buffer in buffers if isinstance(buffer, memoryview)]
    assert len(views) == len(buffers), "system calls cannot reach device memory"
    return views

"""The slab files: preallocated, whole slots only, read and written through a `BlockIo`."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvbm.block import SlotIndex
from kvbm.layout import PAGE_BYTES
from kvbm.tiers.disk.block_io import BlockIo, Buffer
from kvbm.tiers.disk.geometry import DiskGeometry
from kvbm.tiers.disk.syscalls import Syscalls, write_fully

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("kvbm.tiers.disk.tier")

ZEROFILL_CHUNK_BYTES = 16 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def slab_name(slab: int) -> str:
    """The name of slab number `slab` in its directory."""
    return f"slab-{slab:03d}"


class SlabFiles:
    """The slabs of one directory, open. `direct` tells whether O_DIRECT is in use, `sparse` whether the filesystem
    could not reserve their bytes.

    Thread-safe after `open`: reads and writes share nothing but descriptors, and `lacking` a byte for each slot.
    """

    def __init__(
        self, syscalls: Syscalls, io: BlockIo, geometry: DiskGeometry, where: str, o_direct: bool
    ) -> None:
        self._syscalls = syscalls
        self._io = io
        self._geometry = geometry
        self._where = where
        self._fds: list[int] = []
        self.direct = o_direct and _O_DIRECT != 0
        self.sparse = False
        self._written = bytearray()
        self.block_bytes = geometry.block_bytes

    def open(
        self,
        dir_fd: int,
        zerofill: bool,
        go_on: Callable[[], None],
        require_room: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        """Open and preallocate every slab.

        Raises OSError, DirectRefused, and whatever `go_on` and `require_room` raise: the first is called between
        the steps of a slow preallocation, the second before each, with the bytes that it takes.
        """
        for slab in range(self._geometry.slab_count):
            fd = self._open_one(slab_name(slab), dir_fd)
            self._fds.append(fd)
            go_on()
            self._allocate(fd, slab, zerofill, go_on, require_room)
        if self.direct:
            self._probe_direct()
        files = [(fd, self._geometry.slab_bytes(slab)) for slab, fd in enumerate(self._fds)]
        self._io.attach(dir_fd, files, self.direct)

    def pieces(self, slot: SlotIndex, wanted: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The places in `wanted`, rising, of a run that begins at `slot`, as (first, end) of what one call can move."""
        first = end = wanted[0]
        for place in wanted:
            if place != end or (place > first and (slot + place) % self._geometry.slab_slots == 0):
                yield first, end
                first = place
            end = place + 1
        yield first, end

    def read(self, slot: SlotIndex, targets: Sequence[Buffer]) -> None:
        """Fill the targets with the bytes of this slot and the next ones in its slab. Raises OSError."""
        self._transfer(self._io.read, slot, targets)

    def write(self, slot: SlotIndex, sources: Sequence[Buffer]) -> None:
        """Write the sources into this slot and the next ones in its slab. Raises OSError."""
        count = self._transfer(self._io.write, slot, sources)
        self.note_bytes(slot, count)

    def lacking(self, slot: SlotIndex, count: int) -> int:
        """How many of these slots take more bytes from the filesystem when they are written.

        In sparse files: those not written since they were opened, nor known to have been before. Asking the filesystem
        for holes would not do: one without fallocate may call the whole file data.
        """
        return self._written.count(0, slot, slot + count) if self.sparse else 0

    def note_bytes(self, slot: SlotIndex, count: int = 1) -> None:
        """The slots were written."""
        if self.sparse:
            self._written[slot : slot + count] = b"\1" * count

    def note_found(self, slots: np.ndarray) -> None:
        """The slots were written by an earlier owner."""
        import numpy as np  # takes long to load

        if self.sparse:
            np.frombuffer(self._written, np.uint8)[slots] = 1

    def vanished(self) -> str:
        """Empty, or one phrase saying which file was removed or cut short. Raises OSError."""
        for slab, fd in enumerate(self._fds):
            status = self._syscalls.fstat(fd)
            if status.st_nlink == 0:
                return f"{slab_name(slab)} was removed"
            if status.st_size < self._geometry.slab_bytes(slab):
                return f"{slab_name(slab)} was cut short"
        return ""

    def close(self) -> None:
        self._io.detach()
        while self._fds:
            self._syscalls.close(self._fds.pop())

    def _open_one(self, name: str, dir_fd: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        if self.direct:
            try:
                return self._syscalls.open(name, flags | _O_DIRECT, dir_fd=dir_fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fall_back("the filesystem refuses O_DIRECT")
        return self._syscalls.open(name, flags, dir_fd=dir_fd)

    def _allocate(
        self,
        fd: int,
        slab: int,
        zerofill: bool,
        go_on: Callable[[], None],
        require_room: Callable[[int], None],
    ) -> None:
        size = self._geometry.slab_bytes(slab)
        status = self._syscalls.fstat(fd)
        present = status.st_size
        if present > size:
            self._syscalls.ftruncate(fd, size)
        # Others may have taken some of the room that was free for all slabs together.
        require_room(size - status.st_blocks * 512)
        try:
            self._syscalls.fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        if not zerofill:
            self._syscalls.ftruncate(fd, size)
            self.sparse = True
            self._written = self._written or bytearray(self._geometry.slot_count)
            if status.st_blocks * 512 >= size:
                first, count = slab * self._geometry.slab_slots, size // self.block_bytes
                self._written[first : first + count] = b"\1" * count
            return
        # An interrupted fill continues where it stopped: the file ends with the bytes that were filled.
        chunk = memoryview(mmap.mmap(-1, min(size, ZEROFILL_CHUNK_BYTES)))
        position = present - present % PAGE_BYTES
        while position < size:
            length = min(len(chunk), size - position)
            require_room(length)
            write_fully(self._syscalls, fd, [chunk[:length]], position)
            position += length
            go_on()

    def _probe_direct(self) -> None:
        """Some filesystems accept the flag and refuse the transfer."""
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        try:
            self._syscalls.preadv(self._fds[0], [page], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fall_back("the filesystem refuses transfers with O_DIRECT")

    def _transfer(
        self, call: Callable[[int, Sequence[Buffer], int], None], slot: SlotIndex, buffers: Sequence[Buffer]
    ) -> int:
        """Move whole slots; how many they were."""
        slab, offset = self._geometry.locate(slot)
        size = sum(buffer.nbytes for buffer in buffers)
        assert size > 0 and size % self.block_bytes == 0
        assert offset + size <= self._geometry.slab_bytes(slab)
        direct = self.direct  # another thread may fall back while this call is on its way
        try:
            call(self._fds[slab], buffers, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            self._fall_back("a transfer with O_DIRECT was refused")
            call(self._fds[slab], buffers, offset)
        return size // self.block_bytes

    def _fall_back(self, reason: str) -> None:
        """Go on through the page cache. May be called by several I/O threads at once: it is idempotent."""
        log.warning(
            "disk tier in %s: %s; using buffered I/O, which is slower and costs memory", self._where, reason
        )
        self.direct = False
        for fd in self._fds:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)

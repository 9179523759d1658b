"""G2, the host tier: one memfd region per shard, shared with the workers that map it.

No file is left behind and a container's /dev/shm limit does not matter. Beside the regions lies a table with one
*generation* per slot (u64): it rises whenever a slot stops holding its block. A worker that copies out of a
slot compares the generation before and after, so a lease that ended under it can never turn into wrong bytes.

Every file is sealed: no process that has a descriptor can make it longer, or shorter while others map
it. Only the manager's own mapping, made before the seal, can write to the table.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Sequence

from kvbm.errors import ManagerUntrusted, SettingsError
from kvbm.layout import BlockLayout
from kvbm.numa import keep_thread_on
from kvbm.pages import populate_at, unmap_at

log = logging.getLogger("kvbm.tiers")

_TOUCH_CHUNK_BYTES = 64 << 20
GENERATION_BYTES = 8
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEAL_FUTURE_WRITE = 0x0010
"""F_SEAL_FUTURE_WRITE, from Linux 5.1 on; Python has no name for it."""


class HostArena:
    """The bytes of the host tier: `slot_count` slots of `layout.slot_bytes` in each of `layout.shard_count` regions."""

    def __init__(
        self,
        layout: BlockLayout,
        slot_count: int,
        touch_threads: int = 2,
        limit_bytes: int | None = None,
        field: str = "slot_count",
        huge_pages: bool = True,
    ) -> None:
        """Creates the regions; nothing is touched before `touch`. `huge_pages`: see `advise_huge_pages`.

        `limit_bytes` is what this process may use of the machine's memory, when less than all of it. Raises
        SettingsError, which names `field`, when more is asked for than there is.
        """
        from kvbm.tiers.generations import Generations  # needs numpy

        assert slot_count > 0
        self.layout = layout
        self.slot_count = slot_count
        region_bytes = slot_count * layout.slot_bytes
        refuse_beyond_memory(region_bytes * layout.shard_count, limit_bytes, field)
        sizes = [region_bytes] * layout.shard_count + [slot_count * GENERATION_BYTES]
        fds: list[int] = []
        try:
            for i, size in enumerate(sizes):
                name = f"kvbm-region-{i}"
                fds.append(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
                os.ftruncate(fds[-1], size)
            maps = [mmap.mmap(fd, size) for fd, size in zip(fds, sizes, strict=True)]
            for region in maps:
                advise_huge_pages(region, huge_pages)
            for fd in fds[:-1]:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            fds[-1] = _seal_for_reading(fds[-1])
        except (OSError, OverflowError) as error:
            for fd in fds:
                os.close(fd)
            raise SettingsError(
                field,
                f"{sum(sizes) / 1e9:.2f}",
                f"memory for {layout.shard_count} shard(s) of {slot_count} blocks cannot be had ({error})",
            ) from None
        *self.region_fds, self.generation_fd = fds
        *self._regions, self._generation_map = maps
        self._views = [memoryview(region) for region in self._regions]
        # Each life begins at another number, so that a promise of one life never fits the slots of another.
        self._generations = Generations(self._generation_map, int.from_bytes(os.urandom(6), "little"))
        self._closing = threading.Event()
        self._touch_threads = touch_threads
        self._touchers: list[threading.Thread] = []
        self._touched: set[int] = set()

    def touch(self, shard: int, numa_node: int = -1) -> None:
        """Have one region's pages touched by background threads, once, so that no first copy pays for them.

        With a NUMA node the threads run there, and so the kernel places the pages: a page stays where it was touched.
        """
        if shard in self._touched:
            return
        self._touched.add(shard)
        for part in range(self._touch_threads):
            arguments = (self._regions[shard], part, numa_node)
            name = f"kvbm-touch-{shard}-{part}"
            thread = threading.Thread(target=self._touch, args=arguments, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread is to be had: the first copies pay
                log.warning("pages are not touched before they are used: %s", error)
                return
            self._touchers.append(thread)

    def slot_views(self, slot: int, count: int = 1) -> list[memoryview]:
        """The bytes of the slot, or of `count` slots from it on: a writable view per shard, aligned to `PAGE_BYTES`."""
        size = self.layout.slot_bytes
        return [view[slot * size : (slot + count) * size] for view in self._views]

    def region(self, shard: int) -> mmap.mmap:
        """The mapping of one shard's region, for copies inside this process."""
        return self._regions[shard]

    def generation(self, slot: int) -> int:
        return self._generations.of((slot,))[0]

    def generations(self, slots: Sequence[int]) -> tuple[int, ...]:
        """The generation of each slot."""
        return self._generations.of(slots)

    def invalidate(self, slot: int) -> None:
        """The slot loses its block: copies out of it that are still running will be discarded."""
        self._generations.rise((slot,))

    def invalidate_all(self, slots: Sequence[int]) -> None:
        """`invalidate` for many slots at once."""
        self._generations.rise(slots)

    def close(self) -> None:
        """Release the regions; workers keep their own mappings until they drop them.

        It takes about 0.2 s a GiB, without the GIL: any thread may do it, once nobody uses the arena.
        """
        self._closing.set()
        for thread in self._touchers:
            thread.join()
        for region in self._regions:
            unmap_at(_address_of(region), len(region))
        self._generations.close()
        for view in self._views:
            view.release()
        for region in (*self._regions, self._generation_map):
            try:
                region.close()
            except BufferError:
                pass  # a transfer still exports a view; the mapping goes with it
        for fd in (*self.region_fds, self.generation_fd):
            os.close(fd)

    def _touch(self, region: mmap.mmap, part: int, numa_node: int) -> None:
        """Populate every `touch_threads`-th chunk of a region."""
        keep_thread_on(numa_node)
        step = self._touch_threads * _TOUCH_CHUNK_BYTES
        for start in range(part * _TOUCH_CHUNK_BYTES, len(region), step):
            if self._closing.is_set():
                return
            populate(region, start, min(_TOUCH_CHUNK_BYTES, len(region) - start))


def populate(region: mmap.mmap, start: int, length: int) -> bool:
    """Fault in pages of a writable shared mapping without holding the GIL; False where the kernel cannot (< 5.14)."""
    return populate_at(_address_of(region, start), length)


def _address_of(region: mmap.mmap, offset: int = 0) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region, offset))


def advise_huge_pages(region: mmap.mmap, wanted: bool) -> None:
    """Huge pages for a mapping, where the administrator lets shared memory have them on request; or none.

    On request is `advise` in /sys/kernel/mm/transparent_hugepage/shmem_enabled. With `always` there they come unless
    they are refused, and so they are refused where none are wanted. A page is what the process that touches it first
    asked for.
    """
    try:
        region.madvise(mmap.MADV_HUGEPAGE if wanted else mmap.MADV_NOHUGEPAGE)
    except (AttributeError, OSError) as error:
        log.debug("this kernel takes no advice about huge pages: %s", error)


def open_arena(
    fds: Sequence[int], slot_count: int | None = None, slot_bytes: int = 0, huge_pages: bool = True
) -> tuple[mmap.mmap, mmap.mmap]:
    """A worker's side: map its shard's region and the generation table from received descriptors (closes them).

    Raises ManagerUntrusted for files that could be made shorter under us, and, with `slot_count`, for files of another
    size than that many slots need.
    """
    try:
        if len(fds) != 2:
            raise ManagerUntrusted(f"the manager sent {len(fds)} files of memory: expected are 2")
        sizes = [_sealed_bytes(fd) for fd in fds]
        expected = [slot_count * slot_bytes, slot_count * GENERATION_BYTES] if slot_count else sizes
        if sizes != expected or not all(sizes):
            raise ManagerUntrusted(f"the manager's memory has {sizes} bytes: expected are {expected}")
        region = mmap.mmap(fds[0], sizes[0])
        advise_huge_pages(region, huge_pages)
        generations = mmap.mmap(fds[1], sizes[1], prot=mmap.PROT_READ)
    finally:
        for fd in fds:
            os.close(fd)
    return region, generations


def _sealed_bytes(fd: int) -> int:
    """The size of a file whose size is sealed. Raises ManagerUntrusted."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        seals = 0
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise ManagerUntrusted(
            "the manager's memory is not sealed, and its size could change under us: "
            "install the same kvbm on both sides"
        )
    return os.fstat(fd).st_size


def _seal_for_reading(fd: int) -> int:
    """A read-only descriptor in place of one that is mapped already; no process can make a writable one of it."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError as error:
        if (
            error.errno != errno.EINVAL
        ):  # a kernel before 5.1: all that is left is not to hand out a writable one
            raise
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    with contextlib.suppress(OSError):  # no /proc here: the seal has to do
        readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(fd)
        return readable
    return fd


def refuse_beyond_memory(wanted_bytes: int, limit_bytes: int | None, field: str) -> None:
    """Raise SettingsError for a setting that asks for more than the machine, or this process's limit, has."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    accepted = f"this machine has {total_bytes / 1e9:.2f} GB of memory in all"
    if limit_bytes is not None and limit_bytes < total_bytes:
        accepted = f"this container may use {limit_bytes / 1e9:.2f} GB of memory in all"
        total_bytes = limit_bytes
    if wanted_bytes > total_bytes:
        raise SettingsError(field, f"{wanted_bytes / 1e9:.2f} GB", accepted)

"""What the kernel is asked to do with pages of mapped memory. These calls do not hold the GIL; those of `mmap` do."""

from __future__ import annotations

import ctypes
from mmap import PAGESIZE

MEMORY_PAGE_BYTES = PAGESIZE
"""The kernel maps, locks and frees memory in pages of this size: 4 KiB on x86-64, 64 KiB on many Arm machines (GH200,
GB200). Slots are multiples of `layout.PAGE_BYTES`, which is 4 KiB everywhere, so neighbours may share a page."""

_MADV_DONTNEED, _MADV_POPULATE_WRITE = 4, 23
_libc = ctypes.CDLL(None, use_errno=True)


def populate_at(address: int, length: int) -> bool:
    """Fault in the whole pages in this range of a writable mapping; False where the kernel cannot (< 5.14).

    The kernel refuses a part of a page at the start, and would take in the rest of the page at the end.
    """
    start = -(-address // MEMORY_PAGE_BYTES) * MEMORY_PAGE_BYTES
    end = (address + length) // MEMORY_PAGE_BYTES * MEMORY_PAGE_BYTES
    if end <= start:
        return True
    return bool(
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE) == 0
    )


def unmap_at(address: int, length: int) -> None:
    """Take the pages of a shared mapping, which starts at a page, out of it; they come back where it is read again.

    The end of a mapping that has none takes no time.
    """
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_DONTNEED)

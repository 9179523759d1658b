"""What the kernel is asked to do with pages of mapped memory. These calls do not hold the GIL; those of `mmap` do."""

from __future__ import annotations

import ctypes

_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


def madvise(address: int, length: int, advice: int) -> bool:
    """madvise(2), of whole pages; False where the kernel cannot."""
    return bool(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice) == 0)


def populate_at(address: int, length: int) -> bool:
    """Fault in pages of a writable mapping; False where the kernel cannot (< 5.14)."""
    return madvise(address, length, _MADV_POPULATE_WRITE)

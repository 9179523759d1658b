"""What the kernel is asked to do with pages: whole ones alone, of whatever size."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from kvbm import pages


def populate_part(start: int, length: int, page_bytes: int) -> list[int]:
    """Which of 8 pages of the machine have memory after that range was populated."""
    memory = mmap.mmap(-1, 8 * mmap.PAGESIZE + page_bytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = base + -base % page_bytes
    if not pages.populate_at(first + start, length):
        pytest.skip("this kernel does not populate pages on request")
    resident = (ctypes.c_ubyte * 8)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(8 * mmap.PAGESIZE), resident) == 0
    return [page for page in range(8) if resident[page] & 1]


@pytest.mark.parametrize("length", [1, mmap.PAGESIZE - 1, mmap.PAGESIZE, 2 * mmap.PAGESIZE + 1])
def test_the_rest_of_a_page_at_the_end_is_left_alone(length: int) -> None:
    """The kernel would take it in."""
    assert populate_part(0, length, mmap.PAGESIZE) == [*range(length // mmap.PAGESIZE)]


@pytest.mark.parametrize(
    ("first", "count", "whole"), [(0, 3, []), (1, 6, []), (0, 4, [0, 1, 2, 3]), (3, 5, [4, 5, 6, 7])]
)
def test_pages_that_are_larger_are_left_alone_where_a_part_of_them_is_meant(
    monkeypatch: pytest.MonkeyPatch, first: int, count: int, whole: list[int]
) -> None:
    monkeypatch.setattr(pages, "MEMORY_PAGE_BYTES", 4 * mmap.PAGESIZE)
    assert populate_part(first * mmap.PAGESIZE, count * mmap.PAGESIZE, 4 * mmap.PAGESIZE) == whole

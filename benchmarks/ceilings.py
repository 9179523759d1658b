"""How fast this machine can move bytes at best, measured beside what is compared with it."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

READ_THREADS = 4
ROUNDS = 7


def copy_bytes_per_s(size_bytes: int, piece_bytes: int) -> float:
    """The best of several copies of so many bytes in pieces, with torch and all its threads."""
    import torch

    pieces = max(1, size_bytes // piece_bytes)
    source = torch.ones((pieces, piece_bytes), dtype=torch.uint8)
    target = torch.zeros_like(source)
    best_s = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for index in range(pieces):
            target[index].copy_(source[index])
        best_s = min(best_s, time.perf_counter() - started)
    return pieces * piece_bytes / best_s


def disk_read_bytes_per_s(directory: Path, size_bytes: int, piece_bytes: int) -> float:
    """The best of several reads of a file of so many bytes in pieces: O_DIRECT, a few threads, private pages.

    The file lies in `directory` and is gone afterwards. Raises OSError where the file system has no O_DIRECT.
    """
    pieces = max(1, size_bytes // piece_bytes)
    buffer = mmap.mmap(-1, pieces * piece_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(buffer)
    view[:] = os.urandom(piece_bytes) * pieces
    descriptor, name = tempfile.mkstemp(dir=directory)
    os.close(descriptor)
    direct = os.open(name, os.O_RDWR | os.O_DIRECT)
    try:
        for index in range(pieces):
            place = index * piece_bytes
            os.pwritev(direct, [view[place : place + piece_bytes]], place)
        os.fsync(direct)
        return _best_read(direct, view, pieces, piece_bytes)
    finally:
        os.close(direct)
        Path(name).unlink()


def _best_read(descriptor: int, view: memoryview, pieces: int, piece_bytes: int) -> float:
    def read(index: int) -> int:
        place = index * piece_bytes
        return os.preadv(descriptor, [view[place : place + piece_bytes]], place)

    best_s = float("inf")
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for _ in range(ROUNDS):
            started = time.perf_counter()
            moved = sum(pool.map(read, range(pieces)))
            best_s = min(best_s, time.perf_counter() - started)
            assert moved == pieces * piece_bytes
    return pieces * piece_bytes / best_s

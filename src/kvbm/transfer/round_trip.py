"""One block from a device to host memory and back, by the copies that an engine's workers make, timed and compared."""

from __future__ import annotations

import hashlib
import mmap
import time

import torch

from kvbm.errors import KvbmError
from kvbm.layout import PAGE_BYTES, round_up
from kvbm.transfer import DeviceCache, arena_tensor, make_copier

ROUNDS = 3
"""The fastest of so many counts: the first one pays for the device's start and for locking pages."""


def try_cuda(block_bytes: int) -> tuple[str, int, float, float]:
    """`round_trip` on the CUDA device that torch chooses; its name comes first."""
    if not torch.cuda.is_available():
        raise KvbmError(f"there is a GPU, and torch {torch.__version__} cannot use it")
    device = torch.device("cuda", torch.cuda.current_device())
    return str(device), *round_trip(device, block_bytes)


def round_trip(device: torch.device, block_bytes: int) -> tuple[int, float, float]:
    """Bytes of the block, and the seconds that it takes to store it and to load it into another one.

    Raises KvbmError where copies fail or change a byte.
    """
    size = round_up(block_bytes, PAGE_BYTES)
    content = torch.frombuffer(bytearray(hashlib.shake_128(b"round trip").digest(size)), dtype=torch.uint8)
    times: list[tuple[float, float]] = []
    try:
        blocks = torch.zeros((2, size), dtype=torch.uint8, device=device)
        blocks[0] = content
        cache = DeviceCache.from_tensors({"round trip": blocks}, block_count=2)
        copier = make_copier(cache, arena_tensor(mmap.mmap(-1, size), 1, size))
        try:
            for _ in range(ROUNDS):
                blocks[1] = 0
                begun_s = time.perf_counter()
                copier.store([(0, 0)], copier.mark())
                stored_s = time.perf_counter()
                copier.load([(1, 0)], copier.mark())
                times.append((stored_s - begun_s, time.perf_counter() - stored_s))
        finally:
            copier.close()
        same = bool((blocks[1].cpu() == content).all())
    except (RuntimeError, OSError) as error:
        raise KvbmError(" ".join(str(error).split())) from None
    if not same:
        raise KvbmError(f"{size} bytes came back changed")
    store_s, load_s = (min(column) for column in zip(*times, strict=True))
    return size, store_s, load_s

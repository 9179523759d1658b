"""One block between a GPU and host memory and back, by the copies that an engine's workers make."""

from __future__ import annotations

import hashlib
import mmap
import time
from typing import TYPE_CHECKING

from kvbm.cli.doctor_check import Check, advice, fault, ok
from kvbm.cli.doctor_round_trip import measured, speeds
from kvbm.errors import KvbmError
from kvbm.layout import round_up

if TYPE_CHECKING:
    import torch

NAME = "device round trip"
ROUNDS = 3
"""The fastest of so many is shown: the first one pays for the device's start and for locking pages."""


def check_device_round_trip(block_bytes: int, on_gpus: int) -> Check:
    """From device memory to host memory and into another device block. `on_gpus` is the memory of all GPUs here."""
    if not on_gpus:
        return ok(NAME, "no GPU here: nothing to try")
    try:
        import torch
    except ImportError:
        return advice(
            NAME, "not tried: torch is not installed here", "run it in the engine's own environment"
        )
    if not torch.cuda.is_available():
        remedy = "install a torch for CUDA, and look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return fault(NAME, f"there is a GPU, and torch {torch.__version__} cannot use it", remedy)
    return round_trip(torch.device("cuda", torch.cuda.current_device()), block_bytes)


def round_trip(device: torch.device, block_bytes: int) -> Check:
    """On this device: block 0 is stored into a slot, the slot loaded into block 1, and the two are compared."""
    import torch

    from kvbm.transfer import DeviceCache, arena_tensor, make_copier

    size = round_up(block_bytes, mmap.PAGESIZE)
    content = torch.frombuffer(bytearray(hashlib.shake_128(b"kvbm doctor").digest(size)), dtype=torch.uint8)
    times: list[tuple[float, float]] = []
    try:
        blocks = torch.zeros((2, size), dtype=torch.uint8, device=device)
        blocks[0] = content
        cache = DeviceCache.from_tensors({"doctor": blocks}, block_count=2)
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
    except (KvbmError, RuntimeError, OSError) as error:
        remedy = "no block can be copied from or to the GPU: look at nvidia-smi, the driver, and ulimit -l"
        return fault(NAME, " ".join(str(error).split()), remedy)
    if not same:
        return fault(NAME, f"{size} bytes came back changed", "suspect the GPU or its link: test it")
    store_s, load_s = (min(column) for column in zip(*times, strict=True))
    return ok(NAME, f"{device}, {speeds(size, store_s, load_s)}", **measured(size, store_s, load_s))

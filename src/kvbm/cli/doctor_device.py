"""The doctor's block between a GPU and host memory."""

from __future__ import annotations

import importlib

from kvbm.cli.doctor_check import Check, advice, fault, ok
from kvbm.cli.doctor_round_trip import measured, speeds
from kvbm.errors import KvbmError

NAME = "device round trip"


def check_device_round_trip(block_bytes: int, on_gpus: int) -> Check:
    """From device memory to host memory and back. `on_gpus` is the memory of all GPUs here, 0 without one."""
    if not on_gpus:
        return ok(NAME, "no GPU here: nothing to try")
    try:
        trial = importlib.import_module("kvbm.transfer.round_trip")  # needs torch, which is slow to load
    except ImportError:
        return advice(
            NAME, "not tried: torch is not installed here", "run it in the engine's own environment"
        )
    try:
        device, size, store_s, load_s = trial.try_cuda(block_bytes)
    except KvbmError as error:
        remedy = "no block can be kept: look at nvidia-smi, CUDA_VISIBLE_DEVICES, the installed torch"
        return fault(NAME, str(error), remedy)
    return ok(NAME, f"{device}, {speeds(size, store_s, load_s)}", **measured(size, store_s, load_s))

"""A process that ends while a copy of slots that are not page-locked hangs, on the stand-in for a driver."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from kvbm.testing.kv_views import scramble, stacked
from kvbm.transfer import DeviceCache
from kvbm.transfer.cuda.copier import CudaCopier
from kvbm.transfer.cuda.device import TorchDevice
from rigs.cuda_bench import BLOCKS
from rigs.libcuda.library import Libcuda
from rigs.libcuda.torch_cuda import DEVICE, TorchCuda, make_replacements
from rigs.manager_probe import wait_for

DEADLINE_S = 20.0


def main(library: str) -> None:
    """Begin a copy that does not end, say so, and return."""
    libcuda = Libcuda(Path(library))
    libcuda.set_host_pointer_use(False)
    for name, value in make_replacements(TorchCuda(libcuda)).items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    views = stacked("LBNHC", torch.float32)
    scramble(views, seed=1)
    libcuda.own(views.values())
    cache = DeviceCache.from_tensors(views, BLOCKS)
    arena = torch.zeros(4, cache.shard_bytes, dtype=torch.uint8)
    copier = CudaCopier(cache, arena, "batch", device=TorchDevice(DEVICE))
    assert copier.prepared(DEADLINE_S)
    assert copier.locks.locked_slots == 0
    libcuda.hold_copies()
    copying = copier.begin_store([(0, 0)])
    wait_for(lambda: libcuda.call_count("cuMemcpyBatchAsync") > 0, DEADLINE_S, "no copy was begun")
    assert not copying.done()
    sys.stdout.write("a copy hangs\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

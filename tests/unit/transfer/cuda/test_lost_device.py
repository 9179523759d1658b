"""A device that is lost between an engine's mark and the copies behind it: torch's calls fail before the driver's."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from ctypes import byref, c_uint64, c_void_p

import pytest
import torch

from kvbm.errors import DeviceLost
from kvbm.testing.kv_views import BLOCKS, PAIRS, SLOTS, stacked
from kvbm.transfer import DeviceCache, arena_tensor
from kvbm.transfer.cuda.copier import CudaCopier
from rigs.libcuda.torch_cuda import DEVICE, TorchCuda

PAGE = mmap.PAGESIZE
ILLEGAL_ADDRESS = 700


@pytest.fixture
def copier(torch_cuda: TorchCuda) -> Iterator[CudaCopier]:
    """One whose arena is not locked yet: it begins with the first copy."""
    views = stacked("LBNHC", torch.uint8)
    torch_cuda.libcuda.own(views.values())
    cache = DeviceCache.from_tensors(views, BLOCKS)
    cache.device = DEVICE
    arena = arena_tensor(mmap.mmap(-1, SLOTS * PAGE), SLOTS, PAGE)
    copier = CudaCopier(cache, arena, "batch")
    yield copier
    copier.close()


def lose(torch_cuda: TorchCuda) -> None:
    """The engine's own work fails."""
    torch_cuda.libcuda.fail("cuCtxGetCurrent", ILLEGAL_ADDRESS, loses_device=True)
    torch_cuda.libcuda.cuda.cuCtxGetCurrent(byref(c_void_p(c_uint64(0).value)))


@pytest.mark.parametrize("to_device", [False, True], ids=["store", "load"])
@pytest.mark.parametrize("locked", [False, True], ids=["staged", "locked"])
def test_copies_behind_the_mark_raise_device_lost(
    torch_cuda: TorchCuda, copier: CudaCopier, locked: bool, to_device: bool
) -> None:
    if locked:
        assert copier.prepared(20.0)
    mark = copier.mark()
    lose(torch_cuda)
    begin = copier.begin_load if to_device else copier.begin_store
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        begin(PAIRS, mark).wait()

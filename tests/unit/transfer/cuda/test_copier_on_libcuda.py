"""The CUDA copier over the real `CudaDriver` and `TorchDevice`, on a driver without a card: what machines differ in."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import pytest
import torch

from kvbm import pages
from kvbm.errors import DeviceLost
from kvbm.testing.kv_views import scramble, stacked
from kvbm.transfer import DeviceCache
from kvbm.transfer.cuda import page_lock
from kvbm.transfer.cuda.copier import CudaCopier
from kvbm.transfer.cuda.device import TorchDevice
from rigs.cuda_bench import BLOCKS, warnings
from rigs.cuda_model import DEADLINE_S, PAGE
from rigs.libcuda.library import Libcuda
from rigs.libcuda.torch_cuda import DEVICE

SLOTS = 40


class Bench:
    """A copier of the way that is named, with scrambled KV, and slots at the begin of a page of the machine."""

    def __init__(self, libcuda: Libcuda, method: str, slot_bytes: int) -> None:
        views = stacked("LBNHC", torch.float32)
        scramble(views, seed=1)
        libcuda.own(views.values())
        self.cache = DeviceCache.from_tensors(views, BLOCKS)
        memory = torch.frombuffer(
            mmap.mmap(-1, SLOTS * slot_bytes + pages.MEMORY_PAGE_BYTES), dtype=torch.uint8
        )
        start = -memory.data_ptr() % pages.MEMORY_PAGE_BYTES
        self.arena = memory[start : start + SLOTS * slot_bytes].view(SLOTS, slot_bytes)
        self.copier = CudaCopier(self.cache, self.arena, method, device=TorchDevice(DEVICE))

    def check_copies(self) -> None:
        """Every slot takes a block and gives it to another one."""
        for first in range(0, SLOTS - 4, 4):
            for region in self.cache.regions:
                region.device[4:8] = 0
            self.copier.store([(block, first + block) for block in range(4)])
            self.copier.load([(4 + block, first + block) for block in range(4)])
            for region in self.cache.regions:
                assert torch.equal(region.device[4:8], region.device[:4])


@pytest.fixture
def make(libcuda: Libcuda) -> Iterator[Callable[..., Bench]]:
    """Makes benches on the stand-in, which has no violations in the end."""
    benches: list[Bench] = []

    def made(method: str = "batch", slot_bytes: int = PAGE) -> Bench:
        benches.append(Bench(libcuda, method, slot_bytes))
        return benches[-1]

    yield made
    for bench in benches:
        bench.copier.close()
    assert libcuda.registered_bytes == 0


@pytest.mark.parametrize("method", ["batch", "rows"])
def test_nothing_is_locked_where_its_host_address_could_not_be_used(
    libcuda: Libcuda, make: Callable[..., Bench], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    libcuda.set_host_pointer_use(False)
    bench = make(method)
    assert bench.copier.prepared(DEADLINE_S)
    bench.check_copies()
    assert libcuda.call_count("cuMemHostRegister") == 0
    (line,) = warnings(caplog)
    assert "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0" in line


@pytest.mark.parametrize("slot_pages", [1, 3, 14])
def test_slots_that_share_pages_of_64_kib_are_all_locked(
    libcuda: Libcuda,
    make: Callable[..., Bench],
    slot_pages: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    libcuda.set_page_bytes(16 * PAGE)
    monkeypatch.setattr(pages, "MEMORY_PAGE_BYTES", 16 * PAGE)
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 14 * PAGE)
    bench = make(slot_bytes=slot_pages * PAGE)
    assert bench.copier.prepared(DEADLINE_S)
    assert libcuda.registered_bytes == SLOTS * slot_pages * PAGE
    assert libcuda.call_count("cuMemHostRegister") > 1
    bench.check_copies()
    assert warnings(caplog) == []


@pytest.mark.parametrize("result", [226, 810, 911])
def test_a_result_that_ends_the_process_is_a_lost_device(
    libcuda: Libcuda, make: Callable[..., Bench], result: int
) -> None:
    bench = make()
    assert bench.copier.prepared(DEADLINE_S)
    libcuda.fail("cuMemcpyBatchAsync", result)
    with pytest.raises(DeviceLost, match=rf"\({result}\); the device's context is lost"):
        bench.copier.store([(0, 0)])


def test_pages_that_were_refused_for_want_of_memory_are_locked_later(
    libcuda: Libcuda,
    make: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(page_lock, "RETRY_S", (1e-3,))
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 8 * PAGE)
    libcuda.fail("cuMemHostRegister", 2, nth=3)
    bench = make()
    assert bench.copier.prepared(DEADLINE_S)
    bench.copier._locking.join(DEADLINE_S)
    assert bench.copier.locks.locked_slots == SLOTS
    assert libcuda.registered_bytes == SLOTS * PAGE
    (line,) = warnings(caplog)
    assert "24 of 40 slots" in line
    bench.check_copies()

"""The real worker, mover, copier, page locks and staging over the stand-in for a CUDA driver, by chance.

An engine writes, stores, releases, loads and reads blocks in any order, while copies end late and calls fail. Whatever
it reads, and whatever slots hold in the end, must be what was written: see `rigs.libcuda.rank`. The controls take one
of the orders out, each of which must show.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

from kvbm.transfer.cuda import page_lock, staging
from kvbm.transfer.cuda.copier import CudaCopier, CudaCopying
from kvbm.transfer.cuda.device import TorchStream
from kvbm.transfer.cuda.driver import CudaDriver
from rigs.libcuda.rank import Rank
from rigs.libcuda.torch_cuda import TorchCuda

STEPS = 60
SEEDS = range(4)
METHODS = ("batch", "rows")
DELAY_S = 0.002
PAGE = 4096
FAILING = ("batch", "cuMemcpyBatchAsync", "cuMemcpy2DAsync", "cuEventRecord", "cuStreamWaitEvent")


@pytest.fixture
def device(torch_cuda: TorchCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchCuda]:
    """The engine is this thread. Pages are locked a few slots at a time, and the others staged a few at a time."""
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 3 * PAGE)
    monkeypatch.setattr(staging, "STAGING_BYTES_MAX", 4 * PAGE)
    torch_cuda.libcuda.spare_this_thread()
    yield torch_cuda
    torch_cuda.libcuda.spare_this_thread(False)


def run(device: TorchCuda, seed: int, method: str, *, errors: bool = False) -> tuple[Rank, list[str]]:
    """Some steps of a rank; what was wrong."""
    libcuda = device.libcuda
    libcuda.reset(seed)
    libcuda.configure(delay_max_s=DELAY_S)
    chosen = random.Random(seed)
    if errors and seed % 2:
        libcuda.fail("cuMemHostRegister", 2, nth=chosen.randint(1, 4), times=1000)
    rank = Rank(device, seed, method, STEPS)
    try:
        for step in range(STEPS):
            if errors and step % 4 == 0:
                libcuda.fail(chosen.choice(FAILING), chosen.choice((1, 2)), nth=chosen.randint(1, 3))
            rank.step()
        wrong = rank.finish()
    finally:
        rank.close()
    assert libcuda.registered_bytes == 0
    return rank, wrong


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", SEEDS)
def test_late_copies(device: TorchCuda, seed: int, method: str) -> None:
    rank, wrong = run(device, seed, method)
    assert wrong == []
    assert rank.stored > STEPS / 2
    assert rank.loaded > STEPS / 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", SEEDS)
def test_late_copies_and_errors(device: TorchCuda, seed: int, method: str) -> None:
    rank, wrong = run(device, seed, method, errors=True)
    assert wrong == []
    assert rank.failed > 0
    assert rank.stored > STEPS / 4
    assert rank.loaded > STEPS / 4


def nothing(*arguments: Any) -> None:
    """In place of what orders copies."""


def always(*arguments: Any) -> bool:
    return True


def read_early_always(self: CudaDriver, *arguments: Any, read_early: bool) -> None:
    copy_batch(self, *arguments, read_early=True)


copy_batch = CudaDriver.copy_batch

FAULTS = {
    "the engine waits for no copy": (CudaCopier, "hold", nothing),
    "copies wait for no mark": (TorchStream, "wait", nothing),
    "copies are over when they begin": (CudaCopying, "done", always),
    "stores are read early": (CudaDriver, "copy_batch", read_early_always),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_each_order_is_needed(device: TorchCuda, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    found = next((wrong for seed in SEEDS if (wrong := run(device, seed, "batch")[1])), [])
    assert found != []

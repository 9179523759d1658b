"""The real worker, mover, copier, page locks and staging on the stand-in for a CUDA driver, at random.

An engine writes, stores, releases, loads and reads blocks in any order, while copies end late and calls fail. All that
it reads, and all that slots hold in the end, must be what was written (`rigs.libcuda.rank`). Each control takes one
guarantee out, and must find wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvbm.transfer.cuda import page_lock, staging
from kvbm.transfer.cuda.copier import CudaCopier, CudaCopying
from kvbm.transfer.cuda.device import TorchStream
from kvbm.transfer.cuda.driver import CudaDriver
from kvbm.worker.mapping import Mapping
from rigs.libcuda.rank import DEADLINE_S, Rank
from rigs.libcuda.torch_cuda import TorchCuda

STEPS = 60
SEEDS = range(3)
RESTART_STEPS = 22
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


def run(
    device: TorchCuda, seed: int, method: str, *, errors: bool = False, restarts: bool = False
) -> tuple[Rank, list[str]]:
    """Some steps of a rank; what was wrong."""
    libcuda = device.libcuda
    libcuda.reset(seed)
    libcuda.set_delay(0.0, DELAY_S)
    chosen, failing = random.Random(seed), FAILING[0]
    if errors and seed % 2:
        libcuda.fail("cuMemHostRegister", 2, nth=chosen.randint(1, 4), times=1000)
    rank = Rank(device, seed, method, STEPS)
    try:
        for step in range(STEPS):
            restarting = restarts and step % RESTART_STEPS >= RESTART_STEPS - 5
            if errors and step % 4 == 0 and not restarting:
                # One at a time: where the wait for copies fails too that a first error left, the device counts as lost.
                libcuda.fail(failing, times=0)
                failing = chosen.choice(FAILING)
                libcuda.fail(failing, chosen.choice((1, 2)), nth=chosen.randint(1, 3))
            if restarting and step % RESTART_STEPS == RESTART_STEPS - 5:
                # A mapping that cannot be waited for when it is closed keeps its page locks.
                libcuda.fail(failing, times=0)
                rank.restart_manager()
            if restarting and step % RESTART_STEPS == RESTART_STEPS - 1:
                rank.await_manager()
            rank.run_step()
        wrong = rank.finish()
    finally:
        libcuda.fail(failing, times=0)
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


@pytest.mark.swallows("CUDA_ERROR_(INVALID_VALUE|OUT_OF_MEMORY)")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", SEEDS)
def test_late_copies_and_errors(device: TorchCuda, seed: int, method: str) -> None:
    rank, wrong = run(device, seed, method, errors=True)
    assert wrong == []
    assert rank.failed > 0
    assert rank.stored > STEPS / 4
    assert rank.loaded > STEPS / 4


@pytest.mark.swallows("CUDA_ERROR_(INVALID_VALUE|OUT_OF_MEMORY)", sometimes=True)
@pytest.mark.parametrize("seed", SEEDS)
def test_late_copies_while_the_manager_comes_and_goes(device: TorchCuda, seed: int) -> None:
    rank, wrong = run(device, seed, "batch", errors=True, restarts=True)
    assert wrong == []
    assert rank.memory.epoch == 3
    assert rank.memory.kept


def test_an_engine_is_never_held_up_by_a_copy_that_never_ends(device: TorchCuda) -> None:
    """The engine's stream waits for the copies, and its thread goes on planning."""
    rank = Rank(device, 0, "batch", STEPS)
    try:
        for _ in range(10):
            rank.run_step()
        rank.await_reports()
        rank.layerwise_share = 0.0
        device.libcuda.hold_copies()
        for _ in range(5):
            rank.begin_step()
        assert not rank.worker.quiesce(0.01)
        device.libcuda.hold_copies(False)
        assert rank.worker.quiesce(DEADLINE_S)
        assert rank.finish() == []
    finally:
        device.libcuda.hold_copies(False)
        rank.close()


@pytest.mark.swallows("^DeviceLost: ", sometimes=True)
def test_a_device_that_is_lost(device: TorchCuda, caplog: pytest.LogCaptureFixture) -> None:
    """The engine's next call says so, before or after a copy fails. All that is open ends, and nothing hangs."""
    rank = Rank(device, 0, "batch", STEPS)

    def go_on() -> None:
        while True:
            rank.run_step()

    try:
        for _ in range(20):
            rank.run_step()
        device.libcuda.fail("piece", 700)
        with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
            go_on()
        rank.engine.lost = True
        rank.await_reports()
    finally:
        rank.close()
    assert not any(record.levelname == "ERROR" and record.exc_info for record in caplog.records)


def do_nothing(*arguments: Any) -> None:
    """In place of what orders copies."""


def read_early_always(self: CudaDriver, *arguments: Any, read_early: bool) -> None:
    copy_batch(self, *arguments, read_early=True)


copy_batch = CudaDriver.copy_batch

FAULTS = {
    "the engine waits for no copy": (CudaCopier, "hold", do_nothing),
    "copies wait for no mark": (TorchStream, "wait", do_nothing),
    "copies are over when they begin": (CudaCopying, "done", lambda self: True),
    "stores are read early": (CudaDriver, "copy_batch", read_early_always),
    "slots are not looked at again": (Mapping, "intact", lambda self, slots, generations: len(slots)),
    "threads disturb captures": (
        CudaDriver,
        "adopt_thread",
        lambda self, device: self._bind_context(device),
    ),
}


@pytest.mark.swallows("^DeviceLost: CUDA error: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", sometimes=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_control_each_order_is_needed(device: TorchCuda, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    found = next((wrong for seed in SEEDS if (wrong := run(device, seed, "batch")[1])), [])
    assert found != []

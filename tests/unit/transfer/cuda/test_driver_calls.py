"""Every call of the real `CudaDriver`, to a driver that was compiled against NVIDIA's own `cuda.h`."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p
from functools import partial

import numpy as np
import pytest
import torch

from kvbm.transfer.cuda.driver import Addresses, CudaDriver, CudaError
from rigs.libcuda.library import Libcuda
from rigs.libcuda.torch_cuda import Event, Stream

PAGE = mmap.PAGESIZE
PIECES = 64
PIECE = 96


@pytest.fixture
def driver(libcuda: Libcuda) -> CudaDriver:
    """One whose context is current in this thread."""
    made = CudaDriver()
    made.adopt_thread(0)
    return made


@pytest.fixture
def stream(driver: CudaDriver, libcuda: Libcuda) -> Stream:
    return Stream(libcuda)


class Memory:
    """Device memory and page-locked host memory, both of `PIECES` pieces."""

    def __init__(self, libcuda: Libcuda, driver: CudaDriver) -> None:
        self.device = torch.arange(PIECES * PIECE, dtype=torch.int64).to(torch.uint8).view(PIECES, PIECE)
        self.mapped = mmap.mmap(-1, 2 * PAGE)
        self.host = torch.frombuffer(self.mapped, dtype=torch.uint8)[: PIECES * PIECE].view(PIECES, PIECE)
        libcuda.own([self.device])
        driver.lock_pages(self.host.data_ptr(), PIECES * PIECE)


@pytest.fixture
def memory(libcuda: Libcuda, driver: CudaDriver) -> Memory:
    return Memory(libcuda, driver)


def rows_of(tensor: torch.Tensor, order: list[int] | range = range(PIECES)) -> Addresses:
    """The addresses of these rows."""
    return np.array([tensor[row].data_ptr() for row in order], dtype=np.uint64)


def sizes(count: int = PIECES) -> Addresses:
    return np.full(count, PIECE, dtype=np.uint64)


@pytest.mark.parametrize("version", [12080, 13000])
@pytest.mark.parametrize("read_early", [False, True])
def test_a_batch_in_both_directions(libcuda: Libcuda, version: int, read_early: bool) -> None:
    libcuda.set_version(version)
    driver = CudaDriver()
    driver.adopt_thread(0)
    assert (driver.version, driver.has_batch) == (version, True)
    stream, memory = Stream(libcuda), Memory(libcuda, driver)
    expected = memory.device.clone()
    swapped = [row ^ 1 for row in range(PIECES)]
    driver.copy_batch(
        rows_of(memory.host, swapped), rows_of(memory.device), sizes(), stream.cuda_stream, read_early=False
    )
    stream.synchronize()
    assert torch.equal(memory.host[swapped], expected)
    memory.device.zero_()
    driver.copy_batch(
        rows_of(memory.device),
        rows_of(memory.host, swapped),
        sizes(),
        stream.cuda_stream,
        read_early=read_early,
    )
    stream.synchronize()
    assert torch.equal(memory.device, expected)


def test_a_driver_before_12_8_has_no_batches(libcuda: Libcuda) -> None:
    libcuda.set_version(12070)
    assert not CudaDriver().has_batch


def test_a_source_may_be_read_early_if_that_is_asked_for(
    libcuda: Libcuda, driver: CudaDriver, memory: Memory, stream: Stream
) -> None:
    """A store that did so would read blocks that the engine is still writing."""
    libcuda.hold_copies()
    for read_early in (False, True):
        memory.device.fill_(1)
        # Of two pieces one is held, and so is all that lies behind it.
        driver.copy_batch(
            rows_of(memory.host, [0, 1]),
            rows_of(memory.device, [0, 1]),
            sizes(2),
            stream.cuda_stream,
            read_early=False,
        )
        driver.copy_batch(
            rows_of(memory.host), rows_of(memory.device), sizes(), stream.cuda_stream, read_early=read_early
        )
        memory.device.fill_(2)
        libcuda.hold_copies(False)
        stream.synchronize()
        assert (memory.host == 1).any().item() == read_early
        assert (memory.host == 2).any()
        libcuda.hold_copies()


def test_one_copy(driver: CudaDriver, memory: Memory, stream: Stream) -> None:
    driver.copy(memory.host.data_ptr(), memory.device.data_ptr(), PIECES * PIECE, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(memory.host, memory.device)


def test_rows(libcuda: Libcuda, driver: CudaDriver, memory: Memory, stream: Stream) -> None:
    device, host = memory.device.data_ptr(), memory.host.data_ptr()
    driver.copy_rows(host, 32, device + 7, PIECE, 32, 5, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(memory.host.view(-1)[: 5 * 32].view(5, 32), memory.device[:5, 7:39])
    assert driver.pitch_max(0) == 0x7FFFFFFF
    for rows, width, pitch in [(2, 8, driver.pitch_max(0) + 1), (2, 8, 4), (0, 8, 8)]:
        with pytest.raises(CudaError, match=f"cuMemcpy2DAsync of {rows} rows.*INVALID_VALUE"):
            driver.copy_rows(host, 8, device, pitch, width, rows, stream.cuda_stream)


def test_pages_are_locked_once_each(libcuda: Libcuda, driver: CudaDriver) -> None:
    mapped = mmap.mmap(-1, 64 * PAGE)
    start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    driver.lock_pages(start, PAGE)
    driver.lock_pages(start + PAGE, 3 * PAGE)
    assert libcuda.registered_bytes == 4 * PAGE
    with pytest.raises(CudaError, match="HOST_MEMORY_ALREADY_REGISTERED") as refused:
        driver.lock_pages(start + 3 * PAGE, 2 * PAGE)
    assert (refused.value.result, refused.value.lost) == (712, False)
    driver.unlock_pages(start)
    with pytest.raises(CudaError, match="HOST_MEMORY_NOT_REGISTERED"):
        driver.unlock_pages(start)
    driver.unlock_pages(start + PAGE)
    assert libcuda.registered_bytes == 0


def test_pieces_that_share_a_page_of_64_kib_cannot_both_be_locked(
    libcuda: Libcuda, driver: CudaDriver
) -> None:
    libcuda.set_page_bytes(64 << 10)
    mapped = mmap.mmap(-1, 256 << 10)
    start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    aligned = -(-start // (64 << 10)) * (64 << 10)
    driver.lock_pages(aligned, PAGE)
    with pytest.raises(CudaError, match="ALREADY_REGISTERED"):
        driver.lock_pages(aligned + PAGE, PAGE)
    driver.lock_pages(aligned + (64 << 10), PAGE)


def test_what_the_device_can_do(libcuda: Libcuda, driver: CudaDriver) -> None:
    assert driver.can_use_host_pointers(0)
    libcuda.set_host_pointer_use(False)
    assert not driver.can_use_host_pointers(0)
    assert driver.pci_bus_id(0) == "0000:3b:00.0"
    with pytest.raises(CudaError, match="INVALID_DEVICE"):
        driver.pci_bus_id(1)


def run_in_thread(call: Callable[[], object]) -> Exception | None:
    """What `call` raises in a thread of its own, that no driver has ever seen."""
    errors: list[Exception | None] = []

    def run() -> None:
        try:
            call()
            errors.append(None)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0]


def test_a_thread_needs_a_context(driver: CudaDriver, memory: Memory) -> None:
    failed = run_in_thread(lambda: driver.unlock_pages(memory.host.data_ptr()))
    assert isinstance(failed, CudaError)
    assert failed.result == 201

    def adopted() -> None:
        driver.adopt_thread(0)
        driver.unlock_pages(memory.host.data_ptr())

    assert run_in_thread(adopted) is None


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread-local", "relaxed"])
def test_calls_beside_a_capture(libcuda: Libcuda, driver: CudaDriver, memory: Memory, mode: int) -> None:
    """A call of a thread that was not adopted ends the capture of another, if that is in the mode `global`."""
    stream, graph = Stream(libcuda), c_void_p()
    page = memory.host.data_ptr() + 2 * PAGE

    def lock() -> None:
        driver.lock_pages(page, PAGE)
        driver.unlock_pages(page)

    def lock_carelessly() -> None:
        libcuda.call_runtime("cuCtxGetCurrent", byref(c_void_p()))  # any call of torch's binds the context
        lock()

    def lock_in_block() -> None:
        with driver.beside_captures(0):
            lock()

    def lock_adopted() -> None:
        driver.adopt_thread(0)
        lock()

    results = []
    for locking in (lock_in_block, lock_adopted, lock_carelessly):
        libcuda.call_runtime("cuStreamBeginCapture_v2", c_void_p(stream.cuda_stream), c_int(mode))
        failed = run_in_thread(locking)
        ended = libcuda.cuda.cuStreamEndCapture(c_void_p(stream.cuda_stream), byref(graph))
        results.append((getattr(failed, "result", 0), libcuda.error_name(ended)))
    broken = (900, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
    assert results == [(0, "CUDA_SUCCESS")] * 2 + [broken if mode == 0 else (0, "CUDA_SUCCESS")]


def test_a_copy_that_never_ends(libcuda: Libcuda, driver: CudaDriver, memory: Memory, stream: Stream) -> None:
    libcuda.hold_copies()
    driver.copy_batch(
        rows_of(memory.host), rows_of(memory.device), sizes(), stream.cuda_stream, read_early=False
    )
    event = stream.record_event()
    assert not event.query()
    libcuda.hold_copies(False)
    event.synchronize()
    assert event.query()
    assert torch.equal(memory.host, memory.device)


def test_a_stream_waits_for_an_event_of_another(libcuda: Libcuda, driver: CudaDriver, memory: Memory) -> None:
    first, second = Stream(libcuda), Stream(libcuda)
    libcuda.hold_copies()
    begun: Event = first.record_event()
    begun.synchronize()
    everything = rows_of(memory.host), rows_of(memory.device), sizes()
    driver.copy_batch(*everything, first.cuda_stream, read_early=False)
    second.wait_event(first.record_event())
    behind = second.record_event()
    libcuda.hold_copies(False)
    behind.synchronize()
    assert torch.equal(memory.host, memory.device)
    assert begun.elapsed_time(behind) >= 0.0


def test_errors_that_the_test_asks_for(
    libcuda: Libcuda, driver: CudaDriver, memory: Memory, stream: Stream
) -> None:
    libcuda.fail("cuMemcpyAsync", 2, nth=2)
    copy = partial(driver.copy, memory.host.data_ptr(), memory.device.data_ptr(), PIECE, stream.cuda_stream)
    copy()
    with pytest.raises(CudaError, match=rf"cuMemcpyAsync of {PIECE} bytes: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        copy()
    stream.synchronize()
    assert libcuda.call_count("piece") == 1
    libcuda.fail("cuMemHostRegister", 1234)
    with pytest.raises(CudaError, match=r"unknown result \(1234\)"):
        driver.lock_pages(memory.host.data_ptr() + 4 * PAGE, PAGE)
    driver.lock_pages(memory.host.data_ptr() + 4 * PAGE, PAGE)


def test_a_device_that_is_lost_stays_lost(
    libcuda: Libcuda, driver: CudaDriver, memory: Memory, stream: Stream
) -> None:
    libcuda.fail("piece", 700, nth=5)
    everything = rows_of(memory.host), rows_of(memory.device), sizes()
    driver.copy_batch(*everything, stream.cuda_stream, read_early=False)
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        stream.synchronize()
    for _ in range(2):
        with pytest.raises(CudaError) as lost:
            driver.copy_batch(*everything, stream.cuda_stream, read_early=False)
        assert (lost.value.result, lost.value.lost) == (700, True)


class TestWhatTheRigSees:
    """Each of these is a defect of the caller's, and must not pass as a copy."""

    def spoil(self, libcuda: Libcuda, call: Callable[[], object], violation: str) -> None:
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            call()
        (found,) = libcuda.violations
        assert violation in found
        libcuda.reset()

    def test_host_memory_that_is_not_locked(
        self, libcuda: Libcuda, driver: CudaDriver, memory: Memory, stream: Stream
    ) -> None:
        driver.unlock_pages(memory.host.data_ptr())
        arrays = rows_of(memory.host), rows_of(memory.device), sizes()
        self.spoil(
            libcuda,
            lambda: driver.copy_batch(*arrays, stream.cuda_stream, read_early=False),
            "from device memory to memory that is neither",
        )

    def test_an_address_that_is_not_on_the_device(
        self, libcuda: Libcuda, driver: CudaDriver, memory: Memory, stream: Stream
    ) -> None:
        other = torch.zeros(PIECE, dtype=torch.uint8)
        arrays = rows_of(other.view(1, -1), [0]), rows_of(memory.host, [0]), sizes(1)
        self.spoil(
            libcuda,
            lambda: driver.copy_batch(*arrays, stream.cuda_stream, read_early=True),
            "from host memory to memory that is neither",
        )

    def test_rows_beyond_the_end(
        self, libcuda: Libcuda, driver: CudaDriver, memory: Memory, stream: Stream
    ) -> None:
        host, last = memory.host.data_ptr(), memory.device[PIECES - 1].data_ptr()
        self.spoil(
            libcuda,
            lambda: driver.copy_rows(host, 8, last, PIECE, 8, 2, stream.cuda_stream),
            "reach beyond one allocation",
        )

    def test_a_registered_address_that_the_device_cannot_use(
        self, libcuda: Libcuda, driver: CudaDriver, memory: Memory, stream: Stream
    ) -> None:
        libcuda.set_host_pointer_use(False)
        arrays = rows_of(memory.host, [0]), rows_of(memory.device, [0]), sizes(1)
        self.spoil(
            libcuda,
            lambda: driver.copy_batch(*arrays, stream.cuda_stream, read_early=False),
            "a registered host address",
        )

    def test_pages_that_are_unlocked_under_a_copy(
        self, libcuda: Libcuda, driver: CudaDriver, memory: Memory, stream: Stream
    ) -> None:
        libcuda.hold_copies()
        arrays = rows_of(memory.host), rows_of(memory.device), sizes()
        driver.copy_batch(*arrays, stream.cuda_stream, read_early=False)
        driver.unlock_pages(memory.host.data_ptr())
        libcuda.hold_copies(False)
        with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
            stream.synchronize()
        (found,) = libcuda.violations
        assert found.startswith("while copying")
        libcuda.reset()

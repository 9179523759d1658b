"""The arguments of calls to the CUDA driver, byte for byte, with a stand-in for its library."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm.errors import KvbmError
from kvbm.transfer.cuda import driver as cuda_driver
from kvbm.transfer.cuda.driver import LOST_RESULTS, Addresses, CudaDriver, CudaError

NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}
BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


def word_at(address: int, kind: Any = ctypes.c_uint64) -> int:
    return int(kind.from_address(address).value)


def values(arguments: tuple[Any, ...]) -> list[int | None]:
    """Plain arguments, without those handed over by reference."""
    return [argument.value for argument in arguments if hasattr(argument, "value")]


class Library:
    """Stands for `libcuda.so.1`. `results` says what calls answer; `seen` is what they were given."""

    def __init__(self, version: int = 13000, has_symbol: bool = True) -> None:
        self.version, self.has_symbol = version, has_symbol
        self.results: dict[str, int] = {}
        self.attributes = {11: 2147483647, 91: 1}
        self.seen: list[tuple[Any, ...]] = []
        self.mode, self.context = 0, 0xC3
        self.batch = BATCH(self._batch)  # kept: the driver has its address only

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.version
        return self.results.get("cuDriverGetVersion", 0)

    def cuGetProcAddress_v2(  # noqa: N802
        self, symbol: bytes, address: Any, version: Any, flags: Any, status: Any
    ) -> int:
        self.seen.append(("cuGetProcAddress", symbol, version.value, flags.value))
        if self.has_symbol:
            address._obj.value = ctypes.cast(self.batch, ctypes.c_void_p).value
        return 0

    def cuGetErrorName(self, result: Any, name: Any) -> int:  # noqa: N802
        name._obj.value = NAMES.get(result.value)
        return 0 if result.value in NAMES else 1

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:  # noqa: N802
        value._obj.value = self.attributes[attribute.value]
        return self.results.get("cuDeviceGetAttribute", 0)

    def cuDeviceGetPCIBusId(self, text: Any, length: Any, device: Any) -> int:  # noqa: N802
        assert length.value <= len(text)
        text.value = b"0000:3B:00.0"
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        context._obj.value = 0xC0 + device.value
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.seen.append(("mode", mode._obj.value))
        if result := self.results.get("mode", 0):
            return result
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.context
        return self.results.get("cuCtxGetCurrent", 0)

    def cuMemcpy2DAsync_v2(self, copy: Any, stream: Any) -> int:  # noqa: N802
        raw = ctypes.string_at(ctypes.addressof(copy._obj), ctypes.sizeof(copy._obj))
        self.seen.append(("cuMemcpy2DAsync", raw, stream.value))
        return self.results.get("cuMemcpy2DAsync", 0)

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.seen.append((name, *values(arguments)))
            return self.results.get(name, 0)

        return call

    def _batch(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        attributes_from: int,
        attribute_count: int,
        failed_at: int,
        stream: int,
    ) -> int:
        arrays = [[word_at(base + 8 * index) for index in range(count)] for base in (targets, sources, sizes)]
        hints = ctypes.string_at(attributes, 24)
        assert failed_at
        self.seen.append(("batch", *arrays, hints, word_at(attributes_from), attribute_count, stream))
        return self.results.get("batch", 0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": made}[name])
    return made


def addresses(*numbers: int) -> Addresses:
    return np.array(numbers, dtype=np.uint64)


def test_structures_are_laid_out_as_in_cuda_h() -> None:
    attributes, copy = cuda_driver._CopyAttributes, cuda_driver._Copy2D
    assert ctypes.sizeof(attributes) == 24
    assert [getattr(attributes, name).offset for name, _ in attributes._fields_] == [0, 4, 12, 20]
    assert ctypes.sizeof(copy) == 128
    offsets = [getattr(copy, name).offset for name, _ in copy._fields_]
    assert offsets == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120]


@pytest.mark.parametrize(("read_early", "order"), [(False, 1), (True, 3)], ids=["stream", "any"])
def test_a_batch_is_handed_over_as_it_is(library: Library, read_early: bool, order: int) -> None:
    driver = CudaDriver()
    assert driver.has_batch
    assert library.seen == [("cuGetProcAddress", b"cuMemcpyBatchAsync", 12080, 0)]
    high = 0x7F00_0000_1000
    arrays = addresses(high, 2, 3), addresses(4, 5, 6), addresses(7, 8, 9)
    driver.copy_batch(*arrays, stream=0x55, read_early=read_early)
    name, targets, sources, sizes, hints, attributes_from, attribute_count, stream = library.seen[-1]
    assert (name, targets, sources, sizes) == ("batch", [high, 2, 3], [4, 5, 6], [7, 8, 9])
    # When sources are read, no hints about places, beside kernels; one set of attributes from piece 0 on.
    assert np.frombuffer(hints, dtype=np.int32).tolist() == [order, 0, 0, 0, 0, 1]
    assert (attributes_from, attribute_count, stream) == (0, 1, 0x55)


@pytest.mark.parametrize(("version", "has_symbol"), [(12070, True), (13000, False)])
def test_a_driver_without_batches_says_so(
    monkeypatch: pytest.MonkeyPatch, version: int, has_symbol: bool
) -> None:
    library = Library(version, has_symbol)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert not CudaDriver().has_batch


def test_one_copy(library: Library) -> None:
    CudaDriver().copy(1, 3, 5, stream=7)
    assert library.seen[1:] == [("cuMemcpyAsync", 1, 3, 5, 7)]


def test_rows_with_unified_addresses(library: Library) -> None:
    CudaDriver().copy_rows(0x1000, 64, 0x2000, 128, width=32, rows=5, stream=9)
    name, raw, stream = library.seen[-1]
    assert (name, stream) == ("cuMemcpy2DAsync", 9)
    words = np.frombuffer(raw, dtype=np.uint64).tolist()
    source = [0, 0, 4, 0, 0x2000, 0, 128]
    target = [0, 0, 4, 0, 0x1000, 0, 64]
    assert words == [*source, *target, 32, 5]


def test_pages_are_locked_for_every_context_and_mapped(library: Library) -> None:
    driver = CudaDriver()
    driver.lock_pages(0x7F00_0000_0000, 1 << 33)
    driver.unlock_pages(0x7F00_0000_0000)
    assert library.seen[1:] == [
        ("cuMemHostRegister_v2", 0x7F00_0000_0000, 1 << 33, 3),
        ("cuMemHostUnregister", 0x7F00_0000_0000),
    ]


def test_a_thread_is_adopted_with_its_context_and_beside_captures(library: Library) -> None:
    CudaDriver().adopt_thread(3)
    assert library.seen[1:] == [("cuCtxSetCurrent", 0xC3), ("mode", 2)]


def fail_beside_captures(driver: CudaDriver, meanwhile: Callable[[], object]) -> None:
    with driver.beside_captures(3):
        meanwhile()
        raise ZeroDivisionError


def test_a_thread_that_is_not_ours_is_beside_captures_for_a_while(library: Library) -> None:
    driver = CudaDriver()
    with driver.beside_captures(3):
        assert library.mode == 2
    assert library.seen[1:] == [("mode", 2), ("mode", 0)], "it has its context already"
    library.context = 0
    with pytest.raises(ZeroDivisionError):
        fail_beside_captures(driver, lambda: None)
    assert library.seen[3:] == [("cuCtxSetCurrent", 0xC3), ("mode", 2), ("mode", 0)]


def test_a_device_that_is_lost_beside_captures_says_what_was_done_meanwhile(library: Library) -> None:
    driver = CudaDriver()
    with pytest.raises(ZeroDivisionError):
        fail_beside_captures(driver, lambda: library.results.update(mode=700))
    with pytest.raises(CudaError, match="cuThreadExchangeStreamCaptureMode: "):
        fail_beside_captures(driver, lambda: None)


def test_what_a_device_can_do(library: Library) -> None:
    driver = CudaDriver()
    assert driver.version == 13000
    assert driver.pitch_max(0) == 2147483647
    assert driver.can_use_host_pointers(0) is True
    library.attributes[91] = 0
    assert driver.can_use_host_pointers(0) is False
    assert driver.pci_bus_id(0) == "0000:3b:00.0"


def begin_batch(driver: CudaDriver) -> None:
    driver.copy_batch(addresses(1, 2), addresses(3, 4), addresses(5, 6), 7, read_early=False)


@pytest.mark.parametrize(
    ("call", "begin", "message"),
    [
        ("batch", begin_batch, "cuMemcpyBatchAsync of 2 pieces"),
        ("cuMemcpyAsync", lambda driver: driver.copy(1, 3, 5, 7), "cuMemcpyAsync of 5 bytes"),
        (
            "cuMemcpy2DAsync",
            lambda driver: driver.copy_rows(1, 8, 2, 8, 8, 3, 4),
            "cuMemcpy2DAsync of 3 rows of 8 bytes",
        ),
        (
            "cuMemHostRegister_v2",
            lambda driver: driver.lock_pages(4096, 8192),
            "cuMemHostRegister of 8192 bytes",
        ),
        ("cuMemHostUnregister", lambda driver: driver.unlock_pages(4096), "cuMemHostUnregister"),
        ("cuDeviceGetAttribute", lambda driver: driver.pitch_max(0), "cuDeviceGetAttribute"),
        ("cuCtxSetCurrent", lambda driver: driver.adopt_thread(0), "cuCtxSetCurrent"),
    ],
)
def test_errors_name_the_call_and_the_result(
    library: Library, call: str, begin: Callable[[CudaDriver], None], message: str
) -> None:
    driver = CudaDriver()
    library.results[call] = 1
    with pytest.raises(CudaError) as caught:
        begin(driver)
    assert str(caught.value) == f"{message}: CUDA_ERROR_INVALID_VALUE (1)"
    assert (caught.value.result, caught.value.lost) == (1, False)
    library.results[call] = 12345
    with pytest.raises(CudaError, match=r"unknown result \(12345\)"):
        begin(driver)


@pytest.mark.parametrize("result", LOST_RESULTS)
def test_after_these_results_the_context_is_lost(result: int) -> None:
    error = CudaError("call", result, LOST_RESULTS[result])
    assert error.lost
    assert str(error) == f"call: {LOST_RESULTS[result]} ({result}); the device's context is lost"


def test_the_context_is_lost_after_every_result_that_ends_a_process() -> None:
    """`cuda.h` says so of each, in the same words; Triton brings a copy of it."""
    triton = pytest.importorskip("triton", reason="triton, which brings cuda.h, is not installed")
    header = (Path(triton.__file__).parent / "backends/nvidia/include/cuda.h").read_text()
    entry = re.compile(r"/\*\*((?:(?!\*/).)*)\*/\s*(CUDA_ERROR_\w+)\s*=\s*(\d+)", re.DOTALL)
    names, ending = {}, set()
    for comment, name, number in entry.findall(header):
        names[int(number)] = name
        if "must be terminated and relaunched" in " ".join(comment.replace("*", " ").split()):
            ending.add(int(number))
    assert {700, 702, 719} <= ending
    assert ending <= set(LOST_RESULTS)
    assert {number: names.get(number, name) for number, name in LOST_RESULTS.items()} == LOST_RESULTS


@pytest.mark.parametrize("result", [1, 2, 3, 100, 101, 205, 400, 600, 708, 712, 713, 720, 801, 900, 901])
def test_after_these_results_it_is_not(result: int) -> None:
    """Refusals: of memory (2), of pages that are locked (712) or are not (713), of calls while capturing (900)."""
    assert not CudaError("call", result, "NAME").lost


def test_no_driver_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(KvbmError) as caught:
        CudaDriver()
    assert str(caught.value) == (
        "loading the CUDA driver: libcuda.so.1: cannot open shared object file: No such file or directory"
    )


def test_a_driver_that_does_not_answer_is_an_error(library: Library) -> None:
    library.results["cuDriverGetVersion"] = 2
    with pytest.raises(CudaError, match=r"cuDriverGetVersion: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        CudaDriver()


@pytest.mark.parametrize(
    "arrays",
    [
        (addresses(1, 2), addresses(1), addresses(1)),
        (np.array([1], dtype=np.int64), addresses(1), addresses(1)),
        (addresses(1, 2, 3, 4)[::2], addresses(1, 2), addresses(1, 2)),
    ],
)
def test_arrays_of_another_form_are_a_programmers_error(library: Library, arrays: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError):
        CudaDriver().copy_batch(*arrays, 0, read_early=False)

"""The few calls of the CUDA driver that torch does not offer: copies of many pieces, and page locks.

They go straight to `libcuda.so.1`, which lies on every machine with an NVIDIA driver, because a batch of copies is
three arrays of addresses: handed over as they are they cost nothing, turned into lists of Python objects they
would cost more than the copy. Calls release the GIL. The device's context must be current in the calling thread: any
call of torch's that reaches the device makes it so, and so does `adopt_thread`; `torch.cuda.device(…)` alone need not.

Source of the signatures: CUDA driver API, `cuda.h` of 12.8 and 13.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbm.errors import KvbmError

Addresses: TypeAlias = npt.NDArray[np.uint64]

BATCH_SINCE = 12080
"""`cuMemcpyBatchAsync` came with the driver of CUDA 12.8; asking for that version keeps its first signature."""

BATCH_PIECES_MAX = 4096
"""So many copies in one such call at most: drivers have crashed on tens of thousands, and none promises any number."""

_REGISTER_PORTABLE_AND_MAPPED = 0x1 | 0x2
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_MAX_PITCH = 11  # CU_DEVICE_ATTRIBUTE_MAX_PITCH
_SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_SOURCE_AT_ANY_TIME = 3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY
_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

LOST_RESULTS = {
    4: "CUDA_ERROR_DEINITIALIZED",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    220: "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    226: "CUDA_ERROR_CONTAINED",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    709: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    721: "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    810: "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    911: "CUDA_ERROR_EXTERNAL_DEVICE",
    999: "CUDA_ERROR_UNKNOWN",
}
"""Results after which no call of this process can succeed on the device any more.

Source: `CUresult` in `cuda.h` of CUDA 13.0: all results that end with "the process must be terminated and relaunched",
those of a context that is gone, and hardware and unknown errors, after which nothing is promised.
"""


class CudaError(KvbmError):
    """A driver call failed. `lost` says that the context is gone with it, and every later call will fail too."""

    def __init__(self, call: str, result: int, name: str) -> None:
        self.result = result
        self.lost = result in LOST_RESULTS
        super().__init__(
            f"{call}: {name} ({result})" + ("; the device's context is lost" if self.lost else "")
        )


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_order", c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", c_uint),
    )


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D; memory types 1 (host) and 2 (device), here always 4 (unified: the address says it)."""

    _fields_ = (
        ("src_x_bytes", c_size_t),
        ("src_y", c_size_t),
        ("src_type", c_int),
        ("src_host", c_void_p),
        ("src_device", c_uint64),
        ("src_array", c_void_p),
        ("src_pitch", c_size_t),
        ("dst_x_bytes", c_size_t),
        ("dst_y", c_size_t),
        ("dst_type", c_int),
        ("dst_host", c_void_p),
        ("dst_device", c_uint64),
        ("dst_array", c_void_p),
        ("dst_pitch", c_size_t),
        ("width_bytes", c_size_t),
        ("height", c_size_t),
    )


_UNIFIED = 4


class Driver(Protocol):
    """The driver's functions that copiers need; `CudaDriver` is the real one. Addresses are unified, sizes bytes.

    Every call raises `CudaError`; copies are only begun, on the stream of that handle.
    """

    version: int
    has_batch: bool

    def adopt_thread(self, device: int) -> None:
        """Let the calling thread, which must be one of ours, make any call, even while others capture a graph."""

    def beside_captures(self, device: int) -> AbstractContextManager[object]:
        """The same for any thread, while the context lasts: calls in it end no capture of a graph."""

    def copy_batch(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, *, read_early: bool
    ) -> None:
        """Begin up to `BATCH_PIECES_MAX` copies in one call; they may run in any order. Needs `has_batch`.

        With `read_early` sources may be read from now on, ahead of earlier work in the stream; targets never are
        written ahead of it.
        """

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Begin one copy."""

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        stream: int,
    ) -> None:
        """Begin one copy of `rows` rows of `width` bytes at constant distances, none over `pitch_max`."""

    def pitch_max(self, device: int) -> int:
        """The largest distance between rows that `copy_rows` accepts."""

    def can_use_host_pointers(self, device: int) -> bool:
        """Whether kernels and batches may use the host address of memory that `lock_pages` locked."""

    def lock_pages(self, address: int, size: int) -> None:
        """Page-lock host memory and map it into the device's address space."""

    def unlock_pages(self, address: int) -> None:
        """Undo `lock_pages` of a piece."""

    def pci_bus_id(self, device: int) -> str:
        """As `0000:3b:00.0`."""


class CudaDriver:
    """See `Driver`. Raises `KvbmError` where there is no driver."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise KvbmError(f"loading the CUDA driver: {error}") from None
        version = c_int()
        self._check("cuDriverGetVersion", self._library.cuDriverGetVersion(byref(version)))
        self.version = version.value
        self._batch = self._find("cuMemcpyBatchAsync", BATCH_SINCE) if self.version >= BATCH_SINCE else None
        self.has_batch = self._batch is not None
        self._in_order, self._at_any_time = (
            _CopyAttributes(source_order=order, flags=_OVERLAP_WITH_COMPUTE)
            for order in (_SOURCE_IN_STREAM_ORDER, _SOURCE_AT_ANY_TIME)
        )
        self._attributes_from = c_size_t(0)

    def adopt_thread(self, device: int) -> None:
        self._bind_context(device)
        # Otherwise locking pages while the engine captures a CUDA graph would fail, and end the capture with it.
        self._exchange_capture_mode(_CAPTURE_RELAXED)

    @contextmanager
    def beside_captures(self, device: int) -> Iterator[None]:
        context = c_void_p()
        self._check("cuCtxGetCurrent", self._library.cuCtxGetCurrent(byref(context)))
        if context.value is None:
            self._bind_context(device)
        before = self._exchange_capture_mode(_CAPTURE_RELAXED)
        try:
            yield
        finally:
            # Unchecked: it fails only where the device is lost, and the calls made meanwhile say more.
            self._library.cuThreadExchangeStreamCaptureMode(byref(c_int(before)))

    def copy_batch(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, *, read_early: bool
    ) -> None:
        assert self._batch is not None, self.version
        _assert_alike(targets, sources, sizes)
        assert len(sizes) <= BATCH_PIECES_MAX, len(sizes)
        failed_at = c_size_t()
        result = self._batch(
            c_void_p(targets.ctypes.data),
            c_void_p(sources.ctypes.data),
            c_void_p(sizes.ctypes.data),
            c_size_t(len(sizes)),
            byref(self._at_any_time if read_early else self._in_order),
            byref(self._attributes_from),
            c_size_t(1),
            byref(failed_at),
            c_void_p(stream),
        )
        self._check(f"cuMemcpyBatchAsync of {len(sizes)} pieces", result)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        result = self._library.cuMemcpyAsync(
            c_uint64(target), c_uint64(source), c_size_t(size), c_void_p(stream)
        )
        self._check(f"cuMemcpyAsync of {size} bytes", result)

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        stream: int,
    ) -> None:
        copy = _Copy2D(
            src_type=_UNIFIED,
            src_device=source,
            src_pitch=source_pitch,
            dst_type=_UNIFIED,
            dst_device=target,
            dst_pitch=target_pitch,
            width_bytes=width,
            height=rows,
        )
        result = self._library.cuMemcpy2DAsync_v2(byref(copy), c_void_p(stream))
        self._check(f"cuMemcpy2DAsync of {rows} rows of {width} bytes", result)

    def pitch_max(self, device: int) -> int:
        return self._attribute(device, _MAX_PITCH)

    def can_use_host_pointers(self, device: int) -> bool:
        return bool(self._attribute(device, _CAN_USE_HOST_POINTER))

    def lock_pages(self, address: int, size: int) -> None:
        result = self._library.cuMemHostRegister_v2(
            c_void_p(address), c_size_t(size), c_uint(_REGISTER_PORTABLE_AND_MAPPED)
        )
        self._check(f"cuMemHostRegister of {size} bytes", result)

    def unlock_pages(self, address: int) -> None:
        self._check("cuMemHostUnregister", self._library.cuMemHostUnregister(c_void_p(address)))

    def pci_bus_id(self, device: int) -> str:
        text = ctypes.create_string_buffer(32)
        self._check("cuDeviceGetPCIBusId", self._library.cuDeviceGetPCIBusId(text, c_int(32), c_int(device)))
        return text.value.decode().lower()

    def _bind_context(self, device: int) -> None:
        """Make the context that torch uses the calling thread's."""
        context = c_void_p()
        result = self._library.cuDevicePrimaryCtxRetain(byref(context), c_int(device))
        self._check("cuDevicePrimaryCtxRetain", result)
        self._check("cuCtxSetCurrent", self._library.cuCtxSetCurrent(context))

    def _exchange_capture_mode(self, mode: int) -> int:
        """How the calling thread's calls and captures of other threads meet from now on; how they did before."""
        exchanged = c_int(mode)
        result = self._library.cuThreadExchangeStreamCaptureMode(byref(exchanged))
        self._check("cuThreadExchangeStreamCaptureMode", result)
        return exchanged.value

    def _attribute(self, device: int, attribute: int) -> int:
        value = c_int()
        result = self._library.cuDeviceGetAttribute(byref(value), c_int(attribute), c_int(device))
        self._check("cuDeviceGetAttribute", result)
        return value.value

    def _find(self, symbol: str, version: int) -> Any:
        """The entry point with the signature that it had in that version, or None."""
        address, status = c_void_p(), c_int()
        result = self._library.cuGetProcAddress_v2(
            symbol.encode(), byref(address), c_int(version), c_uint64(0), byref(status)
        )
        if result or not address.value:
            return None
        pointers = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p)
        return ctypes.CFUNCTYPE(c_int, *pointers)(address.value)

    def _check(self, call: str, result: int) -> None:
        if not result:
            return
        name = c_char_p()
        self._library.cuGetErrorName(c_int(result), byref(name))
        raise CudaError(call, result, name.value.decode() if name.value else "unknown result")


def _assert_alike(targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
    for array in (targets, sources, sizes):
        assert array.dtype == np.uint64 and array.flags.c_contiguous, (array.dtype, array.flags)
    assert len(targets) == len(sources) == len(sizes), (len(targets), len(sources), len(sizes))

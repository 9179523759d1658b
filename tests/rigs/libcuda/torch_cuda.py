"""What KVBM uses of `torch.cuda`, over the stand-in for the driver: `TorchDevice` runs on a CPU build of torch."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from typing import Any

import torch

from rigs.libcuda.library import Libcuda

DEVICE = torch.device("cuda", 0)


class Event:
    """See `torch.cuda.Event`. It is made by the first record, as torch's is."""

    def __init__(self, libcuda: Libcuda, enable_timing: bool = False, blocking: bool = False) -> None:
        self._libcuda = libcuda
        self._handle = c_void_p()

    def record(self, stream: Stream) -> None:
        if self._handle.value is None:
            self._libcuda.call_runtime("cuEventCreate", byref(self._handle), c_uint(0))
        self._libcuda.call_runtime("cuEventRecord", self._handle, c_void_p(stream.cuda_stream))

    def wait(self, stream: Stream) -> None:
        if self._handle.value is not None:
            self._libcuda.call_runtime(
                "cuStreamWaitEvent", c_void_p(stream.cuda_stream), self._handle, c_uint(0)
            )

    def query(self) -> bool:
        if self._handle.value is None:
            return True
        try:
            self._libcuda.call_runtime("cuEventQuery", self._handle)
        except RuntimeError as error:
            if "NOT_READY" in str(error):
                return False
            raise
        return True

    def synchronize(self) -> None:
        if self._handle.value is not None:
            self._libcuda.call_runtime("cuEventSynchronize", self._handle)

    def elapsed_time(self, end: Event) -> float:
        milliseconds = c_float()
        self._libcuda.call_runtime("cuEventElapsedTime_v2", byref(milliseconds), self._handle, end._handle)
        return milliseconds.value


class Stream:
    """See `torch.cuda.Stream`. Handle 0 is the default stream."""

    def __init__(self, libcuda: Libcuda, handle: int | None = None) -> None:
        self._libcuda = libcuda
        made = c_void_p(handle)
        if handle is None:
            libcuda.call_runtime("cuStreamCreateWithPriority", byref(made), c_uint(1), c_int(0))
        self.cuda_stream = made.value or 0

    def record_event(self) -> Event:
        event = Event(self._libcuda)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def synchronize(self) -> None:
        self._libcuda.call_runtime("cuStreamSynchronize", c_void_p(self.cuda_stream))


class CpuStream(Stream):
    """The stream of an engine that computes on a CPU: its work is done when the call for it returns.

    So it waits for an event where a stream would: in the call.
    """

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class TorchCuda:
    """See `torch.cuda`, of one device. A thread's current stream is the default one until it takes another."""

    def __init__(self, libcuda: Libcuda, engine_computes_on_cpu: bool = False) -> None:
        self.libcuda = libcuda
        self._default = (CpuStream if engine_computes_on_cpu else Stream)(libcuda, 0)
        self._threads = threading.local()
        self.Event = partial(Event, libcuda)

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:  # noqa: N802
        return Stream(self.libcuda)

    def device(self, device: torch.device) -> AbstractContextManager[object]:
        """Makes no context current: torch's need not either."""
        assert device == DEVICE, device
        return nullcontext()

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> Stream:
        stream: Stream = getattr(self._threads, "stream", self._default)
        return stream

    def set_stream(self, stream: Stream | None) -> None:
        self._threads.stream = stream or self._default

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """An interpreted kernel runs where it is launched, so what lies in the stream before it comes first."""
        before = self.current_stream()
        stream.synchronize()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def empty(
        self, shape: Any, *, dtype: torch.dtype, device: Any = None, pin_memory: bool = False
    ) -> torch.Tensor:
        """See `torch.empty`, of page-locked or of device memory."""
        assert dtype == torch.uint8 and (device == DEVICE) != pin_memory, (dtype, device, pin_memory)
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        start = c_void_p()
        if pin_memory:
            self.libcuda.call_runtime("cuMemHostAlloc", byref(start), c_size_t(size.numel()), c_uint(0))
        else:
            self.libcuda.call_runtime("cuMemAlloc_v2", byref(start), c_size_t(size.numel()))
        assert start.value is not None
        memory = (ctypes.c_uint8 * size.numel()).from_address(start.value)
        # The memory goes with the last tensor on it: they all hold `memory`.
        weakref.finalize(memory, self.libcuda.cuda.standin_release_memory, c_uint64(start.value))
        return torch.frombuffer(memory, dtype=torch.uint8).view(size)


class _ModuleWith:
    """A module, but for the names that are given."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def make_replacements(cuda: TorchCuda) -> dict[str, Any]:
    """By module of KVBM and the name in it: what lets the real `CudaDriver` and `TorchDevice` run on the stand-in."""

    def load(name: str) -> Any:
        assert name == "libcuda.so.1", name
        return cuda.libcuda.cuda

    return {
        "kvbm.transfer.cuda.driver.ctypes": _ModuleWith(ctypes, CDLL=load),
        "kvbm.transfer.cuda.device.torch": _ModuleWith(torch, cuda=cuda, empty=cuda.empty),
    }

"""The parts of torch that copiers need on a CUDA device: streams, events, page-locked buffers. Tests use a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

LOAD_PRIORITY = -1
"""A request waits for a load: its copies go before the engine's own where both want the same unit."""

STORE_PRIORITY = 0


class Stream(Protocol):
    """A queue of device work. `handle` is the driver's."""

    handle: int

    def wait(self, event: Any) -> None:
        """Later work on this stream begins after `event`; the caller does not wait."""

    def record(self) -> Any:
        """An event behind everything that was put in so far."""

    def run(self, begin: Callable[[], None]) -> None:
        """Call `begin` with this stream as torch's current one."""


class Device(Protocol):
    """One device, as a copier uses it."""

    torch_device: torch.device
    index: int

    def active(self) -> AbstractContextManager[object]:
        """Makes the device's context current for the calling thread."""

    def new_stream(self, priority: int) -> Stream:
        """A stream of our own; smaller numbers go first."""

    def mark(self) -> Any:
        """An event behind the work that the calling thread has put on its current stream."""

    def hold(self, event: Any) -> None:
        """The calling thread's current stream goes on after `event` only; the thread does not wait."""

    def pinned(self, row_count: int, row_bytes: int) -> torch.Tensor:
        """Page-locked host memory, uint8 `[rows, row_bytes]`. Raises RuntimeError where it cannot be had."""

    def scratch(self, size: int) -> torch.Tensor:
        """Device memory, uint8 `[size]`. Raises RuntimeError where it cannot be had."""


class TorchStream:
    """See `Stream`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.handle = int(stream.cuda_stream)

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def record(self) -> Any:
        # Blocking: a thread that waits for it sleeps, where it would otherwise spin on a core.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def run(self, begin: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            begin()


class TorchDevice:
    """See `Device`."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.index = device.index if device.index is not None else torch.cuda.current_device()

    def active(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.device(self.torch_device)
        return context

    def new_stream(self, priority: int) -> TorchStream:
        return TorchStream(torch.cuda.Stream(self.torch_device, priority=priority))

    def mark(self) -> Any:
        with self.active():
            return torch.cuda.current_stream().record_event()

    def hold(self, event: Any) -> None:
        with self.active():
            torch.cuda.current_stream().wait_event(event)

    def pinned(self, row_count: int, row_bytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty((row_count, row_bytes), dtype=torch.uint8, pin_memory=True)

    def scratch(self, size: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=self.torch_device)


def first_line(error: Exception) -> str:
    """An error of torch or Triton in one line; one without a message is named by its type."""
    return str(error).strip().partition("\n")[0] or type(error).__name__

"""Slots in device memory: the staging area of a disk that the device reaches directly.

`DeviceArena` stands where a `HostArena` does otherwise: it hands out slots, as spans of addresses instead of views.
`DeviceMemory` gives the driver that moves the bytes their addresses, and sums up pages on the device.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from kvbm.errors import KvbmError, SettingsError
from kvbm.layout import PAGE_BYTES, BlockLayout
from kvbm.tiers.disk.block_io import Buffer, DeviceSpan
from kvbm.tiers.disk.page_sums import PAGE_WORDS, coefficients
from kvbm.tiers.nixl.agent import Segment
from kvbm.transfer.cuda.device import STORE_PRIORITY, TorchDevice, TorchStream, first_line
from kvbm.transfer.cuda.driver import CudaDriver

_CHUNK_PAGES = 1024
"""Pages summed at once: widened to 64 bits and multiplied they take 16 MiB."""


CPU = torch.device("cpu")


def cuda_device(name: str) -> torch.device | str:
    """The CUDA device of that name, the present one for "", or why there is none."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not re.fullmatch(r"(cuda(:(0|[1-9]\d?))?)?", name):
        return f"{name} is no CUDA device"
    device = torch.device(name or "cuda")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


class DeviceArena:
    """`slot_count` slots of `layout.slot_bytes` and, behind them, a page for the driver's own test.

    Page-aligned, and zero at first: the padding of slots goes to disk too.
    """

    def __init__(
        self, layout: BlockLayout, slot_count: int, device: torch.device, field: str = "staging"
    ) -> None:
        """Raises SettingsError, which names `field`, where the device has not so much memory."""
        assert layout.shard_count == 1, "one device holds whole blocks"
        assert slot_count > 0
        self.layout = layout
        self.slot_count = slot_count
        size = slot_count * layout.slot_bytes
        try:
            # An inference tensor could not be written from a thread outside of inference mode.
            with torch.inference_mode(False):
                memory = torch.zeros(size + 2 * PAGE_BYTES, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise SettingsError(
                field, f"{size / 1e9:.2f} GB", f"memory that {device} has ({first_line(error)})"
            ) from error
        start = -memory.data_ptr() % PAGE_BYTES
        self.bytes = memory[start : start + size + PAGE_BYTES]
        self.tensor = self.bytes[:size].view(slot_count, layout.slot_bytes)
        """uint8 `[slots, slot_bytes]`, as copiers take it."""

    def slot_views(self, slot: int, count: int = 1) -> list[DeviceSpan]:
        """The bytes of the slot, or of `count` slots from it on: one page-aligned span."""
        size = self.layout.slot_bytes
        return [DeviceSpan(self.bytes.data_ptr() + slot * size, count * size)]

    def invalidate(self, slot: int) -> None:
        """Does nothing: only this process reads the slots, and it holds a lease while it does."""

    def invalidate_all(self, slots: Sequence[int]) -> None:
        """Does nothing, as `invalidate`."""

    def close(self) -> None:
        """The memory goes with the last copier or transfer that uses it."""
        self.bytes = self.tensor = self.bytes[:0]


class DeviceMemory:
    """A `TransferMemory` over an arena.

    Work on a CUDA device is put on a stream of the calling thread's own, which must be one of ours.
    """

    def __init__(self, arena: DeviceArena) -> None:
        """Raises RuntimeError where the device fails."""
        self._bytes = arena.bytes
        device = self._bytes.device
        self._cuda = TorchDevice(device) if device.type == "cuda" else None
        self._base = self._bytes.data_ptr()
        self._threads = threading.local()
        self._coefficients = torch.from_numpy(coefficients().copy()).to(device)
        self.segment: Segment = "DRAM" if self._cuda is None else "VRAM"
        self.device_index = 0 if self._cuda is None else self._cuda.index
        self.probe: Buffer = DeviceSpan(self._base + self._bytes.numel() - PAGE_BYTES, PAGE_BYTES)
        self._regions = [(self._base, self._bytes.numel())]

    def active(self) -> AbstractContextManager[object]:
        """Makes the device the calling thread's present one, and restores the earlier one afterwards."""
        return contextlib.nullcontext() if self._cuda is None else self._cuda.active()

    def regions(self) -> list[tuple[int, int]]:
        return self._regions

    def place(self, buffer: Buffer) -> tuple[int, int]:
        assert isinstance(buffer, DeviceSpan)
        return buffer.address, buffer.nbytes

    def page_sums(self, buffer: Buffer) -> bytes:
        return self._on_device(lambda: self._sums(self._tensor(buffer)))

    def put(self, buffer: Buffer, data: bytes) -> None:
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)

        def copy() -> bytes:
            self._tensor(buffer).copy_(source)
            return b""

        self._on_device(copy)

    def get(self, buffer: Buffer) -> bytes:
        return self._on_device(lambda: self._tensor(buffer).cpu().numpy().tobytes())

    def _tensor(self, buffer: Buffer) -> torch.Tensor:
        assert isinstance(buffer, DeviceSpan)
        start = buffer.address - self._base
        assert 0 <= start <= start + buffer.nbytes <= self._bytes.numel()
        return self._bytes[start : start + buffer.nbytes]

    def _sums(self, data: torch.Tensor) -> bytes:
        """As `page_sums.host_page_sums`, on the device: only the sums leave it."""
        words = data.view(torch.int32).view(-1, PAGE_WORDS)
        sums = torch.empty((words.shape[0], len(self._coefficients)), dtype=torch.int64, device=data.device)
        for first in range(0, words.shape[0], _CHUNK_PAGES):
            wide = words[first : first + _CHUNK_PAGES].to(torch.int64)
            for column, row in enumerate(self._coefficients):
                torch.sum(wide * row, 1, out=sums[first : first + _CHUNK_PAGES, column])
        return bytes(sums.cpu().numpy().astype("<i8", copy=False).tobytes())

    def _on_device(self, work: Callable[[], bytes]) -> bytes:
        """`work`, ended. Raises OSError where the device fails."""
        try:
            with torch.inference_mode():
                if self._cuda is None:
                    return work()
                with self._cuda.active():
                    return self._on_stream(self._cuda, work)
        except (RuntimeError, KvbmError) as error:
            raise OSError(errno.EIO, f"{self._bytes.device}: {first_line(error)}") from error

    def _on_stream(self, cuda: TorchDevice, work: Callable[[], bytes]) -> bytes:
        stream: TorchStream | None = getattr(self._threads, "stream", None)
        if stream is None:
            # The engine may be capturing a CUDA graph meanwhile: what this thread asks for must not end that.
            CudaDriver().adopt_thread(cuda.index)
            stream = self._threads.stream = cuda.new_stream(STORE_PRIORITY)
        results: list[bytes] = []
        stream.run(lambda: results.append(work()))
        stream.record().synchronize()
        return results[0]

"""Copies where the device is a CUDA GPU: gathered on the device, then one plain copy per slot over the bus.

A block's layers lie scattered in device memory and densely in a slot. The device gathers (or scatters) them
at its own memory's speed into a bounded staging buffer, so that what crosses the bus are long contiguous
pieces between that buffer and page-locked host memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading

import torch

from kvbm.transfer.copier import DeviceEvent, Pairs, assert_arena, checked
from kvbm.transfer.device_cache import DeviceCache

_log = logging.getLogger(__name__)

_STAGING_BYTES_MAX = 64 << 20


class CudaCopier:
    """Copies on a stream of its own, beside the forward pass (see `Copier`).

    Page-locks the arena; where the driver refuses, every batch goes through a small page-locked buffer
    instead, which is slower and logged once. Copies take turns: they share the staging buffers.
    """

    def __init__(self, cache: DeviceCache, arena: torch.Tensor) -> None:
        assert_arena(arena, cache)
        self._cache = cache
        self._arena = arena
        self._lock = threading.Lock()
        self._batch = max(1, min(_STAGING_BYTES_MAX // arena.shape[1], arena.shape[0], cache.block_count))
        # Rows keep the arena's slot size, so that a region's words are aligned in both.
        shape = (self._batch, arena.shape[1])
        with torch.inference_mode(False), torch.cuda.device(cache.device):
            self._stream = torch.cuda.Stream()
            self._staging = torch.empty(shape, dtype=torch.uint8, device=cache.device)
            # Allocated on the current stream, used on ours: what used the memory before must have ended.
            self._stream.wait_stream(torch.cuda.current_stream())
            self._registered = _page_lock(arena)
            self._bounce: torch.Tensor | None = None
            if not self._registered:
                self._bounce = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._regions = [(region.device, region.slots(self._staging)) for region in cache.regions]

    def mark(self) -> DeviceEvent:
        """An event on the calling thread's current stream."""
        with torch.cuda.device(self._cache.device):
            event: DeviceEvent = torch.cuda.current_stream().record_event()
        return event

    def store(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        """Device blocks → slots."""
        with self._lock, torch.cuda.device(self._cache.device):
            ordered = self._begin(pairs, after)
            for start in range(0, len(ordered), self._batch):
                self._store_batch(ordered[start : start + self._batch])

    def load(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        """Slots → device blocks."""
        with self._lock, torch.cuda.device(self._cache.device):
            ordered = self._begin(pairs, after)
            for start in range(0, len(ordered), self._batch):
                self._load_batch(ordered[start : start + self._batch])

    def close(self) -> None:
        """Wait for copies under way and unlock the arena's pages. Idempotent."""
        with self._lock:
            self._stream.synchronize()
            if self._registered:
                torch.cuda.cudart().cudaHostUnregister(self._arena.data_ptr())
                self._registered = False

    def _begin(self, pairs: Pairs, after: DeviceEvent | None) -> list[tuple[int, int]]:
        ordered = checked(pairs, self._cache, self._arena)
        event = after if after is not None else self.mark()
        assert isinstance(event, torch.cuda.Event), event
        self._stream.wait_event(event)
        return ordered

    def _store_batch(self, batch: Pairs) -> None:
        rows = range(len(batch))
        slots = [self._cut(self._arena, slot) for _, slot in batch]
        # Without page locks the bytes pass through the bounce buffer, whose rows stand for the slots.
        locked = slots if self._bounce is None else [self._cut(self._bounce, row) for row in rows]
        with torch.cuda.stream(self._stream):
            blocks = torch.tensor([block for block, _ in batch], device=self._cache.device)
            for device, staged in self._regions:
                staged[: len(batch)].copy_(device.index_select(0, blocks))
            for row in rows:
                locked[row].copy_(self._cut(self._staging, row), non_blocking=True)
        self._stream.synchronize()
        if self._bounce is not None:
            torch._foreach_copy_(slots, locked)

    def _load_batch(self, batch: Pairs) -> None:
        rows = range(len(batch))
        slots = [self._cut(self._arena, slot) for _, slot in batch]
        locked = slots if self._bounce is None else [self._cut(self._bounce, row) for row in rows]
        if self._bounce is not None:
            torch._foreach_copy_(locked, slots)
        with torch.cuda.stream(self._stream):
            blocks = torch.tensor([block for block, _ in batch], device=self._cache.device)
            for row in rows:
                self._cut(self._staging, row).copy_(locked[row], non_blocking=True)
            for device, staged in self._regions:
                device.index_copy_(0, blocks, staged[: len(batch)])
        # Also keeps the bounce buffer from being refilled while it is still being read.
        self._stream.synchronize()

    def _cut(self, rows: torch.Tensor, row: int) -> torch.Tensor:
        """One block's bytes of a row, its padding left out."""
        return rows[row, : self._cache.shard_bytes]


def _page_lock(arena: torch.Tensor) -> bool:
    """Whether the driver has page-locked the arena, so that copies from and to it run beside the engine."""
    error = int(torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.nbytes, 0))
    if error:
        _log.warning(
            "host arena of %d bytes could not be page-locked (CUDA error %d): copies go through a small "
            "page-locked buffer and are slower",
            arena.nbytes,
            error,
        )
        # CUDA reports a refused call once more from the next kernel launch: let that be one of ours.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return not error

"""Copies between a KV cache and slots on the same device: the way to a staging area that lies there."""

from __future__ import annotations

import contextlib

import torch

from kvbm.errors import KvbmError
from kvbm.transfer.copier import Copying, DeviceEvent, Over, Pairs, assert_arena, checked
from kvbm.transfer.cuda.device import TorchDevice
from kvbm.transfer.device_cache import DeviceCache, Region


class DeviceCopier:
    """Copies by the device's own gather and scatter, one per region (see `Copier`). A copy that was begun is over.

    It runs on the calling thread's current stream, behind all work that the caller put there.
    """

    def __init__(self, cache: DeviceCache, arena: torch.Tensor) -> None:
        """Raises KvbmError for a cache that lies elsewhere than the arena."""
        assert_arena(arena, cache)
        if cache.device != arena.device:
            raise KvbmError(
                f"copying KV on {cache.device} to slots on {arena.device}: one device is accepted"
            )
        self._cache = cache
        self._arena = arena
        self._cuda = TorchDevice(arena.device) if arena.device.type == "cuda" else None
        self._layers = {name: [region] for name, region in cache.layers.items()}

    def adopt_thread(self) -> None:
        """The calling thread's own stream is used: nothing to prepare."""

    def mark(self) -> DeviceEvent | None:
        """The present end of the engine's work; None on a CPU, where work ends with its call."""
        return None if self._cuda is None else self._cuda.mark()

    def begin_store(self, pairs: Pairs, after: DeviceEvent | None = None) -> Copying:
        self._copy(pairs, self._cache.regions, after, to_slots=True)
        return Over()

    def begin_load(self, pairs: Pairs, after: DeviceEvent | None = None, layer: str | None = None) -> Copying:
        regions = self._cache.regions if layer is None else self._layers[layer]
        self._copy(pairs, regions, after, to_slots=False)
        return Over()

    def hold(self, copying: Copying) -> None:
        """The copies are over already: there is nothing to wait for."""

    def store(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        self.begin_store(pairs, after)

    def load(self, pairs: Pairs, after: DeviceEvent | None = None) -> None:
        self.begin_load(pairs, after)

    def close(self) -> None:
        """Nothing is under way between two calls."""

    def _copy(
        self,
        pairs: Pairs,
        regions: tuple[Region, ...] | list[Region],
        after: DeviceEvent | None,
        *,
        to_slots: bool,
    ) -> None:
        ordered = checked(pairs, self._cache, self._arena)
        if not ordered:
            return
        if after is not None:
            after.synchronize()
        active = contextlib.nullcontext() if self._cuda is None else self._cuda.active()
        with active, torch.inference_mode():
            blocks, slots = torch.tensor(ordered, device=self._arena.device).unbind(1)
            for region in regions:
                there = region.slots(self._arena)
                if to_slots:
                    there[slots] = region.device[blocks]
                else:
                    region.device[blocks] = there[slots]
            if self._cuda is not None:
                event = self._cuda.mark()
                event.synchronize()

"""A worker's view of its shard of the host tier in one life of the manager."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvbm.numa import keep_thread_on
from kvbm.protocol import Welcome
from kvbm.tiers.host import open_arena, populate
from kvbm.transfer import Copier, Copying, DeviceCache, DeviceEvent, LockTurns, arena_tensor, make_copier

_POPULATE_CHUNK_BYTES = 32 << 20


class Mapping:
    """The mapped arena, the slots' generations and a copier over both. Valid for `epoch` only.

    `numa_node` is where pages of the arena should lie that nobody has touched yet; -1 is anywhere.
    """

    def __init__(
        self,
        welcome: Welcome,
        fds: Sequence[int],
        cache: DeviceCache,
        cuda_method: str = "auto",
        numa_node: int = -1,
    ) -> None:
        self.epoch = welcome.epoch
        self.layers = tuple(cache.layers)
        # Before the descriptors are closed; only a CUDA device has pages locked.
        turns = LockTurns(fds[0]) if fds and cache.device.type == "cuda" else None
        region, generations = open_arena(fds, welcome.slot_count, welcome.slot_bytes)
        self._region = region
        self._generation_map = generations
        self._generations = memoryview(generations).cast("Q")
        arena = arena_tensor(region, welcome.slot_count, welcome.slot_bytes)
        try:
            self.copier: Copier = make_copier(cache, arena, cuda_method, numa_node=numa_node, turns=turns)
        except BaseException:
            if turns is not None:
                turns.close()
            raise
        self._numa_node = numa_node
        self._closing = threading.Event()
        # A page of the arena that this process never touched costs a fault on the first copy: take them early.
        self._populator = threading.Thread(target=self._populate, name="kvbm-populate", daemon=True)
        self._populator.start()

    def intact(self, slots: Sequence[int], expected: Sequence[int]) -> int:
        """How many leading slots still have the generation expected of them."""
        generations = self._generations
        for i, (slot, generation) in enumerate(zip(slots, expected, strict=True)):
            if generations[slot] != generation:
                return i
        return len(slots)

    def close(self) -> None:
        """Finish copies and drop the mapping."""
        self._closing.set()
        self._populator.join()
        self.copier.close()
        # The tensor over the region goes with the copier's last reference; the mapping with the tensor.
        self._generations.release()

    def _populate(self) -> None:
        keep_thread_on(self._numa_node)  # the manager's threads may not have come as far
        size = len(self._region)
        for start in range(0, size, _POPULATE_CHUNK_BYTES):
            if self._closing.is_set() or not populate(
                self._region, start, min(_POPULATE_CHUNK_BYTES, size - start)
            ):
                return


class Mark(NamedTuple):
    """A point in the engine's device work, and the mapping it was set for: a job runs on that mapping or fails.

    Without that, a job put while the mapping is replaced would wait for no `event` at all.
    """

    mapping: Mapping
    event: DeviceEvent | None

    def hold(self, copying: Copying) -> None:
        """The device begins what the engine's thread gives it from now on only after these copies."""
        self.mapping.copier.hold(copying)

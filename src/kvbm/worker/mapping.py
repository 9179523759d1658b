"""A worker's memory in one life of the manager: its shard of the host tier, and a copier over it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvbm.client.arena import MappedArena
from kvbm.protocol import Welcome
from kvbm.step_plan import NO_EPOCH
from kvbm.transfer import Copier, Copying, DeviceCache, DeviceEvent, arena_tensor, make_copier

EARLIER_S = 10.0


class Mapping(MappedArena):
    """The mapped arena, and a copier between it and the device's blocks."""

    def __init__(
        self,
        welcome: Welcome,
        fds: Sequence[int],
        cache: DeviceCache,
        cuda_method: str = "auto",
        numa_node: int = -1,
        huge_pages: bool = True,
        runtime_dir: str = "",
    ) -> None:
        """`runtime_dir`: see `make_copier`."""
        super().__init__(welcome, fds, numa_node, huge_pages)
        self.layers = tuple(cache.layers)
        arena = arena_tensor(self.region, self.slot_count, self.slot_bytes)
        try:
            self.copier: Copier = make_copier(
                cache, arena, cuda_method, numa_node=numa_node, runtime_dir=runtime_dir
            )
        except BaseException:
            super().close()
            raise
        self.start_populating()

    def close(self) -> None:
        """Finish copies and drop the mapping."""
        super().close()  # first: no thread needs to touch pages while the copier waits
        self.copier.close()


class Earlier:
    """The mapping before the present one, for loads that were promised out of it and are on their way to the ranks.

    A dead manager overwrites nothing: what the generations of its slots say holds. Kept for `EARLIER_S`, where that is
    on; closed at once elsewhere. Owned by the mover.
    """

    def __init__(self, on: bool) -> None:
        self.mapping: Mapping | None = None
        self._on = on
        self._until_s = 0.0

    def replace(self, mapping: Mapping, now_s: float) -> None:
        """This was the present mapping until now."""
        self.close()
        if self._on:
            self.mapping, self._until_s = mapping, now_s + EARLIER_S
        else:
            mapping.close()

    def expire(self, now_s: float, in_use: bool) -> None:
        """Close it when its time is over, and no load runs."""
        if self.mapping is not None and not in_use and now_s >= self._until_s:
            self.close()

    def close(self) -> None:
        """Close it now."""
        mapping, self.mapping = self.mapping, None
        if mapping is not None:
            mapping.close()


class Adopted:
    """Which life of the manager's memory is mapped, for threads that wait for that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch = NO_EPOCH

    def now(self, epoch: int) -> None:
        """The memory of this life has been mapped."""
        with self._changed:
            self._epoch = epoch
            self._changed.notify_all()

    def wait(self, epoch: int, timeout_s: float) -> bool:
        """Wait until the memory of that life is mapped: a leader may hear of it first. False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._epoch == epoch, timeout_s)


class Mark(NamedTuple):
    """A point in the engine's device work, and the mapping it was set for: a job runs on that mapping or fails.

    Without that, a job put while the mapping is replaced would wait for no `event` at all.
    """

    mapping: Mapping
    event: DeviceEvent | None

    def hold(self, copying: Copying) -> None:
        """The device begins the engine's later work only after these copies."""
        self.mapping.copier.hold(copying)

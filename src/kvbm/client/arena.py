"""A client's view of one shard of the host tier, in one life of the manager."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvbm.numa import keep_thread_on
from kvbm.protocol import Welcome
from kvbm.tiers.host import open_arena, populate

_POPULATE_CHUNK_BYTES = 32 << 20


class MappedArena:
    """The mapped slots and their generations. Valid for `epoch` only.

    `numa_node` is where pages should lie that nobody has touched yet; -1 is anywhere. `huge_pages`: see
    `tiers.host.advise_huge_pages`.
    """

    def __init__(
        self, welcome: Welcome, fds: Sequence[int], numa_node: int = -1, huge_pages: bool = True
    ) -> None:
        """Takes the descriptors that came with the welcome over. Raises ManagerUntrusted and OSError."""
        self.epoch = welcome.epoch
        self.slot_count, self.slot_bytes = welcome.slot_count, welcome.slot_bytes
        self.region, self._generation_map = open_arena(
            fds, welcome.slot_count, welcome.slot_bytes, huge_pages
        )
        self._generations = memoryview(self._generation_map).cast("Q")
        self._numa_node = numa_node
        self._closing = threading.Event()
        self._populator: threading.Thread | None = None

    def start_populating(self) -> None:
        """Touch the pages in the background: one that this process never touched costs a fault on the first copy."""
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
        """Drop the mapping; the memory goes when no tensor over it is left."""
        self._closing.set()
        if self._populator is not None:
            self._populator.join()
        self._generations.release()

    def _populate(self) -> None:
        keep_thread_on(self._numa_node)  # the manager's threads may not have come as far
        size = len(self.region)
        for start in range(0, size, _POPULATE_CHUNK_BYTES):
            length = min(_POPULATE_CHUNK_BYTES, size - start)
            if self._closing.is_set() or not populate(self.region, start, length):
                return

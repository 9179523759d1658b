"""The slots whose records are to be voided: a byte a slot, so that any number of evictions is bounded.

Voids are written after the eviction that they belong to, by another thread. A void must not destroy the record of a
block that was stored in the same slot since: a store calls `overtake` first, and voids the record itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

STRETCH_SLOTS_MAX = 4096
"""The slots that one write voids: 1 MiB of the journal."""


def stretches_of(slots: Iterable[int]) -> Iterator[range]:
    """These slots, each once, as stretches of neighbours that one write voids."""
    stretch = range(0)
    for slot in sorted(set(slots)):
        if slot != stretch.stop or len(stretch) == STRETCH_SLOTS_MAX:
            if stretch:
                yield stretch
            stretch = range(slot, slot)
        stretch = range(stretch.start, slot + 1)
    if stretch:
        yield stretch


class Voids:
    """Thread-safe. One thread calls `take` and `written`. Nothing here waits for the medium but `overtake`."""

    def __init__(self, slot_count: int) -> None:
        self._changed = threading.Condition()
        # Guarded by the condition's lock:
        self._due = bytearray(slot_count)
        self._due_from = slot_count  # none before it
        self._scheduled = False
        self._being_written = range(0)

    def add(self, slot: int, count: int = 1) -> bool:
        """The records of these slots are to be voided. Whether a thread has to be told to `take` until there is none:
        not while that goes on."""
        with self._changed:
            self._due[slot : slot + count] = b"\1" * count
            self._due_from = min(self._due_from, slot)
            scheduled, self._scheduled = self._scheduled, True
            return not scheduled

    def overtake(self, slot: int, count: int) -> list[int]:
        """The caller voids these slots itself; those of them that were due. Waits for a void of them that is being
        written."""
        with self._changed:
            due = [slot + i for i, each in enumerate(self._due[slot : slot + count]) if each]
            self._due[slot : slot + count] = bytes(count)
            self._changed.wait_for(lambda: not self._overlaps(slot, count))
            return due

    def take(self) -> range | None:
        """The next stretch of neighbours, which the caller voids now; `written` follows. None when there is none."""
        with self._changed:
            first = self._due.find(1, self._due_from)
            if first < 0:
                self._due_from, self._scheduled = len(self._due), False
                return None
            limit = min(first + STRETCH_SLOTS_MAX, len(self._due))
            end = self._due.find(0, first, limit)
            stretch = self._being_written = range(first, end if end >= 0 else limit)
            self._due[stretch.start : stretch.stop] = bytes(len(stretch))
            self._due_from = stretch.stop
            return stretch

    def written(self, failed: bool = False) -> None:
        """The stretch that `take` returned is voided; `failed`: it is due again."""
        with self._changed:
            stretch, self._being_written = self._being_written, range(0)
            if failed:
                self._due[stretch.start : stretch.stop] = b"\1" * len(stretch)
                self._due_from = min(self._due_from, stretch.start)
            self._changed.notify_all()

    def clear(self) -> None:
        """There is no such record any more."""
        with self._changed:
            self._due[:] = bytes(len(self._due))

    def _overlaps(self, slot: int, count: int) -> bool:
        return self._being_written.start < slot + count and slot < self._being_written.stop

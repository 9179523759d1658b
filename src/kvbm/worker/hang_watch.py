"""Notices copies that do not end, and calls that begin copies and do not return: a device or its driver hangs then.

A copy that was begun cannot be taken back. One that hangs may write to its targets at any later time, so they are not
reused: a store's slots stay reserved until this process ends, and a load ends the engine
(`docs/decisions/0040-copies-that-hang.md`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbm.clock import Clock
from kvbm.errors import CopyHung
from kvbm.transfer.copier import COPY_S_MAX

LATE_S = 1.0
"""A copy that is the oldest one for so long may hang."""


class HangWatch:
    """Watches the copies of one kind, `load` or `store`, which end in the order in which they were begun.

    Owned by the mover's thread; any thread may read `hung`, `late` and `call_hangs`.
    """

    def __init__(self, kind: str, clock: Clock) -> None:
        self._kind, self._clock = kind, clock
        self._ended_s = float("-inf")
        self._called_s: float | None = None
        self.hung = False
        """A copy of this kind has not ended in time."""
        self.late = False
        """The oldest copy under way takes longer than `LATE_S`."""

    @contextmanager
    def watch_call(self) -> Iterator[None]:
        """Around a call that begins copies."""
        self._called_s = self._clock()
        try:
            yield
        finally:
            self._called_s = None

    def call_hangs(self) -> bool:
        """Whether a call that begins copies has not returned in time."""
        called_s = self._called_s
        return called_s is not None and self._clock() - called_s > COPY_S_MAX

    def note_end(self) -> None:
        """The oldest copy has ended."""
        self._ended_s, self.late = self._clock(), False

    def check_oldest(self, begun_s: float) -> None:
        """The oldest copy under way was begun at `begun_s`. Raises CopyHung, once, if it has not ended in time."""
        age_s = self._clock() - max(begun_s, self._ended_s)
        self.late = age_s > LATE_S
        if not self.hung and age_s > COPY_S_MAX:
            self.hung = True
            raise CopyHung(f"a {self._kind} has not ended within {COPY_S_MAX:g} s")

    @contextmanager
    def watch_wait(self) -> Iterator[None]:
        """Around a wait for a copy, which raises CopyHung."""
        try:
            yield
        except CopyHung:
            self.hung = True
            raise


class Watches:
    """The watches over a rank's copies, for any thread."""

    def __init__(self, stores: HangWatch, loads: HangWatch) -> None:
        self._stores, self._loads = stores, loads

    @property
    def is_stuck(self) -> bool:
        """Whether a call that begins copies does not return."""
        return self._loads.call_hangs() or self._stores.call_hangs()

    @property
    def stores_are_late(self) -> bool:
        """Whether a store may hang."""
        return self._stores.late

    @property
    def stores_hang(self) -> bool:
        """Whether a store does not end."""
        return self._stores.hung

    @property
    def loads_hang(self) -> bool:
        """Whether a load does not end: its device blocks may still be written."""
        return self._loads.hung or self._loads.call_hangs()

    @property
    def has_hung(self) -> bool:
        """Whether copies of either kind do not end."""
        return self.stores_hang or self.loads_hang

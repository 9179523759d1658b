"""Notices copies that do not end, and calls that begin copies and do not return: a device or its driver hangs then.

A copy that was begun cannot be taken back. One that hangs may write to its targets at any later time, so these are
given to nobody: a store's slots stay reserved until this process ends, and a load ends the engine
(`docs/decisions/0038-copies-that-hang.md`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbm.clock import Clock
from kvbm.errors import CopyHung
from kvbm.transfer.copier import COPY_S_MAX


class HangWatch:
    """Watches the copies of one kind, `load` or `store`, which end in the order in which they were begun.

    Owned by the mover's thread; any thread may read `hung` and `call_hangs`.
    """

    def __init__(self, kind: str, clock: Clock) -> None:
        self._kind, self._clock = kind, clock
        self._ended_s = float("-inf")
        self._called_s: float | None = None
        self.hung = False
        """A copy of this kind has not ended in time."""

    @contextmanager
    def calling(self) -> Iterator[None]:
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
        self._ended_s = self._clock()

    def check_oldest(self, begun_s: float) -> None:
        """The oldest copy under way was begun at `begun_s`. Raises CopyHung, once, if it has not ended in time."""
        if not self.hung and self._clock() - max(begun_s, self._ended_s) > COPY_S_MAX:
            self.hung = True
            raise CopyHung(f"a {self._kind} has not ended within {COPY_S_MAX:g} s")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for a copy, which raises CopyHung."""
        try:
            yield
        except CopyHung:
            self.hung = True
            raise

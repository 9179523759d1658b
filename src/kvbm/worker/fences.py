"""Stores that a manager has given up: none of them begins any more, and it hears when none is under way.

The manager gives their slots to others then. What else the mover does goes on meanwhile. Owned by the mover's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

_NAMED_MAX = 16_384
"""Stores that are remembered; the oldest are forgotten first, long after their plans."""


class Fences:
    """The fences of a session; true while one is not answered. `store in fences`: it must not begin."""

    def __init__(self) -> None:
        self._named: dict[int, None] = {}
        self._open: deque[tuple[int, frozenset[int]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, store: int) -> bool:
        return store in self._named

    def raised(self, fence: int, stores: Collection[int], under_way: Collection[int]) -> None:
        """The manager raised a fence: `stores` never begin, and those `under_way` end before it is answered."""
        self._named.update(dict.fromkeys(stores))
        for store in list(self._named)[: max(0, len(self._named) - _NAMED_MAX)]:
            del self._named[store]
        self._open.append((fence, frozenset(under_way)))

    def passed(self, under_way: Collection[int]) -> list[int]:
        """The fences that can be answered now, in the order in which they were raised."""
        passed = []
        while self._open and self._open[0][1].isdisjoint(under_way):
            passed.append(self._open.popleft()[0])
        return passed

    def session_ended(self) -> None:
        """Nobody waits for an answer any more."""
        self._open.clear()

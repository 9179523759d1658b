"""How long the oldest item of a queue has waited, without a look at the clock for every item."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class _Mark(NamedTuple):
    newest: int
    at_s: float


class QueueAge:
    """For a queue whose items leave in the order in which they came, numbered from 0 on.

    Each look notes the newest number: this item, and all before it, came before. So an age is short by the time between
    two looks at most, and never too long. One thread.
    """

    def __init__(self) -> None:
        # Ascending. Each mark is of an item that still waits, so that there are no more of them than items.
        self._marks: deque[_Mark] = deque()

    def look(self, left: int, waiting: int, now_s: float) -> float:
        """`left` items have left the queue by now, and `waiting` ones are in it: how old the oldest of these is, in
        seconds; 0 without any."""
        since_s, marks, newest = self.since_s(left, now_s), self._marks, left + waiting - 1
        if waiting and (not marks or marks[-1].newest < newest):
            marks.append(_Mark(newest, now_s))
        return now_s - since_s if waiting else 0.0

    def since_s(self, number: int, now_s: float) -> float:
        """When the item of this number was seen first, where those before it have left; `now_s` if it was not."""
        marks = self._marks
        while marks and marks[0].newest < number:
            marks.popleft()
        return marks[0].at_s if marks else now_s

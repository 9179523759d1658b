"""Simulated time: a queue of calls, each made when its time has come."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import TypeVar

_Subject = TypeVar("_Subject")


class Events:
    """A queue of calls by time; calls of the same time are made in the order of their `at`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """When the latest call was due."""
        self._waiting: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def at(self, when_s: float, what: Callable[[float, _Subject], None], subject: _Subject) -> None:
        """Call `what(when_s, subject)` once the time has come."""
        entry = (when_s, next(self._numbers), lambda now_s: what(now_s, subject))
        heapq.heappush(self._waiting, entry)

    def pass_until(self, now_s: float) -> None:
        """Make all calls that are due by then, and the calls that these add."""
        while self._waiting and self._waiting[0][0] <= now_s:
            self.now_s, _, call = heapq.heappop(self._waiting)
            call(self.now_s)

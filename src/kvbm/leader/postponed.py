"""Requests that were told to ask again: they are told the same at once, until something happens that can change it.

An engine asks about all that wait in each of its steps, and they may be thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvbm.clock import Clock
from kvbm.leader.window import Window


class Hold(Protocol):
    """What a request waits for: the answer holds until this time. It may be brought forward."""

    until_s: float


@dataclass(slots=True)
class Until:
    """A time that is known when the answer is given."""

    until_s: float


NOT_HELD = Until(float("-inf"))
IN_TURN = Until(float("inf"))
"""It is looked up when it is its turn, and woken then."""


@dataclass(slots=True)
class _Asked:
    computed: int
    read: int
    hold: Hold


class Postponed:
    """The engine's last question about each request that has not begun. Owned by the engine's thread."""

    def __init__(self, clock: Clock, window: Window) -> None:
        self._clock = clock
        self._window = window
        self._asked: dict[str, _Asked] = {}
        self.reads = 0
        """How often the manager's messages were taken in."""

    def __len__(self) -> int:
        return len(self._asked)

    def holds(self, request: str, computed: int) -> bool:
        """Whether the request is told to ask again without another look. Once only, until messages are taken in: an
        engine that asks twice waits for them."""
        asked = self._asked.get(request)
        if asked is None or asked.computed != computed or asked.read == self.reads:
            return False
        if self._clock() >= asked.hold.until_s:
            return False
        # A request that waits for another one's load has no part in the order of lookups.
        if type(asked.hold) is Until and not self._window.passes_over(request):
            return False
        asked.read = self.reads
        return True

    def asks_twice(self, request: str) -> bool:
        """Whether the engine has asked about the request since messages were last taken in."""
        asked = self._asked.get(request)
        return asked is not None and asked.read == self.reads

    def answered(self, request: str, computed: int, hold: Hold = NOT_HELD) -> None:
        """The engine has asked about the request, and was told to ask again where there is a `hold`."""
        self._asked[request] = _Asked(computed, self.reads, hold)

    def wake(self, request: str) -> None:
        """Something has happened that concerns this request."""
        asked = self._asked.get(request)
        if asked is not None:
            asked.hold = NOT_HELD

    def forget(self, request: str) -> None:
        """The request has begun, or has gone."""
        self._asked.pop(request, None)

    def clear(self) -> None:
        """Something has happened that concerns all of them."""
        self._asked.clear()

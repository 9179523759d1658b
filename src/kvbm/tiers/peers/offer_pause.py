"""How long a peer is offered no memory after an offer that did harm or no good: longer each time."""

from __future__ import annotations

from kvbm.clock import Clock

FIRST_S = 30.0
LONGEST_S = 1800.0
"""Also how long all has to go well until the next pause is a first one again."""


class OfferPause:
    """Of a link to one peer: it outlives the link's connections. Owned by the link's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = clock()
        self._next_s = FIRST_S

    @property
    def over(self) -> bool:
        """Whether memory may be offered."""
        return self._clock() >= self._until_s

    def begin(self) -> float:
        """Offer nothing for so many seconds."""
        now_s = self._clock()
        if now_s - self._until_s >= LONGEST_S:
            self._next_s = FIRST_S
        seconds = self._next_s
        self._until_s = now_s + seconds
        self._next_s = min(2 * seconds, LONGEST_S)
        return seconds

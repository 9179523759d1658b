"""The clock of a store, asked for now and then: in between it is our own clock with the difference last seen."""

from __future__ import annotations

from collections.abc import Callable

from kvbm.clock import Clock

REFRESH_S = 300.0


class StoreClock:
    """`ask` costs a request and answers with the store's time, s; `clock` never goes back. Thread-safe."""

    def __init__(self, ask: Callable[[], float], clock: Clock, refresh_s: float = REFRESH_S) -> None:
        self._ask = ask
        self._clock = clock
        self._refresh_s = refresh_s
        self._seen: tuple[float, float] | None = None
        """When it was asked, by our clock, and the difference found then. Replaced as a whole, so no lock is needed."""

    def now_s(self) -> float:
        """What the store's clock says now. What `ask` raises."""
        began_s = self._clock()
        if self._seen is None or began_s - self._seen[0] >= self._refresh_s:
            told_s = self._ask()
            # The answer was right at some moment in between.
            ended_s = self._clock()
            self._seen = (ended_s, told_s - (began_s + ended_s) / 2)
        return self._clock() + self._seen[1]

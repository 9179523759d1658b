"""How long to wait before a peer is tried again: longer after each failure, and never all peers at once."""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 0.5
LONGEST_S = 30.0


class Waits:
    """`random` gives numbers from 0 to 1. A wait is at least half of what it could be at most."""

    def __init__(
        self, random: Callable[[], float], first_s: float = FIRST_S, longest_s: float = LONGEST_S
    ) -> None:
        self._random, self._first_s, self._longest_s = random, first_s, longest_s
        self.failures = 0

    def failed(self) -> float:
        """Once more in a row: so many seconds to wait."""
        longest_s = min(self._longest_s, self._first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return longest_s * (0.5 + 0.5 * self._random())

    def succeeded(self) -> None:
        """It works."""
        self.failures = 0

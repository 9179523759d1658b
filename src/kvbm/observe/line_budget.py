"""So many log lines of one kind in an interval, whatever happens: a log of a busy manager stays small."""

from __future__ import annotations

from kvbm.clock import Clock


class LineBudget:
    """Admits the first `lines_max` lines of each `interval_s` seconds, and counts the others."""

    def __init__(self, lines_max: int, interval_s: float, clock: Clock) -> None:
        assert lines_max > 0
        self._lines_max, self._interval_s, self._clock = lines_max, interval_s, clock
        self._began_s = clock()
        self._admitted = self._left_out = 0

    def has_room(self) -> bool:
        """Whether `admits` would admit a line now."""
        now_s = self._clock()
        if now_s - self._began_s >= self._interval_s:
            self._began_s, self._admitted = now_s, 0
        return self._admitted < self._lines_max

    def admits(self) -> bool:
        """Whether one more line is logged now."""
        if not self.has_room():
            self._left_out += 1
            return False
        self._admitted += 1
        return True

    def take_left_out(self) -> str:
        """The end of the next line that is logged: how many were left out before it; empty for none."""
        count, self._left_out = self._left_out, 0
        return f" ({count} such lines before it were left out)" if count else ""

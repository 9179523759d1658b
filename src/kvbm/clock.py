"""Time as an argument: the real clock, and one that tests move by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start; never goes back."""

    def __call__(self) -> float: ...


def monotonic() -> float:
    """The real clock, seconds."""
    return time.monotonic()


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds * 1e9)


def wall_offset_ns() -> int:
    """What makes a time of `monotonic` one of the system's clock, ns since 1970; it changes when that clock is set."""
    return time.time_ns() - time.monotonic_ns()


class ManualClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward; `seconds` must not be negative."""
        assert seconds >= 0.0
        self._now_s += seconds

"""Whether the disk of a space works, is slow, or is off, and when one that is off is opened again.

It is *off* after a fault: nothing is read or written, and the index means nothing. It is *slow* while one of its
operations takes longer than `SLOW_S`: its blocks are not offered and none are written, but what was begun goes on, and
once that has ended the disk works.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import inf

from kvbm.block import Outcome
from kvbm.clock import Clock
from kvbm.observe.metrics import Metrics
from kvbm.tiers.contract import RunTier

log = logging.getLogger("kvbm.manager")

SLOW_S = 0.75
"""An operation is a few calls for 1 MiB at most, and the checksums of that. Each lookup looks at it: after a second the
blocks of a disk that hangs are not offered."""
SLOW_LOGGED_EACH_S = 60.0
HEAL_S_MIN, HEAL_S_MAX = 10.0, 300.0
"""A disk that is off is opened at once. If it fails again, or cannot be opened, the next attempt comes after the first
of these, then after twice as long each time, up to the second. A disk that has worked that long begins anew."""


def is_slow(medium: RunTier) -> bool:
    """Whether an operation of a medium that is not off takes too long."""
    return medium.busy_s >= SLOW_S and not medium.fault


@dataclass(slots=True, eq=False)
class DiskHealth:
    """The health of one medium. Owned by the manager's thread."""

    medium: RunTier
    metrics: Metrics
    clock: Clock
    _slow_since_s: float = field(default=inf, init=False)
    _slow_logged_s: float = field(default=-inf, init=False)
    _is_opening: bool = field(default=False, init=False)
    # Since when it works, as far as it has been seen; None while it is off.
    _works_since_s: float | None = field(default=-inf, init=False)
    _open_at_s: float = field(default=-inf, init=False)
    _wait_s: float = field(default=0.0, init=False)

    @property
    def slow(self) -> str:
        """Empty, or one line: an operation of the medium takes too long."""
        if not is_slow(self.medium):
            return ""
        return f"disk tier is slow: an operation that has not ended has taken {self.medium.busy_s:.1f} s"

    @property
    def slow_in_s(self) -> float:
        """Seconds until the operation that runs now makes the medium slow; infinite where none can."""
        busy_s = self.medium.busy_s
        return SLOW_S - busy_s if 0.0 < busy_s < SLOW_S and not self.medium.fault else inf

    def becomes_slow(self) -> bool:
        """To be called in each turn: whether the medium has become slow since the last one. It is logged, and so is its
        end."""
        slow, was_slow, now_s = self.slow, self._slow_since_s < inf, self.clock()
        if slow and not was_slow:
            self._slow_since_s = now_s - self.medium.busy_s
            if now_s >= self._slow_logged_s + SLOW_LOGGED_EACH_S:
                self._slow_logged_s = now_s
                log.warning("%s: its blocks are not offered until then, and none are written", slow)
            return True
        if was_slow and not slow:
            if self._slow_logged_s >= self._slow_since_s and not self.medium.fault:
                log.warning("disk tier works again: it was slow for %.1f s", now_s - self._slow_since_s)
            self._slow_since_s = inf
        return False

    def comes_back(self) -> bool:
        """To be called in each turn while the medium is off and nothing of it is in flight: opens it when that is due.
        Whether it works from now on."""
        now_s = self.clock()
        if self._works_since_s is not None:
            if now_s >= self._works_since_s + HEAL_S_MAX:
                self._wait_s, self._open_at_s = 0.0, now_s
            self._works_since_s = None
            self._log_wait()
        if not self._is_opening:
            if now_s < self._open_at_s:
                return False
            self.metrics.add("kvbm_retries_total", operation="tier")
        outcome = self.medium.heal()
        self._is_opening = outcome is Outcome.PENDING
        if self._is_opening:
            return False
        self._wait_s = min(max(2 * self._wait_s, HEAL_S_MIN), HEAL_S_MAX)
        self._open_at_s = now_s + self._wait_s
        if outcome is Outcome.HIT:
            self._works_since_s = now_s
            return True
        self._log_wait()
        return False

    def _log_wait(self) -> None:
        wait_s = self._open_at_s - self.clock()
        if wait_s > 0.0:
            log.warning("disk tier: the next attempt to open it is in %.0f s", wait_s)

"""How long the engine's steps take: the cost model learns from it what computing costs."""

from __future__ import annotations

from collections import deque

from kvbm.clock import Clock
from kvbm.leader.cost import CostModel

_IN_FLIGHT_MAX = 2
"""An engine may schedule one step ahead."""


class StepTimes:
    """Steps that were scheduled and have not ended: their prompt tokens, the tokens' mean position, and the time."""

    def __init__(self, cost: CostModel, clock: Clock) -> None:
        self._cost = cost
        self._clock = clock
        self._in_flight: deque[tuple[int, float, float]] = deque(maxlen=_IN_FLIGHT_MAX)
        self._ended_s = 0.0

    def __len__(self) -> int:
        return len(self._in_flight)

    def scheduled(self, prefill_tokens: int, prefill_position: float) -> None:
        """A step with work to do went to the ranks."""
        self._in_flight.append((prefill_tokens, prefill_position, self._clock()))

    def ended(self) -> None:
        """The oldest step in flight ended. It began when it was scheduled, or when the one ahead of it ended."""
        now_s = self._clock()
        if self._in_flight:
            tokens, position, scheduled_s = self._in_flight.popleft()
            self._cost.prefilled(tokens, now_s - max(scheduled_s, self._ended_s), position)
        self._ended_s = now_s

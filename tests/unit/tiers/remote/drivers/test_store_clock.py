"""A store's clock between the times when it is asked."""

from __future__ import annotations

from kvbm.clock import ManualClock
from kvbm.tiers.remote.drivers.store_clock import REFRESH_S, StoreClock


def test_it_is_asked_now_and_then() -> None:
    ours, asked = ManualClock(50.0), []

    def ask() -> float:
        asked.append(ours())
        ours.advance(2.0)  # the way there and back
        return 9000.0 + len(asked)

    clock = StoreClock(ask, ours)
    assert clock.now_s() == 9002.0
    ours.advance(REFRESH_S - 1.0)
    assert clock.now_s() == 9001.0 + REFRESH_S
    ours.advance(1.0)
    assert clock.now_s() == 9003.0
    assert len(asked) == 2

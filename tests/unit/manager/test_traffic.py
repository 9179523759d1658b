"""Hit rates are logged for engines that are there, and for no others."""

from __future__ import annotations

import logging

import pytest

from kvbm.clock import ManualClock
from kvbm.manager.traffic import Traffic
from kvbm.observe.metrics import Metrics
from kvbm.settings import Settings


def test_engines_that_are_gone_make_room_for_others(caplog: pytest.LogCaptureFixture) -> None:
    """Each engine has a name of its own, and a shared manager sees hundreds of them."""
    clock = ManualClock(1.0)
    traffic = Traffic(Metrics(), Settings(), clock)
    with caplog.at_level(logging.INFO, logger="kvbm.traffic"):
        for number in range(100):
            caplog.clear()
            name = f"engine-{number}"
            traffic.looked_up(name, 4, b"")
            clock.advance(60.0)
            traffic.tick([name])
            lines = [record.getMessage() for record in caplog.records if "Hit Rates" in record.getMessage()]
            assert any(f"[worker-{name}]" in line for line in lines)
            assert len(lines) <= 2, "its own, and the last of the one before"


def test_an_engine_that_went_since_the_last_tick_has_its_last_line(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic(Metrics(), Settings(), ManualClock(1.0))
    traffic.looked_up("short-lived", 4, b"")
    with caplog.at_level(logging.INFO, logger="kvbm.traffic"):
        traffic.tick([])
        traffic.looked_up("other", 4, b"")
        traffic.tick(["other"])
    assert sum("[worker-short-lived]" in record.getMessage() for record in caplog.records) == 1

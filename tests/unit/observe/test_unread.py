"""Much is stored and nothing is read: when it is said, how often, and with which cause."""

from __future__ import annotations

import logging

import pytest

from kvbm.clock import ManualClock
from kvbm.manager.traffic import Traffic
from kvbm.observe.metrics import Metrics
from kvbm.observe.unread import Growth
from kvbm.settings import Settings

HOUR_S = 3600.0
GIGABYTES = 5_000_000_000


class Bench:
    """A manager's counts, an hour of whose traffic passes minute by minute."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.clock = ManualClock(1.0)
        self.metrics = Metrics()
        self._caplog = caplog
        self._traffic = Traffic(self.metrics, Settings(), self.clock)

    def said(self, hours: float = 1.0) -> list[str]:
        self._caplog.clear()
        for _ in range(round(hours * 60)):
            self.clock.advance(60.0)
            self._traffic.tick([])
        return [record.getMessage() for record in self._caplog.records if record.levelno == logging.WARNING]

    def stored(self, size: float = GIGABYTES, evicted: int = 1) -> None:
        self.metrics.add("kvbm_transfer_bytes_total", size, source="device", target="host")
        self.metrics.add("kvbm_evicted_blocks_total", evicted, tier="host", reason="capacity")

    def asked(self, lookups: int, found: int = 0, lost: int = 0) -> None:
        self.metrics.add("kvbm_lookups_total", lookups, outcome="hit" if found else "miss")
        self.metrics.add("kvbm_queried_blocks_total", 10 * lookups)
        self.metrics.add("kvbm_hit_blocks_total", found, tier="host")
        self.metrics.add("kvbm_lost_prefixes_total", lost)

    def growth(self) -> Growth:
        return Growth.between({}, self.metrics.snapshot())


@pytest.fixture
def bench(caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level(logging.INFO, logger="kvbm.traffic")
    return Bench(caplog)


def test_it_is_said_once_an_hour_until_something_is_read(bench: Bench) -> None:
    bench.stored()
    bench.asked(100)
    first = bench.said()
    assert len(first) == 1
    assert first[0].startswith(
        "5 GB were stored in 10 min and nothing was read: 100 requests asked for 1,000 blocks"
    )
    for word in ("cache_salt", "a date, an id", "namespace of its own", "kvbm why"):
        assert word in first[0]
    bench.stored()
    assert len(bench.said(3.0)) == 3
    bench.metrics.add("kvbm_onboard_blocks_d2d", 1)
    bench.stored()
    assert bench.said(24.0) == []
    bench.stored()
    assert len(bench.said(1.0)) == 1, "since the last read"


def test_a_cache_that_still_fills_is_given_time(bench: Bench) -> None:
    bench.stored(evicted=0)
    bench.asked(100)
    assert bench.said(5.9) == []
    assert len(bench.said(0.2)) == 1


def test_little_is_no_alarm(bench: Bench) -> None:
    bench.stored(5e8)
    bench.asked(100)
    assert bench.said(24.0) == []


def test_what_went_to_disk_is_named(bench: Bench) -> None:
    bench.stored(1.2e12)
    bench.metrics.add("kvbm_transfer_bytes_total", 9e11, source="host", target="disk")
    assert (
        bench.growth()
        .alarm(2 * HOUR_S)
        .startswith("1.2 TB were stored in 2.0 h (900 GB written to disk) and")
    )


def test_the_cause_is_what_the_counts_say(bench: Bench) -> None:
    bench.stored()
    assert "the device's own cache is enough" in bench.growth().alarm(HOUR_S)
    bench.asked(100, lost=30)
    assert "come back after they were dropped: larger tiers" in bench.growth().alarm(HOUR_S)
    bench.asked(1, found=10)
    bench.metrics.add("kvbm_unloaded_blocks_total", 2, reason="stale")
    bench.metrics.add("kvbm_unloaded_blocks_total", 8, reason="cost")
    assert "10 blocks were found and computed all the same, most of them for the reason 'cost'" in (
        bench.growth().alarm(HOUR_S)
    )

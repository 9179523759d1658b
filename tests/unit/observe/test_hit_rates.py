"""The sliding window against a plain list, and when a line is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.clock import ManualClock
from kvbm.observe.hit_rates import HitCounts, HitRateLog, HitRateWindow, hit_rate_line


@st.composite
def counts(draw):
    host, disk, missed = (draw(st.integers(0, 50)) for _ in range(3))
    return HitCounts(queried_blocks=host + disk + missed, host_blocks=host, disk_blocks=disk)


@given(st.lists(counts(), max_size=40), st.integers(1, 10))
def test_window_is_the_last_requests_that_asked(requests, size):
    window = HitRateWindow(size)
    for request in requests:
        window.record(request)
    last = [request for request in requests if request.queried_blocks][-size:]
    totals = window.totals()
    assert totals.queried_blocks == sum(request.queried_blocks for request in last)
    assert totals.host_blocks == sum(request.host_blocks for request in last)
    assert totals.disk_blocks == sum(request.disk_blocks for request in last)
    assert 0 <= totals.host_rate + totals.disk_rate <= 1.0000001


def test_rates():
    assert HitCounts().host_rate == 0.0
    totals = HitCounts(queried_blocks=8, host_blocks=4, disk_blocks=2)
    assert (totals.host_rate, totals.disk_rate) == (0.5, 0.25)


def test_more_hits_than_queries_is_a_programmers_error():
    with pytest.raises(AssertionError):
        HitRateWindow(3).record(HitCounts(queried_blocks=1, host_blocks=1, disk_blocks=1))


def test_the_line_of_the_original():
    assert (
        hit_rate_line("a1", HitCounts(queried_blocks=1))
        == "KVBM [worker-a1] Cache Hit Rates - Host: 0.0% (0/1), Disk: 0.0% (0/1)"
    )
    assert (
        hit_rate_line("7", HitCounts(queried_blocks=3, host_blocks=2, disk_blocks=1))
        == "KVBM [worker-7] Cache Hit Rates - Host: 66.7% (2/3), Disk: 33.3% (1/3)"
    )


def test_a_line_only_when_asked_changed_and_not_too_soon():
    clock = ManualClock()
    log = HitRateLog("a1", 5.0, clock)
    first, second = HitCounts(queried_blocks=1), HitCounts(queried_blocks=2, host_blocks=1)
    assert log.line(HitCounts()) == ""
    assert log.line(first) != ""
    assert log.line(first) == ""
    assert log.line(second) == ""
    clock.advance(4.9)
    assert log.line(second) == ""
    clock.advance(0.1)
    assert log.line(second) == "KVBM [worker-a1] Cache Hit Rates - Host: 50.0% (1/2), Disk: 0.0% (0/2)"
    clock.advance(100)
    assert log.line(second) == ""
    assert log.line(first) != ""


def test_no_interval_means_every_change():
    log = HitRateLog("a1", 0.0, ManualClock())
    assert log.line(HitCounts(queried_blocks=1))
    assert log.line(HitCounts(queried_blocks=2))

"""Which reads are asked twice, and how many at most."""

from __future__ import annotations

import pytest

from kvbm.tiers.remote.hedging import DELAY_MIN_S, SAMPLES_MIN, SHARE, Hedging
from kvbm.tiers.remote.pace import Pace


def test_the_delay_is_three_medians_of_reads_of_that_size() -> None:
    hedging = Hedging()
    for number in range(SAMPLES_MIN):
        assert hedging.delay_s(1000) is None
        hedging.took(1000, 0.1 if number else 9.0)
    assert hedging.delay_s(1000) == pytest.approx(0.3)
    assert hedging.delay_s(1 << 20) is None, "another size"


def test_short_reads_have_a_least_delay() -> None:
    hedging = Hedging()
    for _ in range(SAMPLES_MIN):
        hedging.took(1000, 0.001)
    assert hedging.delay_s(1000) == DELAY_MIN_S


def test_a_twentieth_is_asked_twice_at_most() -> None:
    hedging = Hedging()
    assert not hedging.take()
    reads = 2000
    for _ in range(reads):
        hedging.took(1000, 0.1)
        hedging.take()
    assert 0.9 * SHARE * reads <= hedging.hedged <= SHARE * reads


def test_credit_is_not_saved_for_ever() -> None:
    hedging = Hedging()
    for _ in range(10_000):
        hedging.took(1000, 0.1)
    assert sum(hedging.take() for _ in range(100)) <= 4


def test_pace_tells_latency_from_bandwidth() -> None:
    pace = Pace()
    assert pace.expected_s(1 << 20) == 0.0
    for _ in range(5):
        pace.took(0, 0.01)
    assert pace.expected_s(1 << 30) == pytest.approx(0.01), "bandwidth unknown"
    for size in (1 << 20, 1 << 22, 1 << 24):
        pace.took(size, 0.01 + size / 1e8)
    assert pace.bytes_per_s == pytest.approx(1e8)
    assert pace.expected_s(10**8) == pytest.approx(1.01)


def test_a_pace_without_small_requests_is_all_bandwidth() -> None:
    pace = Pace()
    pace.took(10**6, 0.1)
    assert (pace.latency_s, pace.expected_s(10**7)) == (0.0, pytest.approx(1.0))


def test_a_latency_is_never_more_than_a_large_request_took() -> None:
    pace = Pace()
    pace.took(0, 5.0)
    pace.took(10**6, 0.1)
    assert pace.latency_s <= 0.05 and pace.bytes_per_s > 0

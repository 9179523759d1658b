"""What requests took, as latency and bandwidth."""

from __future__ import annotations

import pytest

from kvbm.tiers.remote.pace import Pace


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

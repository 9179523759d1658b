"""The measured speed of reads from disk."""

from __future__ import annotations

import pytest

from kvbm.manager.read_rate import ReadRate


def test_nothing_is_foretold_before_a_measurement() -> None:
    rate = ReadRate()
    rate.submitted(10, 0.0)
    assert rate.seconds_for(10) == 0.0


def test_the_rate_is_that_of_a_disk_at_work() -> None:
    rate = ReadRate()
    rate.submitted(100, 10.0)
    rate.ended(40, 10.4)
    assert rate.seconds_for(50) == pytest.approx(0.5)
    rate.ended(60, 11.0)
    rate.submitted(10, 99.0)
    rate.ended(10, 99.1)
    assert rate.seconds_for(100) == pytest.approx(1.0), "the idle time in between does not count"


def test_a_slower_disk_is_believed_step_by_step() -> None:
    rate = ReadRate()
    rate.submitted(1000, 0.0)
    rate.ended(100, 1.0)
    for turn in range(40):
        rate.ended(10, 2.0 + turn)
    assert rate.seconds_for(10) == pytest.approx(1.0, rel=0.02)


def test_many_small_ends_make_one_sample() -> None:
    rate = ReadRate()
    rate.submitted(100, 0.0)
    for turn in range(1, 11):
        rate.ended(1, turn * 0.001)
    assert rate.seconds_for(10) == pytest.approx(0.01)

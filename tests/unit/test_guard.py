"""The border between an engine's thread and our code."""

from __future__ import annotations

import logging

import pytest

from kvbm.guard import Guard

LOG = logging.getLogger("kvbm.test")


def fail(error: type[Exception] = ZeroDivisionError) -> int:
    raise error


@pytest.mark.swallows("^ZeroDivisionError: $")
def test_a_defect_switches_off_once_and_gives_back_what_is_held(caplog: pytest.LogCaptureFixture) -> None:
    given_back: list[bool] = []
    guard = Guard(LOG, lambda: given_back.append(True))
    assert guard.call(0, lambda: 5) == 5
    assert guard.call(0, fail) == 0
    assert guard.off
    assert guard.call(0, lambda: 5) == 0, "off for good"
    assert given_back == [True]
    assert len(caplog.records) == 1


@pytest.mark.swallows("^ZeroDivisionError: $")
def test_giving_back_may_fail_too() -> None:
    guard = Guard(LOG, fail)
    assert guard.call(0, fail) == 0


def test_what_is_meant_for_the_engine_passes() -> None:
    guard = Guard(LOG, passes=(KeyError,))
    with pytest.raises(KeyError):
        guard.call(0, fail, KeyError)
    assert not guard.off

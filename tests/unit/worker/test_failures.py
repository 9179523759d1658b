"""Failures that repeat: logged in full once, then counted."""

from __future__ import annotations

import pytest

from kvbm.errors import KvbmError
from kvbm.worker.failures import KINDS_MAX, FailureLog


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_what_a_device_refuses_is_one_line_and_then_a_number(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    for i in range(5):
        failures.log_failure("load", raised(RuntimeError(f"CUDA error {i}\nand its story")), 3)
    assert lines(caplog) == [
        "load of 3 blocks failed: CUDA error 0",
        "load failed 2 times by now, 6 blocks; the last: CUDA error 1",
        "load failed 4 times by now, 12 blocks; the last: CUDA error 3",
    ]
    failures.close()
    assert lines(caplog) == ["load failed 5 times by now, 15 blocks; the last: CUDA error 4"]
    failures.close()
    assert lines(caplog) == []


def test_another_kind_or_another_place_is_logged_in_full(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    failures.log_failure("load", raised(KeyError("a")), 1)
    failures.log_failure("store", raised(KeyError("a")), 1)
    failures.log_failure("store", raised(KvbmError("full")), 1)
    try:
        {}["elsewhere"]
    except KeyError as error:
        failures.log_failure("store", error, 1, then="; and so on")
    assert [bool(record.exc_info) for record in caplog.records] == [True, True, False, True]
    assert lines(caplog)[-1] == "store of 1 blocks failed; and so on"


def test_kinds_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    for i in range(3 * KINDS_MAX):
        failures.log_failure("store", type(f"Error{i}", (Exception,), {})("x"), 1)
    assert KINDS_MAX < len(lines(caplog)) < 1.5 * KINDS_MAX

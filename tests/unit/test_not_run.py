"""The list at the end of a test run."""

from __future__ import annotations

import pytest

import not_run


def skipped(reason: str, node: str = "tests/test_a.py::test") -> pytest.TestReport:
    where = ("tests/test_a.py", 3, f"Skipped: {reason}")
    return pytest.TestReport(node, ("tests/test_a.py", 3, "test"), {}, "skipped", where, "setup")


def unread(path: str, reason: str) -> pytest.CollectReport:
    return pytest.CollectReport(path, "skipped", (path, 0, f"Skipped: {reason}"), [])  # type: ignore[arg-type]


def test_reasons_are_counted() -> None:
    reports = [
        skipped("promtool is not installed"),
        *[skipped("no CUDA device is available")] * 3,
        unread("tests/unit/test_x.py", "torch is not installed"),
        unread("tests/unit/test_y.py", "torch is not installed"),
    ]
    assert not_run.lines(reports) == [
        "   3  no CUDA device is available",
        "   1  promtool is not installed",
        "whole files: torch is not installed",
    ]


def test_what_no_machine_runs_is_not_listed() -> None:
    assert not_run.lines([skipped(f"{not_run.BY_DESIGN[0]}; see below")]) == []
    assert not_run.lines([]) == []

"""The tests that this machine cannot run, for the end of a test run: they must not look as if they had passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

BY_DESIGN = ("its bound is a million blocks", "a policy that refuses some blocks for good")
"""Beginnings of reasons that would be the same on every machine."""


def lines(reports: Iterable[Any]) -> list[str]:
    """One line per reason: how many tests it kept from running, or that there are files it kept from being read.

    Those are not counted: of files that are left out for the same reason pytest-xdist tells of one.
    """
    tests: Counter[str] = Counter()
    files: dict[str, None] = {}
    for report in reports:
        reason = _reason(report)
        if reason.startswith(BY_DESIGN):
            continue
        if isinstance(report, pytest.CollectReport):
            files[reason] = None
        else:
            tests[reason] += 1
    return [f"{count:>4}  {reason}" for reason, count in tests.most_common()] + [
        f"whole files: {reason}" for reason in files
    ]


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)

"""A pytest plugin: an error that our code swallows fails the test that was running, whichever process swallowed it.

`kvbm.strict` records such errors in a directory of this pytest process. After each test, its fixtures' teardown
included, the records are read. A test that provokes such an error expects it by a mark:

    @pytest.mark.swallows("OSError: .*no space")

The pattern is searched in `TYPE: MESSAGE`. Errors that match no pattern fail the test, and so does a pattern that
matched none, unless the mark has `sometimes=True`: whether the error occurs then depends on timing or on the machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from kvbm.strict import VARIABLE

DIRECTORY = pytest.StashKey[Path]()
PASSED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Switch strict mode on, for this process and the children that it starts."""
    config.addinivalue_line(
        "markers", "swallows(pattern, sometimes=False): expects that our code swallows this error"
    )
    directory = Path(tempfile.mkdtemp(prefix="kvbm-swallowed-"))
    directory.chmod(0o1777)  # children may be of other users
    config.stash[DIRECTORY] = directory
    os.environ[VARIABLE] = str(directory)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Processes that outlive this one find no directory, and record nothing."""
    shutil.rmtree(config.stash[DIRECTORY], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember whether the test passed: one that was skipped or failed may not have come to what it expects."""
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Compare the errors that were swallowed since the last test with those that the test expects."""
    try:
        yield
    finally:
        records = take_records(item.config.stash[DIRECTORY])
    marks = list(item.iter_markers("swallows"))
    seen = [[mark for mark in marks if re.search(mark.args[0], record["error"])] for record in records]
    unexpected = [record for record, matching in zip(records, seen, strict=True) if not matching]
    if unexpected:
        errors = ", ".join(sorted({record["error"] for record in unexpected}))
        tracebacks = [record["traceback"] for record in unexpected]
        pytest.fail(
            "\n".join((f"our code swallowed {errors} (see rigs/swallowed.py)", *tracebacks)), pytrace=False
        )
    if not item.stash.get(PASSED, False):
        return
    for mark in marks:
        if not mark.kwargs.get("sometimes") and not any(mark in matching for matching in seen):
            pytest.fail(f"our code swallowed no error that matches {mark.args[0]!r}", pytrace=False)


def take_records(directory: Path) -> list[dict[str, str]]:
    """The records that are complete, oldest first; they are removed."""
    records = []
    for path in sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        records.append(json.loads(path.read_text()))
        path.unlink()
    return records

"""Strict mode: what our code swallows fails the test that ran it, from any thread and any process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rigs.checkout import ROOT

TESTS = """
import logging
import subprocess
import sys
import threading

import pytest

from kvbm.guard import Guard
from kvbm.strict import record_swallowed

SWALLOW = "from kvbm.strict import record_swallowed; record_swallowed(KeyError('child'))"


def fail() -> None:
    raise IndexError("planted")


def test_guard() -> None:
    assert Guard(logging.getLogger()).call("other", fail) == "other"


def test_nothing_is_swallowed() -> None:
    pass


def test_thread() -> None:
    thread = threading.Thread(target=record_swallowed, args=(OSError("thread"),))
    thread.start()
    thread.join()


def test_child() -> None:
    subprocess.run([sys.executable, "-c", SWALLOW], check=True)


@pytest.fixture
def late():
    yield
    record_swallowed(OSError("teardown"))


def test_teardown(late: None) -> None:
    pass


@pytest.mark.swallows("^IndexError: planted$")
def test_expected() -> None:
    Guard(logging.getLogger()).call(None, fail)


@pytest.mark.swallows("KeyError: planted")
def test_another_was_expected() -> None:
    Guard(logging.getLogger()).call(None, fail)


@pytest.mark.swallows("IndexError")
def test_expected_in_vain() -> None:
    pass


@pytest.mark.swallows("IndexError", sometimes=True)
def test_expected_sometimes() -> None:
    pass


@pytest.mark.swallows("IndexError")
def test_skipped() -> None:
    pytest.skip("not here")
"""
FAILING = {
    "test_guard": "IndexError: planted",
    "test_thread": "OSError: thread",
    "test_child": "KeyError: 'child'",
    "test_teardown": "OSError: teardown",
    "test_another_was_expected": "IndexError: planted",
    "test_expected_in_vain": "no error that matches 'IndexError'",
}


def test_a_swallowed_error_fails_the_test_that_ran_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["rigs.swallowed"]')
    (tmp_path / "test_planted.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}")
    command = [sys.executable, "-m", "pytest", "-rE", "test_planted.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    errors = [line for line in run.stdout.splitlines() if line.startswith("ERROR test_planted.py::")]
    assert [line.split("::")[1].split()[0] for line in errors] == list(FAILING), run.stdout + run.stderr
    for text in FAILING.values():
        assert text in run.stdout

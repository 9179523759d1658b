"""`make unit`: which tests a word stands for."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

from rigs.checkout import ROOT

SCRIPTS = ROOT / "scripts"

pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="a source distribution has no scripts")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("unit_tests")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("policy", ["tests/unit/policy"]),
        ("tiers/disk", ["tests/unit/tiers/disk"]),
        ("fault", ["tests/fault"]),
        ("tests/unit/test_tidy.py", ["tests/unit/test_tidy.py"]),
        ("runtime_dir", ["tests/unit/test_runtime_dir.py"]),
        ("nothing-of-that-name", []),
        ("tests/nothing", []),
        (f"{ROOT}/tests/fault", ["tests/fault"]),
        ("/nothing", []),
        ("src", []),
    ],
)
def test_a_word_stands_for_folders_or_files(script: ModuleType, word: str, expected: list[str]) -> None:
    assert [path.relative_to(ROOT).as_posix() for path in script.named(word)] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], []),
        (["scripts", "-q"], ["tests/unit/scripts", "-q"]),
        (["-k", "policy"], ["-k", "policy"]),
        (["tests/fault", "docs", "-k", "x", "-x"], ["tests/fault", "tests/unit/docs", "-k", "x", "-x"]),
    ],
)
def test_what_pytest_is_started_with(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: list[str]
) -> None:
    started: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 5)

    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.main(arguments) == 5
    (command,) = started
    assert command[:5] == [sys.executable, "-m", "pytest", "-m", "not engine and not dynamo and not sglang"]
    assert [word.removeprefix(f"{ROOT}/") for word in command[5:]] == expected


def test_a_word_that_stands_for_nothing_is_one_line(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["polcy", "-x"]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "make unit ARGS=polcy: no folder of that name below tests, and no file with it in its name"
    ]

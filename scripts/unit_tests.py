"""The tests that start no engine: all of them, or those of one part of the project.

make unit                       all of them
make unit ARGS=policy           those in folders of that name, as tests/unit/policy
make unit ARGS=tiers/disk       those in such a folder
make unit ARGS=staging          no such folder: those in files of such a name
make unit ARGS="policy -k lru"  what begins with a dash goes to pytest, with all that follows
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"


def named(word: str, tests: Path = TESTS) -> list[Path]:
    """A path, absolute or from `tests/` on; else the folders of that name; else the test files with it in theirs."""
    if word.startswith(("tests/", "/")):
        return [path for path in [tests.parent / word] if path.exists()]
    folders = [path for path in sorted(tests.rglob(word)) if path.is_dir()]
    return folders or sorted(tests.rglob(f"test_*{word}*.py"))


def main(arguments: list[str]) -> int:
    """Pytest's status, or 2 for a word that names no test."""
    words = arguments[
        : next((i for i, argument in enumerate(arguments) if argument[0] == "-"), len(arguments))
    ]
    paths = {word: named(word) for word in words}
    for word in (word for word, found in paths.items() if not found):
        print(f"make unit ARGS={word}: no folder of that name below tests, and no file with it in its name")
        return 2
    chosen = [str(path) for found in paths.values() for path in found]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "not engine and not dynamo and not sglang",
        *chosen,
        *arguments[len(words) :],
    ]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""On a machine without the servers, the browser and the compiler that tests use, tests are skipped; nothing fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from rigs.checkout import ROOT
from rigs.system_packages import PACKAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TESTS = ROOT / "tests"
RIGS = ("blob_services", "browser", "libcuda", "namespaces", "prometheus", "services", "system_packages")
"""What starts a program, in `tests/rigs`."""
NEEDS_A_PROGRAM = re.compile(
    rf"\b(rigs(\.| import )({'|'.join(RIGS)})|libcuda_path|torch_cuda|shutil\.which)\b"
)
"""An import of these, a fixture over one of them, or a search of the test's own."""
HIDDEN_LIBRARY = "libibverbs.so.1"
ELSEWHERE = ("engine", "under_dynamo", "under_sglang")
WITH_AN_ENGINE = "tests/engine/test_remote.py::test_what_one_node_computes_another_hits[mooncake]"


def files_that_need_programs() -> list[Path]:
    """Test files that start no engine and need a program."""
    return [
        path
        for path in sorted(TESTS.rglob("test_*.py"))
        if path.relative_to(TESTS).parts[0] not in ELSEWHERE
        and path != Path(__file__)
        and NEEDS_A_PROGRAM.search(path.read_text())
    ]


def without_programs(directory: Path) -> dict[str, str]:
    """An environment whose PATH has all programs but those of PACKAGES, and in which no libibverbs can be loaded."""
    programs, libraries = directory / "bin", directory / "lib"
    programs.mkdir()
    libraries.mkdir()
    (libraries / HIDDEN_LIBRARY).touch()
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).glob("*") if Path(folder).is_dir() else ():
            if program.name not in PACKAGES and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    return {**os.environ, "PATH": str(programs), "LD_LIBRARY_PATH": str(libraries)}


def test_every_rig_that_looks_for_a_program_is_in_the_list() -> None:
    folders = [path.relative_to(TESTS / "rigs") for path in (TESTS / "rigs").rglob("*.py")]
    looking = re.compile(r"\bsystem_packages\b|shutil\.which")
    found = {
        path.parts[0].removesuffix(".py")
        for path in folders
        if looking.search((TESTS / "rigs" / path).read_text())
    }
    assert found == set(RIGS)


def test_tests_without_their_programs_are_skipped_with_the_command_that_installs_them(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    files = [*map(str, files_that_need_programs()), WITH_AN_ENGINE]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    ended = subprocess.run(
        [*words, *files], cwd=ROOT, env=without_programs(tmp_path), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    reasons = [skip.get("message", "") for skip in ElementTree.parse(report).getroot().iter("skipped")]
    commands = {match for reason in reasons for match in re.findall(r"\(apt-get install (.+)\)", reason)}
    programs = {name for name in PACKAGES if not name.startswith("/") and ".so" not in name}
    # Chromium is missed before its driver.
    assert commands == {PACKAGES[name] for name in programs} - {"chromium-driver"} | {"libibverbs1"}

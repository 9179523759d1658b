"""The lines that the troubleshooting page explains are lines that the software writes."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from rigs.checkout import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="a source distribution has no docs")

PAGE = ROOT / "docs/operating/troubleshooting.md"
GAP = "…"
_CONVERSION = re.compile(r"%[-+ #0-9.]*[a-zA-Z]")


def templates(source: str) -> Iterator[str]:
    """Every text in a module, with a gap for each part that is filled in."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _CONVERSION.sub(GAP, node.value)


@functools.cache
def written() -> str:
    """All texts of the software."""
    paths = sorted((ROOT / "src").rglob("*.py"))
    return "\n".join(text for path in paths for text in templates(path.read_text()))


def explained(page: str) -> list[str]:
    """The lines that the tables under `Lines of the log` begin with."""
    section = page.partition("## Lines of the log")[2].partition("\n## Clean-up")[0]
    cells = [
        line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")
    ]
    return [quoted for cell in cells for quoted in re.findall(r"``? ?(.+?) ?``?(?:,|$)", cell)]


def unwritten(line: str) -> list[str]:
    """The fixed parts of a line that the software writes nowhere. `SettingsError` joins what is before and after."""
    fixed = [part.strip(" :;,.") for part in re.split(f"{GAP}|(?<=cannot be used): ", line)]
    return [part for part in fixed if part and part not in written()]


def test_every_line_is_written_by_the_software() -> None:
    lines = explained(PAGE.read_text())
    assert len(lines) > 70
    assert {line: unwritten(line) for line in lines if unwritten(line)} == {}


def test_a_line_that_nothing_writes_is_found() -> None:
    page = "## Lines of the log\n| line | cure |\n| `the moon is … full`, `disk tier is off: …` | wait |\n"
    assert [unwritten(line) for line in explained(page)] == [["the moon is"], []]

"""Links between pages lead somewhere: files are there, and so are the headings that anchors name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rigs.checkout import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="a source distribution has no docs")

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```", re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Links of a page, other than those to the network, that lead nowhere."""
    for link in _LINK.findall(_CODE.sub("", text)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page: Path) -> None:
    assert list(dead_links(page, page.read_text())) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# What it is, and `why`\n```\n# no heading\n```\n")
    text = "[a](there.md#what-it-is-and-why) [b](there.md#no-heading) [c](gone.md) [d](#e) [f](https://example.org)\n"
    (tmp_path / "page.md").write_text(text)
    assert list(dead_links(tmp_path / "page.md", text)) == ["there.md#no-heading", "gone.md", "#e"]

"""Defaults of the library agree with the settings, or the decision page says why they do not."""

from __future__ import annotations

import inspect

import pytest

from kvbm.library.block_manager import BlockManager
from kvbm.settings import Settings, parse_size
from rigs.checkout import ROOT

PAGE = ROOT / "docs/decisions/0020-defaults.md"

FIELDS = {
    "host": "host_bytes",
    "disk": "disk_bytes",
    "disk_dir": "disk_dir",
    "eviction": "eviction",
    "disk_admission": "disk_admission",
    "disk_write_budget": "disk_write_budget_bytes",
    "staging": "staging_bytes",
}
"""Arguments of `BlockManager` that say what a setting says."""

DIFFERENT = {"host": "host memory", "disk_admission": "`disk_admission`"}
"""The defaults that may differ, and their names on the page."""


def defaults(function) -> dict[str, object]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def different(library: dict[str, object], settings: Settings) -> set[str]:
    """The arguments whose default is not that of the setting; sizes are compared in bytes."""
    found = set()
    for argument, field in FIELDS.items():
        ours, theirs = library[argument], getattr(settings, field)
        if isinstance(ours, str) and isinstance(theirs, int):
            ours = parse_size(argument, ours)
        if ours != theirs:
            found.add(argument)
    return found


@pytest.mark.skipif(not PAGE.exists(), reason="a source distribution has no docs")
def test_defaults_of_library_and_manager_agree_but_for_what_the_page_explains():
    library = defaults(BlockManager.__init__)
    assert different(library, Settings()) == set(DIFFERENT)
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for argument, called in DIFFERENT.items():
        (row,) = [row for row in rows if row.startswith(f"| {called} |")]
        assert str(library[argument]).replace("GB", " GB") in row.split("|")[3]


def test_a_default_that_differs_is_found():
    library = defaults(BlockManager.__init__)
    assert "eviction" in different({**library, "eviction": "lru"}, Settings())
    assert "staging" in different({**library, "staging": "1GB"}, Settings())

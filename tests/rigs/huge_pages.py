"""What a process asked of the kernel about huge pages, as the kernel tells it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

THP = Path("/sys/kernel/mm/transparent_hugepage")
needs_huge_pages = pytest.mark.skipif(not THP.exists(), reason="a kernel without huge pages takes no advice")

WANTED, REFUSED = "hg", "nh"
_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")


def advised(pid: int | str = "self") -> dict[str, str]:
    """The writable mappings of host memory, and the advice of each: WANTED, REFUSED, or empty."""
    found: dict[str, str] = {}
    mapping = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if _HEADER.match(line):
            place, access, _, _, inode, *name = line.split()
            ours = access.startswith("rw") and name[:1] == ["/memfd:kvbm-region-0"]
            mapping = f"{place} {inode}" if ours else ""
        elif mapping and line.startswith("VmFlags:"):
            found[mapping] = next((flag for flag in line.split() if flag in (WANTED, REFUSED)), "")
    return found


def advice(pid: int | str = "self", besides: Mapping[str, str] | None = None) -> set[str]:
    """The advice of a process's mappings of host memory, `besides` those that another test may have left."""
    return {flag for mapping, flag in advised(pid).items() if mapping not in (besides or {})}

"""Pages below a real manager that the test runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it needs torch, and some Pythons that run these tests have none
    from rigs.kept_pages import KeptHouse


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptHouse]:
    from rigs.kept_pages import KeptHouse

    house = KeptHouse(tmp_path, monkeypatch)
    yield house
    house.close()


@pytest.fixture
def disk_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptHouse]:
    """Its disk tier holds host slots until a test lets its writes end."""
    from rigs.kept_pages import KeptHouse

    house = KeptHouse(tmp_path, monkeypatch, disk=True)
    yield house
    house.close()

"""A device whose copies end when the test says so, the line to its manager, and a mover over both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # they need torch, which some tests of the worker do without
    from kvbm.worker.mover import Mover
    from rigs.copies_beside import Device, Line


@pytest.fixture
def device() -> Device:
    from rigs.copies_beside import Device

    return Device()


@pytest.fixture
def line() -> Iterator[Line]:
    from rigs.copies_beside import Line

    line = Line()
    yield line
    line.close()


@pytest.fixture
def mover(device: Device, line: Line) -> Mover:
    from rigs.copies_beside import Finder, make_mover

    return make_mover(Finder(line), device)

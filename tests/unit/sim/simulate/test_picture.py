"""The pictures of `kvbm simulate`."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from kvbm.sim.serving.machine import Machine
from kvbm.sim.simulate import picture
from kvbm.sim.simulate.simulation import Simulation, run
from kvbm.sim.simulate.sizes import parse_sizes

PANEL_PIXELS = (int(picture.HEIGHT_IN * picture.DPI), int(picture.PANEL_IN * picture.DPI))


@pytest.mark.slow
@pytest.mark.parametrize("machine", [None, Machine(0)], ids=["hit rates", "times"])
def test_a_picture(tmp_path: Path, machine: Machine | None) -> None:
    plan = Simulation(
        traces=["synthetic"],
        policies=["lru", "gittins"] if machine else ["lru", "gittins", "belady"],
        host=parse_sizes("--host", "2%,100MB,2000blocks"),
        bytes_per_token=1024,
        curve=True,
        machine=machine,
    )
    document = run(plan, lambda what, total: lambda requests: None)
    assert picture.draw(document, tmp_path / "p.png")
    image = matplotlib.image.imread(tmp_path / "p.png")
    assert image.shape[:2] == PANEL_PIXELS
    assert image.min() < 0.3
    # Nothing half-written is left behind.
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]


def test_a_policy_of_a_package_gets_a_colour_of_its_own() -> None:
    colours = picture._colours(["lru", "theirs", "others", "lru"])
    assert list(colours) == ["lru", "theirs", "others"]
    assert len(set(colours.values())) == 3

"""Which tiers the metrics of a manager name: those that it was started with."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rigs.manager_probe import SharedManager

HOST = ("--host-blocks", "8")
DISK = ("--disk-blocks", "32")


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as ends:
        yield ends


@pytest.mark.parametrize(
    ("options", "tiers"),
    [(HOST, {"host"}), (DISK, {"disk"}), (HOST + DISK, {"host", "disk"})],
    ids=["host", "disk", "both"],
)
def test_series_are_of_the_tiers_that_there_are(
    tmp_path: Path, ends: contextlib.ExitStack, options: tuple[str, ...], tiers: set[str]
) -> None:
    if DISK[0] in options:
        options += ("--disk-dir", str(tmp_path / "disk"))
    manager = SharedManager(tmp_path, str(tmp_path / "m.sock"), *options)
    ends.callback(manager.close)
    series = manager.metrics()
    assert {tier for name in series for tier in re.findall(r'\btier="(\w+)"', name)} == tiers
    for name in ("kvbm_offload_blocks_h2d", "kvbm_disk_cache_hit_rate", "kvbm_object_read_failures"):
        assert series[name] == 0, "the original's are always there"

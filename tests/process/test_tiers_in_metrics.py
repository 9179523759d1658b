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
REMOTE = ("--remote",)


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as ends:
        yield ends


@pytest.mark.parametrize(
    ("options", "tiers"),
    [
        (HOST, {"host"}),
        (DISK, {"disk"}),
        (HOST + DISK, {"host", "disk"}),
        (HOST + REMOTE, {"host", "remote"}),
    ],
    ids=["host", "disk", "both", "remote"],
)
def test_series_are_of_the_tiers_that_there_are(
    tmp_path: Path, ends: contextlib.ExitStack, options: tuple[str, ...], tiers: set[str]
) -> None:
    if DISK[0] in options:
        options += ("--disk-dir", str(tmp_path / "disk"))
    if REMOTE[0] in options:
        options += (f"file://{tmp_path}",)
    manager = SharedManager(tmp_path, str(tmp_path / "m.sock"), *options)
    ends.callback(manager.close)
    series = manager.metrics()
    assert {tier for name in series for tier in re.findall(r'\btier="(\w+)"', name)} == tiers
    for name in ("kvbm_offload_blocks_h2d", "kvbm_disk_cache_hit_rate", "kvbm_object_read_failures"):
        assert series[name] == 0, "the original's are always there"
    assert any(name.startswith("kvbm_remote_") for name in series) == ("remote" in tiers)

"""`kvbm disk`: what it prints, what it exits with, and that it leaves owners alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbm.cli.disk import app
from kvbm.errors import SettingsError
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE, OTHER_NAMESPACE, load, make_key, store
from kvbm.tiers.disk.geometry import RECORD_BYTES
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier

runner = CliRunner()


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[DiskTier]:
    """One directory left behind with four blocks, and one in use with two of eight."""
    left = open_disk_tier(tmp_path, LAYOUT, OTHER_NAMESPACE, capacity_blocks=4)
    for slot in range(4):
        store(left, LAYOUT, make_key(slot), slot)
    left.close(keep=True)
    tier = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=8)
    for slot in range(2):
        store(tier, LAYOUT, make_key(slot), slot)
    yield tier
    tier.close(keep=False)


def left_path(root: Path) -> Path:
    return next(path for path in root.iterdir() if OTHER_NAMESPACE.short in path.name)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(LAYOUT.block_bytes + 5)
        file.write(b"?")


def test_ls_tells_model_blocks_bytes_and_owner(tmp_path: Path, owned: DiskTier) -> None:
    result = runner.invoke(app, ["ls", str(tmp_path), "--json"])
    assert result.exit_code == 0
    found = {entry["namespace"]: entry for entry in json.loads(result.stdout)["directories"]}
    mine, left = found[NAMESPACE.short], found[OTHER_NAMESPACE.short]
    assert (mine["slots_used"], mine["slots_total"], mine["locked"], mine["pid"]) == (2, 8, True, os.getpid())
    assert (left["slots_used"], left["slots_total"], left["locked"], left["pid"]) == (4, 4, False, None)
    assert mine["model"] == "contract/model"
    assert mine["fields"]["weights"] == "0123"
    assert 8 * LAYOUT.block_bytes < mine["medium_bytes"] < 8 * LAYOUT.block_bytes + 50_000
    text = runner.invoke(app, ["ls", str(tmp_path)]).stdout
    for word in (NAMESPACE.short, "contract/model", f"pid {os.getpid()}", "25%", "100%"):
        assert word in text
    assert "\x1b" not in text


def test_verify_is_content_with_sound_blocks(tmp_path: Path, owned: DiskTier) -> None:
    result = runner.invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 0
    assert "All 6 verified blocks are sound." in result.stdout
    report = json.loads(runner.invoke(app, ["verify", str(tmp_path), "--json"]).stdout)
    assert report["corrupt"] == 0
    assert sum(entry["verified"] for entry in report["directories"]) == 6


@pytest.mark.parametrize("name", ["slab-000", "journal"])
def test_verify_names_what_is_corrupt(tmp_path: Path, owned: DiskTier, name: str) -> None:
    path = left_path(tmp_path) / name
    if name == "journal":
        with path.open("r+b") as file:
            file.seek(RECORD_BYTES + 40)
            file.write(b"??")
    else:
        flip(path)
    result = runner.invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 1
    assert "1 corrupt" in result.stdout
    report = json.loads(runner.invoke(app, ["verify", str(left_path(tmp_path)), "--json"]).stdout)
    assert report["corrupt"] == 1
    assert [entry["corrupt_slots"] for entry in report["directories"]] == [[1]]
    assert [entry["verified"] for entry in report["directories"]] == [3]


def test_a_slab_that_is_gone_is_corrupt(tmp_path: Path, owned: DiskTier) -> None:
    (left_path(tmp_path) / "slab-000").unlink()
    report = runner.invoke(app, ["verify", str(tmp_path), "--json"])
    assert report.exit_code == 1
    assert json.loads(report.stdout)["corrupt"] == 4


def test_clear_removes_what_nobody_owns_and_refuses_the_rest(tmp_path: Path, owned: DiskTier) -> None:
    left = left_path(tmp_path)
    result = runner.invoke(app, ["clear", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [f"removed {left}"]
    assert result.stderr.splitlines() == [f"kept {owned.path}: in use by process {os.getpid()}"]
    assert not left.exists()
    assert load(owned, LAYOUT, make_key(0), 0).bytes_moved
    owned.close(keep=True)
    assert owned.path is None
    assert runner.invoke(app, ["clear", str(tmp_path)]).exit_code == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_nothing_there_and_no_directory(tmp_path: Path, command: str) -> None:
    result = runner.invoke(app, [command, str(tmp_path)])
    assert result.exit_code == 0
    assert "No cache directories" in result.stdout
    for extra in ([], ["--json"]):
        result = runner.invoke(app, [command, str(tmp_path / "absent"), *extra])
        assert result.stdout == ""
        assert isinstance(result.exception, SettingsError), "which the command line prints in one line"
        assert "absent" in str(result.exception)


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_directory_that_cannot_be_read_is_shown_as_such(
    tmp_path: Path, owned: DiskTier, command: str
) -> None:
    meta = left_path(tmp_path) / "meta.json"
    for content in (meta.read_text().replace('"format": 2', '"format": 1'), "{"):
        meta.write_text(content)
        result = runner.invoke(app, [command, str(tmp_path)])
        assert result.exit_code == 0
        assert "unreadable" in result.stdout


def test_the_groups_of_blocks_are_shown_to_programs(tmp_path: Path, owned: DiskTier) -> None:
    store(owned, LAYOUT, make_key(5), 5, group=3)
    entries = json.loads(runner.invoke(app, ["ls", str(tmp_path), "--json"]).stdout)["directories"]
    assert {entry["namespace"]: entry["groups"] for entry in entries} == {
        NAMESPACE.short: [0, 3],
        OTHER_NAMESPACE.short: [0],
    }

"""The digest of a model's weights: other weights under the same path never have the same one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbm import weights
from kvbm.weights import changed_since, process_start_s, weight_files, weights_digest

YEAR_2020 = 1_577_836_800


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name, content in {
        "model-1.safetensors": b"a" * 5000,
        "model-2.safetensors": b"b" * 5000,
        "config.json": b"{}",
        "README.md": b"hello",
    }.items():
        (path / name).write_bytes(content)
    return path


def digest(model: Path) -> str | None:
    return weights_digest([model], model.parent / "memo.json")


def test_content_decides_not_the_path(model: Path, tmp_path: Path) -> None:
    before = digest(model)
    assert before is not None
    (model / "README.md").write_text("other words")
    assert digest(model) == before
    for name in ("model-2.safetensors", "config.json"):
        old = (model / name).read_bytes()
        (model / name).write_bytes(old[:-1] + b"X")
        assert digest(model) != before
        (model / name).write_bytes(old)
        assert digest(model) == before
    moved = tmp_path / "elsewhere"
    model.rename(moved)
    assert weights_digest([moved], tmp_path / "memo.json") == before


def test_two_files_that_change_places_are_another_model(model: Path) -> None:
    before = digest(model)
    one, two = model / "model-1.safetensors", model / "model-2.safetensors"
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert digest(model) != before


def test_a_place_without_weights_has_no_digest(model: Path, tmp_path: Path) -> None:
    assert digest(tmp_path / "absent") is None
    for path in model.glob("*.safetensors"):
        path.unlink()
    assert digest(model) is None


def test_a_single_file_is_a_model_too(model: Path) -> None:
    path = model / "model-1.safetensors"
    assert weight_files(path) == [path]
    assert weights_digest([path], model.parent / "memo.json") is not None


def test_a_file_that_has_settled_is_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SETTLED_S", -1.0)
    before = digest(model)
    monkeypatch.setattr(weights, "blake3", None)
    assert digest(model) == before


def test_a_file_that_has_just_changed_is_read_again(model: Path) -> None:
    """Its times may not move with the next change."""
    before = digest(model)
    path = model / "model-1.safetensors"
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"Z")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(model) != before


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"a": 1}'])
def test_a_memo_that_cannot_be_read_only_costs_time(model: Path, content: bytes) -> None:
    before = digest(model)
    (model.parent / "memo.json").write_bytes(content)
    assert digest(model) == before


def test_a_memo_that_cannot_be_written_only_costs_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_SETTLED_S", -1.0)
    (tmp_path / "file").write_text("no directory")
    assert weights_digest([model], tmp_path / "file" / "memo.json") == digest(model)


def test_files_younger_than_a_moment_are_found(model: Path) -> None:
    newest_s = max(path.stat().st_ctime for path in weight_files(model))
    assert changed_since([model], newest_s + 0.001) is None
    later_s = newest_s + 3600
    os.utime(model / "model-2.safetensors", (later_s, later_s))
    assert changed_since([model], newest_s + 1800) == model / "model-2.safetensors"
    assert changed_since([model], 0.0) == model / "config.json"


def test_a_process_knows_when_it_began() -> None:
    began_s = process_start_s()
    assert time.time() - 24 * 3600 < began_s <= time.time()
    child = subprocess.run(
        [sys.executable, "-c", "from kvbm.weights import process_start_s; print(process_start_s())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert began_s <= float(child.stdout) <= time.time()

"""The digest of a model's weights: other weights under the same path never have the same one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from itertools import chain, repeat
from pathlib import Path

import blake3
import pytest

from kvbm import weights, weights_memo
from kvbm.weights import changed_since, digest_by, open_memo, process_start_s, weight_files, weights_digest
from rigs.other_user import NOBODY


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
    monkeypatch.setattr(weights_memo, "_SETTLED_S", -1.0)
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
    monkeypatch.setattr(weights_memo, "_SETTLED_S", -1.0)
    (tmp_path / "file").write_text("no directory")
    assert weights_digest([model], tmp_path / "file" / "memo.json") == digest(model)


FALSE = "f" * 64
"""A digest that no file has: what somebody who can write to the memo would have us believe."""


def test_a_memo_with_words_for_digests_only_costs_time(model: Path) -> None:
    before = digest(model)
    lying_memo(model, model.parent / "memo.json", "not a digest")
    assert digest(model) == before


def lying_memo(model: Path, path: Path, lie: str = FALSE) -> None:
    """A memo that gives every file of the model a false digest."""
    entries = {}
    for file in weight_files(model):
        status = file.stat()
        times = f"{status.st_mtime_ns}:{status.st_ctime_ns}"
        entries[f"2:{status.st_dev}:{status.st_ino}:{status.st_size}:{times}"] = lie
    path.write_text(json.dumps(entries))
    path.chmod(0o600)


def behind_a_link(memo: Path) -> None:
    memo.rename(memo.with_name("target"))
    memo.symlink_to(memo.with_name("target"))


def in_a_linked_directory(memo: Path) -> None:
    memo.parent.rename(memo.parent.with_name("elsewhere"))
    memo.parent.symlink_to(memo.parent.with_name("elsewhere"))


PLANTED = {
    "a link": behind_a_link,
    "behind a link": in_a_linked_directory,
    "a group's": lambda memo: memo.chmod(0o660),
    "in a group's directory": lambda memo: memo.parent.chmod(0o770),
    "in anybody's directory": lambda memo: memo.parent.chmod(0o1777),
}
if os.geteuid() == 0:
    PLANTED["another user's"] = lambda memo: os.chown(memo, NOBODY, NOBODY)
    PLANTED["in another user's directory"] = lambda memo: os.chown(memo.parent, NOBODY, NOBODY)


@pytest.mark.parametrize("how", PLANTED)
def test_a_planted_memo_is_neither_believed_nor_touched(
    how: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(weights_memo, "_SETTLED_S", -1.0)
    right = weights_digest([model], tmp_path / "fresh" / "memo.json")
    memo = tmp_path / "run" / "memo.json"
    memo.parent.mkdir(mode=0o700)
    lying_memo(model, memo)
    content = memo.read_text()
    believed = weights_digest([model], memo)
    assert believed != right, "a memo of ours is believed: the lie is one that would be noticed"
    PLANTED[how](memo)
    for _ in range(2):
        assert weights_digest([model], memo) == right
    assert memo.read_text() == content
    assert len(list(memo.parent.iterdir())) == len({memo.name, memo.resolve().name})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert str(memo) in said[0]


def test_a_memo_is_for_its_owner_alone(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_memo, "_SETTLED_S", -1.0)
    before = os.umask(0)
    try:
        weights_digest([model], tmp_path / "run" / "memo.json")
    finally:
        os.umask(before)
    assert sorted(os.listdir(tmp_path / "run")) == ["memo.json", "memo.lock"], (
        "nothing is left of how it was written"
    )
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    for name in ("memo.json", "memo.lock"):
        assert (tmp_path / "run" / name).stat().st_mode & 0o777 == 0o600


TENSOR_BYTES = 9_000_000
"""More than are read in one piece beside a load, and from so many on all processors are used otherwise."""


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    """A safetensors file of two tensors, and some bytes that belong to none."""
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": [start, start + TENSOR_BYTES]}
            for name, start in (("a", 0), ("b", TENSOR_BYTES + 1))
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    content = random.Random(1).randbytes(2 * TENSOR_BYTES + 1)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)
    return path


def test_digests_beside_a_load_are_the_same(tensors: Path, model: Path, tmp_path: Path) -> None:
    for location in (tensors, model):
        memo = open_memo(tmp_path / "beside.json", beside=lambda: True)
        assert digest_by(memo, [location]) == digest(location)


def test_the_digest_of_a_checkpoint_is_the_same_for_ever(tensors: Path) -> None:
    """Blocks on disk are found by it."""
    assert digest(tensors) == "47f684b68a0750ca356e097b7c9a85c11709a08acdef1301c0e668536af28185"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each digest that is begun, in how many threads it is made. This machine has four processors."""
    begun: list[int] = []

    def noting(max_threads: int) -> blake3.blake3:
        begun.append(max_threads)
        return blake3.blake3(max_threads=max_threads)

    noting.AUTO = blake3.blake3.AUTO  # type: ignore[attr-defined]
    monkeypatch.setattr(weights, "blake3", noting)
    monkeypatch.setattr(weights, "_processors", lambda: 4)
    return begun


@pytest.mark.parametrize(
    ("piece_bytes", "pieces_beside", "anew"),
    [(2_000_000, 2, True), (2_000_000, 4, False), (TENSOR_BYTES, 1, False)],
    ids=["most of it is left", "little of it is left", "nothing of it is left"],
)
def test_a_load_that_ends_while_a_tensor_is_read(
    piece_bytes: int,
    pieces_beside: int,
    anew: bool,
    tensors: Path,
    tmp_path: Path,
    threads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread works beside the load. From its end on all do, unless the thread is done sooner."""
    right = digest(tensors)
    threads.clear()
    monkeypatch.setattr(weights, "_PIECE_BYTES", piece_bytes)
    loading = chain(repeat(True, pieces_beside), repeat(False))
    memo = open_memo(tmp_path / "beside.json", beside=lambda: next(loading))
    assert digest_by(memo, [tensors]) == right
    first, second = [1, blake3.blake3.AUTO] if anew else [1], [1, blake3.blake3.AUTO]
    assert threads == first + second


def test_a_load_that_ends_while_a_file_of_another_form_is_read(
    tmp_path: Path, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(random.Random(2).randbytes(TENSOR_BYTES))
    right = digest(path)
    threads.clear()
    monkeypatch.setattr(weights, "_PIECE_BYTES", 1_000_000)
    loading = chain(repeat(True, 3), repeat(False))
    memo = open_memo(tmp_path / "beside.json", beside=lambda: next(loading))
    assert digest_by(memo, [path]) == right
    assert threads == [1, blake3.blake3.AUTO]


def test_a_file_that_is_cut_off_while_it_is_read_beside_a_load_is_an_error(
    tensors: Path, tmp_path: Path
) -> None:
    """A mapped one would end the process."""

    def cut_off() -> bool:
        os.truncate(tensors, 1000)
        return True

    with pytest.raises(OSError, match="cut off"):
        digest_by(open_memo(tmp_path / "memo.json", beside=cut_off), [tensors])


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

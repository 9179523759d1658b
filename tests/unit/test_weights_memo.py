"""Several processes need the digests of the same files: each is made once, and nobody waits for ever."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from kvbm import weights_memo
from kvbm.byte_locks import ByteLocks, LockBusy
from kvbm.clock import ManualClock
from kvbm.weights_memo import WAIT_S, WeightsMemo
from rigs.other_user import NOBODY, needs_root

HOLDER = """
import hashlib, sys
from pathlib import Path
from kvbm import weights_memo

weights_memo._SETTLED_S = -1.0

def make(file, name):
    print(name, flush=True)
    sys.stdin.readline()
    return hashlib.sha256(file.read()).hexdigest()

memo, *files = map(Path, sys.argv[1:])
weights_memo.WeightsMemo(memo, make).digests(files)
print("done", flush=True)
"""
"""Another process that makes digests: it says which one it makes, and goes on when it gets a line."""


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_memo, "_SETTLED_S", -1.0)


@pytest.fixture
def memo_path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run" / "weights.json"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.write_text(f"the content of {path.name}")
    return paths


@pytest.fixture
def holder(memo_path: Path, files: list[Path]) -> Iterator[subprocess.Popen[str]]:
    """The other process; it has begun with the first file, and holds that file's lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(memo_path), *map(str, files)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert heard(process) == "one"
        yield process
        process.kill()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


class Maker:
    """Makes digests and notes of which files."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, file: BinaryIO, name: str) -> str:
        self.made.append(name)
        return hashlib.sha256(file.read()).hexdigest()


def nobody_waits(_: float) -> None:
    raise AssertionError("nobody should wait here")


def remembers(path: Path, files: list[Path]) -> bool:
    """Whether a process that starts now finds all of them."""
    maker = Maker()
    WeightsMemo(path, maker, sleep=nobody_waits).digests(files)
    return not maker.made


def right(files: list[Path]) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def test_two_processes_make_each_digest_once(
    holder: subprocess.Popen[str], memo_path: Path, files: list[Path]
) -> None:
    maker, others = Maker(), list[str]()

    def while_we_wait(_: float) -> None:
        if not others:
            go_on(holder)
            others.append(heard(holder))

    found = WeightsMemo(memo_path, maker, sleep=while_we_wait).digests(files)
    assert found == right(files)
    assert maker.made == ["two"], "the file that nobody held"
    assert others == ["done"], "the other one found it there, after its own"


def test_a_digest_is_there_for_others_as_soon_as_it_is_made(
    holder: subprocess.Popen[str], memo_path: Path, files: list[Path]
) -> None:
    go_on(holder)
    assert heard(holder) == "two"
    assert remembers(memo_path, files[:1])


def test_a_holder_that_is_killed_holds_nobody_up(
    holder: subprocess.Popen[str], memo_path: Path, files: list[Path]
) -> None:
    maker = Maker()

    def while_we_wait(_: float) -> None:
        holder.kill()
        holder.wait()

    assert WeightsMemo(memo_path, maker, sleep=while_we_wait).digests(files) == right(files)
    assert sorted(maker.made) == ["one", "two"]


def test_a_holder_that_hangs_is_waited_for_so_long_and_no_longer(
    holder: subprocess.Popen[str], memo_path: Path, files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    maker, clock = Maker(), ManualClock()
    memo = WeightsMemo(memo_path, maker, clock, clock.advance)
    assert memo.digests(files) == right(files)
    assert maker.made == ["two", "one"]
    assert WAIT_S <= clock() < WAIT_S + 1
    assert str(files[0]) in caplog.text


def test_all_waits_of_a_memo_together_are_bounded(
    holder: subprocess.Popen[str], memo_path: Path, files: list[Path]
) -> None:
    """As for a model and its draft model, whose files are asked for one location after the other."""
    maker, clock = Maker(), ManualClock()
    memo = WeightsMemo(memo_path, maker, clock, clock.advance)
    with ByteLocks(memo_path.with_suffix(".lock")).held(weights_memo._identity(files[1].stat()), 0.0):
        assert [*memo.digests(files[:1]), *memo.digests(files[1:])] == right(files)
    assert maker.made == ["one", "two"]
    assert WAIT_S <= clock() < WAIT_S + 1


def test_entries_of_two_processes_that_began_together_are_all_kept(
    memo_path: Path, files: list[Path]
) -> None:
    memos = [WeightsMemo(memo_path, Maker()) for _ in files]
    for memo, path in zip(memos, files, strict=True):
        memo.digests([path])
    assert remembers(memo_path, files)


def test_a_file_that_changes_while_it_is_read_is_not_remembered(memo_path: Path, files: list[Path]) -> None:
    def make(file: BinaryIO, name: str) -> str:
        value = hashlib.sha256(file.read()).hexdigest()
        files[0].write_text("other content, of another length")
        return value

    WeightsMemo(memo_path, make).digests(files[:1])
    assert not memo_path.exists()


def linked(lock: Path) -> None:
    lock.symlink_to(lock.with_name("target"))


def open_to_all(lock: Path) -> None:
    lock.touch()
    lock.chmod(0o666)


def a_pipe(lock: Path) -> None:
    os.mkfifo(lock, 0o600)


def another_users(lock: Path) -> None:
    lock.touch(0o600)
    os.chown(lock, NOBODY, NOBODY)


@pytest.mark.parametrize(
    "planted", [linked, open_to_all, a_pipe, pytest.param(another_users, marks=needs_root)]
)
def test_a_planted_lock_is_not_used_and_costs_nothing(
    planted: Callable[[Path], None], memo_path: Path, files: list[Path]
) -> None:
    planted(memo_path.with_suffix(".lock"))
    maker = Maker()
    assert WeightsMemo(memo_path, maker, sleep=nobody_waits).digests(files) == right(files)
    assert maker.made == ["one", "two"]
    assert not memo_path.with_name("target").exists()
    assert remembers(memo_path, files)


# ---- the locks themselves


def test_a_lock_excludes_others_of_its_name_alone(memo_path: Path) -> None:
    locks = ByteLocks(memo_path.with_suffix(".lock"), sleep=nobody_waits)
    with locks.held("one", 0.0):
        with locks.held("two", 0.0):
            pass
        with pytest.raises(LockBusy), locks.held("one", 0.0):
            pass
    with locks.held("one", 0.0):
        pass


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(memo_path: Path) -> None:
    locks = ByteLocks(memo_path.with_suffix(".lock"), sleep=nobody_waits)
    reader, writer = os.pipe()
    with locks.held("one", 0.0):
        child = os.fork()
        if not child:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    try:
        with locks.held("one", 0.0):
            pass
    finally:
        os.close(reader)
        os.close(writer)
        os.waitpid(child, 0)

"""Two processes of a node page-lock memory one after the other, whatever memory it is."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.clock import ManualClock
from kvbm.errors import KvbmError
from kvbm.protocol import PROTOCOL_VERSION, Welcome
from kvbm.transfer.cuda import lock_turns
from kvbm.transfer.cuda.lock_turns import TURN_S_MAX, LockTurns
from kvbm.transfer.cuda.page_lock import PageLocks
from kvbm.transfer.cuda.pieces import SlotRows
from kvbm.worker.mapping import Mapping
from rigs.cuda_model import DEADLINE_S, PAGE, Model

OTHER = """
import sys, threading
from kvbm.transfer.cuda.lock_turns import LockTurns
turns = LockTurns(sys.argv[1])
with turns.turn(threading.Event()):
    print("mine", flush=True)
    sys.stdin.readline()
print("yours", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def runtime_dir(tmp_path: Path) -> str:
    return str(tmp_path / "kvbm")


class OtherProcess:
    """Has the turn from the start on."""

    def __init__(self, runtime_dir: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OTHER, runtime_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.answer() == "mine"

    def give_up(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        assert self.answer() == "yours"

    def die(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def close(self) -> None:
        self.die()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()


@contextmanager
def other_process(runtime_dir: str) -> Iterator[OtherProcess]:
    other = OtherProcess(runtime_dir)
    try:
        yield other
    finally:
        other.close()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when somebody in this process, being next, has asked for the turn and was refused."""
    event, take = threading.Event(), LockTurns.take

    def watched(turns: LockTurns, place: int) -> bool:
        taken = take(turns, place)
        if place == lock_turns.TURN and not taken:
            event.set()
        return taken

    monkeypatch.setattr(LockTurns, "take", watched)
    return event


def locking(runtime_dir: str, model: Model) -> tuple[PageLocks, threading.Thread]:
    """Memory of this process alone is being locked."""
    region = mmap.mmap(-1, 4 * PAGE)
    slots = SlotRows(ctypes.addressof(ctypes.c_char.from_buffer(region)), PAGE)
    locks = PageLocks(slots, 4, model.driver, model.device, LockTurns(runtime_dir))
    locks.begin()
    thread = threading.Thread(target=locks.run)
    thread.start()
    return locks, thread


@pytest.mark.parametrize("ends", ["gives up", "dies"])
def test_pages_are_locked_when_the_other_process_is_through(
    runtime_dir: str, refused: threading.Event, ends: str
) -> None:
    model = Model()
    with other_process(runtime_dir) as other:
        locks, thread = locking(runtime_dir, model)
        assert refused.wait(DEADLINE_S)
        assert model.lock_calls == 0
        other.give_up() if ends == "gives up" else other.die()
        thread.join(DEADLINE_S)
    assert locks.settled.is_set()
    assert locks.locked_slots == 4
    locks.close()


def test_the_turn_is_given_back_after_each_piece(runtime_dir: str) -> None:
    model = Model()
    locks, thread = locking(runtime_dir, model)
    thread.join(DEADLINE_S)
    with other_process(runtime_dir):
        pass  # it has had its turn, or this would not have begun
    locks.close()


def test_who_waits_has_the_turn_before_who_gives_it_up_has_it_again(
    runtime_dir: str, refused: threading.Event
) -> None:
    mine, other = LockTurns(runtime_dir), LockTurns(runtime_dir)
    had: list[str] = []

    def take() -> None:
        with other.turn(threading.Event()):
            had.append("other")

    thread = threading.Thread(target=take)
    with mine.turn(threading.Event()):
        thread.start()
        assert refused.wait(DEADLINE_S)
    with mine.turn(threading.Event()):
        had.append("mine")
    thread.join(DEADLINE_S)
    assert had == ["other", "mine"]
    mine.close()
    other.close()


def test_closing_does_not_wait_for_the_other_process(runtime_dir: str, refused: threading.Event) -> None:
    model = Model()
    probe = LockTurns(runtime_dir)
    with other_process(runtime_dir):
        locks, thread = locking(runtime_dir, model)
        assert refused.wait(DEADLINE_S)
        assert not probe.take(lock_turns.NEXT)
        locks.close()
        thread.join(DEADLINE_S)
        assert probe.take(lock_turns.NEXT), "nor does it keep the place of who is next"
    assert model.lock_calls == 0
    probe.close()


def test_a_process_that_was_stopped_is_not_waited_for_for_ever(
    runtime_dir: str, refused: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    turns = LockTurns(runtime_dir, clock)
    had: list[str] = []

    def take() -> None:
        for piece in ("first", "second"):
            with turns.turn(threading.Event()):
                had.append(piece)

    with other_process(runtime_dir):
        thread = threading.Thread(target=take)
        thread.start()
        assert refused.wait(DEADLINE_S)
        assert had == []
        clock.advance(TURN_S_MAX)
        thread.join(DEADLINE_S)
        assert had == ["first", "second"], "the second piece does not wait as long again"
    (record,) = caplog.records
    assert record.getMessage() == (
        "another process of this node has page-locked memory for over 30 s: pages are locked "
        "without taking turns from now on"
    )
    turns.close()
    turns.close()


def test_the_pause_after_a_piece_is_part_of_the_turn(
    runtime_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is left to the steps of all processes, not to the next one that locks."""
    monkeypatch.setattr("kvbm.transfer.cuda.page_lock.PIECE_BYTES", PAGE)
    probe, taken = LockTurns(runtime_dir), []
    region = mmap.mmap(-1, 4 * PAGE)
    slots = SlotRows(ctypes.addressof(ctypes.c_char.from_buffer(region)), PAGE)
    model = Model()
    locks = PageLocks(slots, 4, model.driver, model.device, LockTurns(runtime_dir))

    def pause(pause_s: float) -> bool:
        taken.append(probe.take(lock_turns.TURN))
        return False

    monkeypatch.setattr(locks._closing, "wait", pause)
    locks.begin()
    locks.run()
    assert taken == [False] * 4
    locks.close()
    probe.close()


def test_a_rank_on_a_cuda_device_takes_turns(runtime_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[LockTurns | None] = []

    def refuse(*_: object, turns: LockTurns | None = None, **__: object) -> object:
        given.append(turns)
        raise KvbmError("no such device here")

    monkeypatch.setattr("kvbm.transfer.cuda.copier.CudaCopier", refuse)
    monkeypatch.setattr("kvbm.transfer.CpuCopier", refuse)
    welcome = Welcome(version=PROTOCOL_VERSION, epoch=1, slot_count=4, slot_bytes=PAGE)
    for device in ("cuda", "cpu"):
        fds = [os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("arena", "generations")]
        for fd, size in zip(fds, (4 * PAGE, 32), strict=True):
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        cache: Any = SimpleNamespace(layers={}, device=SimpleNamespace(type=device))
        open_files = len(os.listdir("/proc/self/fd"))
        with pytest.raises(KvbmError, match="no such device"):
            Mapping(welcome, fds, cache, runtime_dir=runtime_dir)
        assert len(os.listdir("/proc/self/fd")) <= open_files - 2, "nothing is left open"
    assert isinstance(given[0], LockTurns)
    assert given[1] is None


@pytest.mark.parametrize("foreign", ["directory", "file"])
def test_a_file_of_other_users_is_not_locked(
    runtime_dir: str, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no turns then, and no process waits."""
    os.mkdir(runtime_dir, 0o700)
    path = os.path.join(runtime_dir, lock_turns.FILE_NAME)
    with open(path, "w"):
        os.chmod(runtime_dir if foreign == "directory" else path, 0o777)  # others can write to it
    tried: list[int] = []
    monkeypatch.setattr(lock_turns, "set_lock", lambda fd, kind, place: not tried.append(place))
    turns = LockTurns(runtime_dir)
    with turns.turn(threading.Event()):
        assert tried == []
    turns.close()

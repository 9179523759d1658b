"""Two processes that lock the pages of one memory do it one after the other."""

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
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.clock import ManualClock
from kvbm.errors import KvbmError
from kvbm.open_file_locks import set_lock
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
turns = LockTurns(int(sys.argv[1]))
with turns.turn(threading.Event()):
    print("mine", flush=True)
    sys.stdin.readline()
print("yours", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 4 * PAGE)
    yield fd
    os.close(fd)


class OtherProcess:
    """Has the turn from the start on, with the very descriptor that was handed to it, as ranks get theirs."""

    def __init__(self, memory: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(memory)],
            pass_fds=[memory],
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
def other_process(memory: int) -> Iterator[OtherProcess]:
    other = OtherProcess(memory)
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


def locking(memory: int, model: Model) -> tuple[PageLocks, threading.Thread]:
    region = mmap.mmap(memory, 4 * PAGE)
    address = lock_address(region)
    locks = PageLocks(SlotRows(address, PAGE), 4, model.driver, model.device, LockTurns(memory))
    locks.begin()
    thread = threading.Thread(target=lambda: (model.driver.adopt_thread(0), locks.run()))
    thread.start()
    return locks, thread


def lock_address(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


@pytest.mark.parametrize("ends", ["gives up", "dies"])
def test_pages_are_locked_when_the_other_process_is_through(
    memory: int, refused: threading.Event, ends: str
) -> None:
    model = Model()
    with other_process(memory) as other:
        locks, thread = locking(memory, model)
        assert refused.wait(DEADLINE_S)
        assert model.lock_calls == 0
        other.give_up() if ends == "gives up" else other.die()
        thread.join(DEADLINE_S)
    assert locks.finished.is_set()
    assert locks.locked_slots == 4
    locks.close()


def test_the_turn_is_given_back_after_each_piece(memory: int) -> None:
    model = Model()
    locks, thread = locking(memory, model)
    thread.join(DEADLINE_S)
    with other_process(memory):
        pass  # it has had its turn, or this would not have begun
    locks.close()


def test_who_waits_has_the_turn_before_who_gives_it_up_has_it_again(
    memory: int, refused: threading.Event
) -> None:
    mine, other = LockTurns(memory), LockTurns(memory)
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


def test_closing_does_not_wait_for_the_other_process(memory: int, refused: threading.Event) -> None:
    model = Model()
    probe = LockTurns(memory)
    with other_process(memory):
        locks, thread = locking(memory, model)
        assert refused.wait(DEADLINE_S)
        assert not probe.take(lock_turns.NEXT)
        locks.close()
        thread.join(DEADLINE_S)
        assert probe.take(lock_turns.NEXT), "nor does it keep the place of who is next"
    assert model.lock_calls == 0
    probe.close()


def test_a_process_that_was_stopped_is_not_waited_for_for_ever(
    memory: int, refused: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    turns = LockTurns(memory, clock)
    had: list[str] = []

    def take() -> None:
        for piece in ("first", "second"):
            with turns.turn(threading.Event()):
                had.append(piece)

    with other_process(memory):
        thread = threading.Thread(target=take)
        thread.start()
        assert refused.wait(DEADLINE_S)
        assert had == []
        clock.advance(TURN_S_MAX)
        thread.join(DEADLINE_S)
        assert had == ["first", "second"], "the second piece does not wait as long again"
    (record,) = caplog.records
    assert record.getMessage() == (
        "another process locks pages of the host arena for over 30 s: it is not waited for any more"
    )
    turns.close()
    turns.close()


def test_a_lock_on_what_was_handed_over_would_exclude_nobody(memory: int) -> None:
    """Why the memory is opened again: a lock is the open file's, and both processes have the same one."""
    with other_process(memory):
        own = LockTurns(memory)
        assert not own.take(lock_turns.TURN)
        own.close()
    lock = (memory, fcntl.F_WRLCK, lock_turns.TURN)
    script = f"from kvbm.open_file_locks import set_lock; print(set_lock(*{lock!r}))"
    assert set_lock(*lock)
    child = subprocess.run(
        [sys.executable, "-c", script], pass_fds=[memory], capture_output=True, timeout=DEADLINE_S, check=True
    )
    assert child.stdout == b"True\n"


def test_a_rank_on_a_cuda_device_takes_turns_at_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[LockTurns | None] = []

    def refuse(*_: object, turns: LockTurns | None = None, **__: object) -> object:
        given.append(turns)
        raise KvbmError("no such device here")

    monkeypatch.setattr("kvbm.transfer.cuda.copier.CudaCopier", refuse)
    monkeypatch.setattr("kvbm.transfer.CpuCopier", refuse)
    welcome = Welcome(version=PROTOCOL_VERSION, epoch=1, slot_count=4, slot_bytes=PAGE)
    for device in ("cuda", "cpu"):
        fds = [os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("arena", "generations")]
        shard = os.dup(fds[0])
        for fd, size in zip(fds, (4 * PAGE, 32), strict=True):
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        cache: Any = SimpleNamespace(layers={}, device=SimpleNamespace(type=device))
        open_files = len(os.listdir("/proc/self/fd"))
        with pytest.raises(KvbmError, match="no such device"):
            Mapping(welcome, fds, cache)
        assert len(os.listdir("/proc/self/fd")) <= open_files - 2, "nothing is left open"
        os.close(shard)
    assert isinstance(given[0], LockTurns)
    assert given[1] is None


def test_without_proc_there_are_no_turns() -> None:
    fd = os.memfd_create("gone")
    os.close(fd)
    turns = LockTurns(fd)
    with turns.turn(threading.Event()):
        pass
    turns.close()

"""The manager's thread makes no call to a disk or a network: the rule, and a gate at each call of a disk tier.

`rigs.manager.ManagerBench` takes every turn under the rule, in all tests that use it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvbm.manager import assembly
from kvbm.manager.disk_health import HEAL_S_MAX
from kvbm.protocol import Reset
from kvbm.tiers.disk.syscalls import Syscalls
from kvbm.tiers.disk.tier import WATCH_PERIOD_S
from rigs.gated_syscalls import OPERATIONS, GatedSyscalls
from rigs.manager import KEYS, ManagerBench, store
from rigs.managers_thread import ForbiddenCall, turn

MakeBench = Callable[..., ManagerBench]
FORBIDDEN: dict[str, Callable[[Path], object]] = {
    "a file by its path": lambda path: path.stat(),
    "a file by its descriptor": lambda path: os.fsync(_open(path)),
    "vectored writes, which audit hooks miss": lambda path: os.pwritev(_open(path), [b"x"], 0),
    "pathlib": lambda path: path.read_text(),
    "a call of the disk tier": lambda path: Syscalls().free_bytes(str(path)),
    "a name service": lambda path: socket.getaddrinfo("localhost", 1),
    "a network": lambda path: socket.create_connection(("127.0.0.1", 1)),
    "a socket that waits": lambda path: socket.socket().connect(("127.0.0.1", 1)),
    "a lock of a file": lambda path: fcntl.flock(_open(path), fcntl.LOCK_SH),
    "a thread": lambda path: threading.main_thread().join(),
}
_opened: list[int] = []


def _open(path: Path) -> int:
    """A descriptor that was opened before, in another thread."""
    opener = threading.Thread(target=lambda: _opened.append(os.open(path, os.O_RDWR)))
    opener.start()
    opener.join()
    return _opened[-1]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_calls_that_may_take_long_are_refused_in_a_turn(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.touch()
    with turn(), pytest.raises(ForbiddenCall):
        FORBIDDEN[name](path)
    while _opened:
        os.close(_opened.pop())
    assert path.stat().st_size == 0, "the turn is over"


def test_memory_and_what_the_kernel_knows_may_be_asked_for_in_a_turn() -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    with turn(), socket.socket() as connection:
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.connect(("127.0.0.1", 1))
        ended.join()
        memory = os.memfd_create("x")
        os.ftruncate(memory, 4096)
        os.close(memory)
        assert Path("/proc/self/status").read_text()


def test_a_call_in_a_turn_of_the_loop_fails(make_manager: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_manager()
    monkeypatch.setattr(bench.server, "_tick", lambda: os.listdir("/"))
    with pytest.raises(ForbiddenCall, match="listdir for '/'"):
        bench.tick()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedSyscalls]:
    """The kernel of the disks of managers."""
    kernel = GatedSyscalls()
    monkeypatch.setattr(assembly, "open_disk_tier", partial(assembly.open_disk_tier, syscalls=kernel))
    yield kernel
    kernel.open_gate()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_to_the_disk_that_does_not_end_keeps_no_client(
    make_manager: MakeBench, kernel: GatedSyscalls, tmp_path: Path, operation: str
) -> None:
    """Whatever call it is: blocks are stored and evicted, the disk is watched, fails, is opened again and reset."""
    disk = tmp_path / "disk"
    bench = make_manager(host_blocks=16, disk_blocks=4, disk_dir=str(disk), disk_admission="all")
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:4])
    side = bench.space().disk
    assert side is not None
    bench.until(lambda: side.pool.counts().resident == 4)
    numbers = iter(range(1, 100))

    def expect_host_hits() -> None:
        leader.take()
        number = next(numbers)
        assert len(leader.lookup(number, KEYS[100:104]).slots) == 4

    kernel.shut(operation)
    store(leader, worker, 2, KEYS[100:104])
    expect_host_hits()
    bench.tick(WATCH_PERIOD_S)
    expect_host_hits()
    leader.send(Reset(tier="disk"))
    expect_host_hits()
    shutil.rmtree(disk)  # another directory is made
    side.medium._fault.declare("broken by the test")
    for _ in range(3):
        bench.tick(HEAL_S_MAX)
        expect_host_hits()
    kernel.wait_entered()
    expect_host_hits()
    kernel.open_gate()
    bench.until(lambda: bench.clock.advance(1.0) or not side.trouble, "it never came back")
    expect_host_hits()

"""The host arena: regions, generations, and that nothing stays behind."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvbm import numa
from kvbm.errors import ManagerUntrusted, SettingsError
from kvbm.layout import BlockLayout
from kvbm.tiers import host
from kvbm.tiers.host import HostArena, open_arena

LAYOUT = BlockLayout(block_tokens=4, shard_bytes=5000, shard_count=3)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(LAYOUT, 4, touch_threads=2)
    yield arena
    arena.close()


def test_every_shard_has_its_own_bytes(arena: HostArena) -> None:
    for slot in range(4):
        for shard, view in enumerate(arena.slot_views(slot)):
            assert len(view) == LAYOUT.slot_bytes == 8192
            view[:] = bytes([16 * slot + shard]) * len(view)
    for slot in range(4):
        for shard, view in enumerate(arena.slot_views(slot)):
            assert set(view) == {16 * slot + shard}


def test_a_worker_sees_the_same_bytes_and_generations(arena: HostArena) -> None:
    fds = [os.dup(arena.region_fds[1]), os.dup(arena.generation_fd)]
    region, generations = open_arena(fds)
    view = arena.slot_views(2)[1]
    view[:] = b"x" * len(view)
    assert region[2 * LAYOUT.slot_bytes : 3 * LAYOUT.slot_bytes] == bytes(view)
    first = arena.generation(0)
    arena.invalidate(3)
    arena.invalidate(3)
    counters = memoryview(generations).cast("Q")
    assert list(counters) == [first, first, first, first + 2] == list(arena.generations(range(4)))
    assert arena.generation(3) == first + 2
    with pytest.raises(TypeError):
        generations[0] = 1
    counters.release()
    generations.close()
    region.close()


def received(arena: HostArena, shard: int = 0) -> list[int]:
    """The descriptors that a worker gets over the socket."""
    return [os.dup(arena.region_fds[shard]), os.dup(arena.generation_fd)]


def test_nobody_can_change_the_size_of_what_others_have_mapped(arena: HostArena) -> None:
    """A page beyond the end of a file that was cut short kills every process that touches it."""
    for fd in received(arena):
        size = os.fstat(fd).st_size
        writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        for file in (fd, writable):
            for other_bytes in (0, size - 4096, size + 4096):
                with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
                    os.ftruncate(file, other_bytes)
            with pytest.raises(PermissionError):
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(OSError, match=r"not permitted"):
            os.posix_fallocate(writable, size, 4096)
        assert os.fstat(fd).st_size == size
        os.close(fd)
        os.close(writable)


def test_a_worker_cannot_write_to_the_generations(arena: HostArena) -> None:
    """Nor can it by opening the file anew: a rank that did could make stale slots look whole to all others."""
    region_fd, fd = received(arena)
    size = os.fstat(fd).st_size
    before = list(arena.generations(range(4)))
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    for file in (fd, again):
        with pytest.raises(PermissionError):
            mmap.mmap(file, size)
        with pytest.raises(OSError, match=r"not permitted|Bad file descriptor"):
            os.pwrite(file, b"x" * size, 0)
    _, table = open_arena([region_fd, fd])
    libc = ctypes.CDLL(None, use_errno=True)
    with memoryview(table) as view:
        address = ctypes.c_void_p(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        assert libc.mprotect(address, ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE) == -1
    arena.invalidate(1)
    assert list(arena.generations(range(4))) == [before[0], before[1] + 1, *before[2:]], "the manager can"
    os.close(again)


def test_an_older_kernel_hands_out_no_writable_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.1 there is no seal against writing; the descriptor is read-only all the same."""
    monkeypatch.setattr(host, "_SEAL_FUTURE_WRITE", 1 << 30)
    arena = HostArena(LAYOUT, 4)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.generation_fd, os.fstat(arena.generation_fd).st_size)
    region, generations = open_arena(received(arena))
    region.close()
    generations.close()
    arena.close()


@pytest.mark.parametrize("odd", ["region", "table", "file", "empty", "one", "count"])
def test_memory_that_could_change_under_us_is_not_mapped(arena: HostArena, odd: str, tmp_path: Path) -> None:
    before = open_fds()
    fds = received(arena)
    count = 4
    if odd in ("region", "table", "file", "empty"):
        which = int(odd == "table")
        size = 0 if odd == "empty" else os.fstat(fds[which]).st_size
        os.close(fds[which])
        flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if odd == "empty" else 0)
        fds[which] = os.memfd_create("unsealed", flags)
        if odd == "file":
            os.close(fds[which])
            fds[which] = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fds[which], size)
        if odd == "empty":
            fcntl.fcntl(fds[which], fcntl.F_ADD_SEALS, host._SIZE_SEALS)
    elif odd == "one":
        os.close(fds.pop())
    else:
        count = 5
    says = "not sealed" if odd in ("region", "table", "file") else "expected are"
    with pytest.raises(ManagerUntrusted, match=says) as caught:
        open_arena(fds, count, LAYOUT.slot_bytes)
    assert "\n" not in str(caught.value)
    assert open_fds() == before


def test_a_slot_that_is_invalidated_keeps_its_bytes(arena: HostArena) -> None:
    """A reader finds out by the generation, not by a tear."""
    view = arena.slot_views(0)[0]
    view[:4] = b"kept"
    arena.invalidate(0)
    assert bytes(view[:4]) == b"kept"


def test_pages_are_touched_in_the_background_until_it_closes() -> None:
    before = open_fds()
    for _ in range(5):
        arena = HostArena(BlockLayout(block_tokens=1, shard_bytes=1 << 20), 64, touch_threads=4)
        arena.touch(0)
        arena.close()
    assert open_fds() == before


def resident_pages(arena: HostArena, shard: int) -> int:
    """4 KiB pages that the region's file has, whoever mapped it."""
    return os.fstat(arena.region_fds[shard]).st_blocks * 512 // 4096


def test_a_region_is_touched_once_it_is_asked_for_and_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = HostArena(BlockLayout(block_tokens=1, shard_bytes=1 << 20, shard_count=2), 8, touch_threads=2)
    assert resident_pages(arena, 0) == 0
    started, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
    arena.touch(1)
    arena.touch(1)
    for thread in started:
        thread.join()
    assert (resident_pages(arena, 0), resident_pages(arena, 1)) == (0, 8 * 256)
    assert len(started) == 2, "once"
    arena.close()


def test_pages_are_touched_from_the_cpus_of_their_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And nobody else moves: the affinity is the touching thread's own."""
    (tmp_path / "node3").mkdir()
    own = sorted(os.sched_getaffinity(0))
    (tmp_path / "node3" / "cpulist").write_text(f"{own[0]},1000-1001\n")
    monkeypatch.setattr(numa, "NODES", tmp_path)
    seen: list[set[int]] = []
    monkeypatch.setattr(host, "populate", lambda *_: seen.append(os.sched_getaffinity(0)))
    arena = HostArena(LAYOUT, 4, touch_threads=1)
    arena.touch(0, numa_node=3)
    arena.touch(1, numa_node=7)
    for thread in threading.enumerate():
        if thread.name.startswith("kvbm-touch"):
            thread.join()
    arena.close()
    assert sorted(seen, key=len) == sorted([{own[0]}, set(own)], key=len)
    assert os.sched_getaffinity(0) == set(own)


def test_closing_with_a_view_in_use_is_no_error() -> None:
    before = open_fds()
    arena = HostArena(LAYOUT, 2, touch_threads=1)
    view = arena.slot_views(0)[0]
    view[:2] = b"ok"
    arena.close()
    assert bytes(view[:2]) == b"ok", "a transfer that still runs must not hit unmapped memory"
    del view, arena
    assert open_fds() == before


def test_more_than_the_machine_has_is_refused_in_one_line() -> None:
    before = open_fds()
    with pytest.raises(SettingsError, match="this machine has") as caught:
        HostArena(BlockLayout(block_tokens=1, shard_bytes=1 << 40), 1 << 10)
    assert "\n" not in str(caught.value)
    assert open_fds() == before


def test_more_than_the_container_may_use_is_refused() -> None:
    size = 4 * LAYOUT.block_bytes
    HostArena(LAYOUT, 4, limit_bytes=size).close()
    HostArena(LAYOUT, 4, limit_bytes=1 << 60).close()
    with pytest.raises(SettingsError, match="this container may use"):
        HostArena(LAYOUT, 4, limit_bytes=size - 1)


def test_descriptors_that_run_out_are_given_back() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 8, hard))
    try:
        with pytest.raises(SettingsError, match="50 shard"):
            HostArena(BlockLayout(block_tokens=1, shard_bytes=4096, shard_count=50), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_fds() == before

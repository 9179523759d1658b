"""A client's view of the host tier: descriptors that are short, and memory that is refused."""

from __future__ import annotations

import errno
import os

import pytest

from kvbm.client.arena import MappedArena
from kvbm.errors import ManagerUntrusted
from kvbm.layout import BlockLayout
from kvbm.protocol import PROTOCOL_VERSION, Welcome
from kvbm.tiers.host import HostArena

LAYOUT = BlockLayout(block_tokens=4, shard_bytes=4096)
WELCOME = Welcome(version=PROTOCOL_VERSION, epoch=1, slot_count=4, slot_bytes=LAYOUT.slot_bytes)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_process_without_a_descriptor_left_maps_the_memory_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one more is only for the turns of CUDA's page locks."""
    before, arena = open_fds(), HostArena(LAYOUT, 4, touch_threads=0)
    fds = [os.dup(arena.region_fds[0]), os.dup(arena.generation_fd)]

    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", refuse)
        mapped = MappedArena(WELCOME, fds)
    assert mapped.fd == -1
    assert mapped.intact([0, 3], arena.generations([0, 3])) == 2
    mapped.close()
    arena.close()
    del mapped, arena
    assert open_fds() == before


def test_memory_that_is_refused_leaves_no_descriptor_open() -> None:
    before = open_fds()
    with pytest.raises(ManagerUntrusted, match="not sealed"):
        MappedArena(WELCOME, [os.memfd_create("slots"), os.memfd_create("generations")])
    assert open_fds() == before

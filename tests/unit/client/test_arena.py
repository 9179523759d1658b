"""A client's view of the host tier, where it is refused."""

from __future__ import annotations

import os

import pytest

from kvbm.client.arena import MappedArena
from kvbm.errors import ManagerUntrusted
from kvbm.layout import BlockLayout
from kvbm.protocol import PROTOCOL_VERSION, Welcome

LAYOUT = BlockLayout(block_tokens=4, shard_bytes=4096)
WELCOME = Welcome(version=PROTOCOL_VERSION, epoch=1, slot_count=4, slot_bytes=LAYOUT.slot_bytes)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_that_is_refused_leaves_no_descriptor_open() -> None:
    before = open_fds()
    with pytest.raises(ManagerUntrusted, match="not sealed"):
        MappedArena(WELCOME, [os.memfd_create("slots"), os.memfd_create("generations")])
    assert open_fds() == before

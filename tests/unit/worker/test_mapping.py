"""A worker's memory in one life of the manager: what its end leaves behind."""

from __future__ import annotations

import os
import threading

import pytest

pytest.importorskip("torch", reason="the worker copies torch tensors; torch is not installed")

import torch

from kvbm.layout import BlockLayout
from kvbm.protocol import PROTOCOL_VERSION, Welcome
from kvbm.tiers.host import HostArena
from kvbm.transfer import DeviceCache
from kvbm.worker.mapping import Mapping


def test_a_copier_that_cannot_be_closed_keeps_nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DeviceCache.from_tensors({"layer": torch.zeros(2, 2, 4, 8)}, 2)
    layout = BlockLayout(block_tokens=4, shard_bytes=cache.shard_bytes)
    arena = HostArena(layout, 4, touch_threads=0)
    welcome = Welcome(version=PROTOCOL_VERSION, epoch=1, slot_count=4, slot_bytes=layout.slot_bytes)
    mapping = Mapping(welcome, [os.dup(arena.region_fds[0]), os.dup(arena.generation_fd)], cache)

    def fails() -> None:
        raise RuntimeError("unlocking the host arena")

    with monkeypatch.context() as patch:
        patch.setattr(mapping.copier, "close", fails)
        with pytest.raises(RuntimeError):
            mapping.close()
    assert not any(thread.name == "kvbm-populate" for thread in threading.enumerate())
    mapping.close()
    arena.close()

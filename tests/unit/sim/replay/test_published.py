"""Replays through libCacheSim's policies: its LRU against the exact curve, the others by what any replay must keep."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvbm.errors import SettingsError
from kvbm.sim.replay.curves import lru_curve
from kvbm.sim.replay.optimum import optimum
from kvbm.sim.replay.published import NAMES, published_replay, require_library
from kvbm.sim.traces.synthetic import ChatShape, chats
from rigs.serving import make_trace

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed")

TRACE = chats(ChatShape(conversations=60))


@pytest.mark.parametrize("capacity", [1, 10, 100, 500, TRACE.unique_blocks])
def test_their_lru_is_the_leaf_first_lru(capacity: int) -> None:
    """Used from the last block to the first, so of a chain the leaf is always the oldest."""
    assert published_replay(TRACE, "libcachesim:lru", capacity).hits == lru_curve(TRACE).hits[capacity]


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_beats_the_optimum_and_room_for_everything_reaches_it(name: str) -> None:
    seen: list[int] = []
    found = published_replay(TRACE, name, 200, seen.append)
    best = optimum(TRACE, 200)
    assert 0 < found.hits < best.hits
    assert found.inserted - found.evicted == 200
    assert seen[-1] == len(TRACE.requests)
    everything = published_replay(TRACE, name, TRACE.unique_blocks)
    assert everything.hits == optimum(TRACE, TRACE.unique_blocks).hits
    assert (everything.inserted, everything.evicted) == (TRACE.unique_blocks, 0)


def test_a_block_counts_only_behind_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that has lost the second of three blocks: one hit."""

    class HalfEmpty(libcachesim.LRU):  # type: ignore[misc]
        def find(self, wanted: Any, update_cache: bool = True) -> object:
            return None if wanted.obj_id == 2 else super().find(wanted, update_cache)

    monkeypatch.setattr(libcachesim, "LRU", HalfEmpty)
    trace = make_trace((0.0, "abc"), (1.0, "abc"))
    assert published_replay(trace, "libcachesim:lru", 3).hits_by_request == (0, 1)


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcachesim", None)
    with pytest.raises(SettingsError, match=r"--policy='libcachesim:arc' .*pip install libcachesim"):
        require_library("libcachesim:arc")

"""Replicas of one model, each with a disk tier of its own under one directory, end and come back in any order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from kvbm.testing.stored_runs import LAYOUT, NAMESPACE, by_slot, heal, make_key, store
from kvbm.tiers.disk import geometry
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier

CHILD = Path(__file__).with_name("replica_child.py")
COUNTS = (3, 5, 2)
"""Blocks of each replica."""


class Replicas:
    """Processes; those that a test leaves are killed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.running: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, count: int = 0) -> dict[str, Any]:
        """The replica's own report. It stores `count` blocks that are its own."""
        command = [sys.executable, str(CHILD), str(self.root), str(10 * rank), str(count)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.running[rank] = process
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert process.stdout.readline() == "stored\n"
        assert isinstance(said, dict)
        return said

    def end(self, killed: bool) -> None:
        """All of them, in order or by SIGKILL."""
        for process in self.running.values():
            if killed:
                process.kill()
            process.communicate()
            assert process.returncode == (-9 if killed else 0)
        self.running.clear()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    replicas = Replicas(tmp_path)
    yield replicas
    replicas.end(killed=True)


def own(rank: int) -> set[int]:
    return set(range(10 * rank, 10 * rank + COUNTS[rank]))


@pytest.mark.parametrize(
    ("killed", "order"), [(False, (1, 0, 2)), (True, (2, 1, 0))], ids=["closed", "killed"]
)
def test_after_all_processes_came_back_everything_is_found(
    replicas: Replicas, killed: bool, order: tuple[int, ...]
) -> None:
    for rank in range(3):
        assert replicas.start(rank, COUNTS[rank])["found"] == []
    replicas.end(killed)
    for _ in range(2):  # what they find, and what they leave having found it
        said = [replicas.start(rank) for rank in order]
        assert len({each["path"] for each in said}) == 3
        assert sorted(each["found"] for each in said) == [sorted(own(rank)) for rank in range(3)]
        replicas.end(killed)


def test_one_process_alone_takes_nothing_from_the_others(replicas: Replicas) -> None:
    for rank in range(3):
        replicas.start(rank, COUNTS[rank])
    replicas.end(killed=True)
    first = replicas.start(0)
    assert len(list(replicas.root.iterdir())) == 3
    rest = [replicas.start(1), replicas.start(2)]
    found = [set(each["found"]) for each in (first, *rest)]
    assert set().union(*found) == own(0) | own(1) | own(2)
    replicas.end(killed=False)


# ---- the same in one process: every order


def open_tier(root: Path, slots: int = 8) -> DiskTier:
    return open_disk_tier(root, LAYOUT, NAMESPACE, capacity_blocks=slots, io_threads=1)


def found_keys(tier: DiskTier) -> set[bytes]:
    return {bytes(block.key) for block in by_slot(tier.recovered()).values()}


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_whatever_the_order_in_which_they_end_and_come_back(tmp_path: Path, order: tuple[int, ...]) -> None:
    tiers = [open_tier(tmp_path) for _ in range(3)]
    for rank, tier in enumerate(tiers):
        for slot, number in enumerate(sorted(own(rank))):
            store(tier, LAYOUT, make_key(number), slot)
    for rank in order:
        tiers[rank].close(keep=True)
    again = [open_tier(tmp_path) for _ in range(3)]
    found = [found_keys(tier) for tier in again]
    assert sorted(map(len, found)) == sorted(COUNTS)
    assert set().union(*found) == {make_key(number) for rank in range(3) for number in own(rank)}
    assert len(os.listdir(tmp_path)) == 3
    for tier in again:
        tier.close(keep=False)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_replicas_of_different_sizes_find_their_own(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Each would cut off, or not reach, what a larger one has left."""
    sizes = (4, 8, 16)
    tiers = [open_tier(tmp_path, size) for size in sizes]
    for rank, tier in enumerate(tiers):
        for slot in range(sizes[rank]):
            store(tier, LAYOUT, make_key(20 * rank + slot), slot)
    for tier in tiers:
        tier.close(keep=True)
    for rank in order:
        tiers[rank] = open_tier(tmp_path, sizes[rank])
    for rank, tier in enumerate(tiers):
        assert found_keys(tier) == {make_key(20 * rank + slot) for slot in range(sizes[rank])}
        tier.close(keep=False)


def test_many_replicas_all_find_what_they_left(tmp_path: Path) -> None:
    """However many: the first to come back does not know how many follow."""
    count, slots = 16, 150  # so large that the filesystem's own maps do not hide what blocks take
    tiers = [open_tier(tmp_path, slots) for _ in range(count)]
    for rank, tier in enumerate(tiers):
        store(tier, LAYOUT, make_key(rank), 0)
    for tier in tiers:
        tier.close(keep=True)
    again = [open_tier(tmp_path, slots) for _ in range(count)]
    assert set().union(*map(found_keys, again)) == {make_key(rank) for rank in range(count)}
    for tier in again:
        tier.close(keep=False)


def test_a_replica_that_keeps_nothing_leaves_those_of_the_others(tmp_path: Path) -> None:
    kept = open_tier(tmp_path)
    store(kept, LAYOUT, make_key(1), 1)
    kept.close(keep=True)
    passing = open_disk_tier(tmp_path, LAYOUT, NAMESPACE, capacity_blocks=8, persist=False)
    passing.close(keep=True)
    again = open_tier(tmp_path)
    assert found_keys(again) == {make_key(1)}
    again.close(keep=False)


def test_two_engines_with_other_slabs_do_not_empty_each_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one model, one above and one below the size from which slabs are larger."""
    small = open_tier(tmp_path, 8)
    store(small, LAYOUT, make_key(1), 1)
    small.close(keep=True)
    with monkeypatch.context() as patch:
        patch.setattr(geometry, "SLAB_BYTES", 4 * LAYOUT.block_bytes)
        large = open_tier(tmp_path, 16)
        assert found_keys(large) == set()
        store(large, LAYOUT, make_key(2), 2)
        large.close(keep=True)
    small = open_tier(tmp_path, 8)
    assert found_keys(small) == {make_key(1)}
    small.close(keep=False)


def test_a_tier_that_heals_comes_back_to_its_own_directory(tmp_path: Path) -> None:
    """Though others lie there without an owner, used later."""
    mine, other = open_tier(tmp_path), open_tier(tmp_path)
    store(mine, LAYOUT, make_key(1), 1)
    path = mine.path
    mine._fault.declare("broken by the test")
    assert other.path is not None
    later = other.path / "journal"
    other.close(keep=True)
    os.utime(later, (9e9, 9e9))
    assert heal(mine)
    assert mine.path == path
    assert found_keys(mine) == {make_key(1)}
    mine.close(keep=False)

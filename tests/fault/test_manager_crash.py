"""kill -9 of the manager amid its writes to disk: the next one finds every block byte-exact or not at all."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fault.manager_crash import (
    CHAIN_BLOCKS_MAX,
    DISK_BLOCKS,
    HOST_BLOCKS,
    LAYOUT,
    Engine,
    Findings,
    ManagerProcess,
    make_key,
)
from kvbm.block import BlockKey
from rigs.manager_probe import flip_bits

SEEDS = (1, 2, 3, 4)
KILLS_PER_SEED = 16
COMMITS_MAX = 16
DELAY_S_MAX = 0.02

Starter = Callable[..., tuple[ManagerProcess, Engine]]


class Load:
    """The chains of one seed: which blocks each has, and what was committed in each life of the manager."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.lengths: list[int] = []
        self.committed: list[list[BlockKey]] = []

    def keys(self, chain: int) -> list[BlockKey]:
        return [make_key(self.seed, chain, position) for position in range(self.lengths[chain])]

    def store_some(self, engine: Engine) -> None:
        """Store a new chain, lengthen one, or store again what was lost of one."""
        action = self.chance.random()
        if action < 0.6 or not self.lengths:
            self.lengths.append(self.chance.randint(4, CHAIN_BLOCKS_MAX // 2))
            chain, first = len(self.lengths) - 1, 0
        else:
            chain = self.chance.randrange(len(self.lengths))
            first = self.lengths[chain] if action < 0.8 else 0
            if first:
                self.lengths[chain] = min(CHAIN_BLOCKS_MAX, first + self.chance.randint(1, 8))
        keys = self.keys(chain)
        parent = keys[first - 1] if first else None
        self.committed[-1] += engine.store(parent, keys[first:])

    def run(self, engine: Engine) -> None:
        """Store until the moment of the blow. It often comes at once, and sometimes amid a lookup."""
        self.committed.append([])
        for _ in range(self.chance.randint(1, COMMITS_MAX)):
            self.store_some(engine)
        if self.chance.random() < 0.3:
            engine.begin_lookup(self.keys(self.chance.randrange(len(self.lengths))))
        spin(DELAY_S_MAX * self.chance.random() ** 2)

    def audit(self, engine: Engine) -> Findings:
        """Look up every chain there ever was and compare what comes back."""
        findings = Findings()
        for chain in range(len(self.lengths)):
            engine.check(self.keys(chain), findings)
        return findings


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts one manager after the other on one directory; the last ends with the test."""
    runtime_dir = tempfile.mkdtemp(prefix="kvbm-")  # a short path: a socket's has at most 107 bytes
    managers: list[ManagerProcess] = []

    def start(chance: random.Random, verifies: bool = True) -> tuple[ManagerProcess, Engine]:
        socket_path = f"{runtime_dir}/manager.sock"
        managers.append(ManagerProcess(tmp_path, socket_path, chance, verifies))
        return managers[-1], Engine(socket_path)

    yield start
    for manager in managers:
        if manager.alive:
            manager.kill()
    shutil.rmtree(runtime_dir)


def spin(seconds: float) -> None:
    """The moment of the blow is the point; a timer of the kernel would round it."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_kill_every_block_is_right_or_a_miss(seed: int, start: Starter, tmp_path: Path) -> None:
    """All managers of a seed serve one directory, each taking over what the one killed before left."""
    load, counts = Load(seed), Counter[str]()
    for life in range(KILLS_PER_SEED + 1):
        manager, engine = start(load.chance)
        findings = load.audit(engine)
        where = f"seed {seed}, after kill {life}"
        assert findings.wrong == [], f"{where}: wrong bytes came back"
        assert findings.broken == [], f"{where}: the index promised blocks that were not whole on disk"
        # The newest blocks are the last to be evicted: those that are gone had not reached the disk yet.
        newest = load.committed[-1][-HOST_BLOCKS // 2 :] if life else []
        lost = [key for key in newest if key not in findings.right]
        counts.update(right=len(findings.right), missed=len(findings.missed), lost=len(lost))
        counts.update(half_way=0 < len(lost) < len(newest))
        if life < KILLS_PER_SEED:
            load.run(engine)
            manager.kill()
        engine.close()
    manager.close()
    assert len(list((tmp_path / "cache").iterdir())) == 1, (
        "every manager took the directory of the one before"
    )
    assert counts["right"] > 50 * KILLS_PER_SEED, f"too few blocks were there to be checked: {counts}"
    assert sum(map(len, load.committed)) > DISK_BLOCKS, "the disk never had to give a slot to another block"
    assert counts["half_way"] > 0, f"no kill came while blocks were being written: {counts}"


@pytest.mark.parametrize("verifies", [True, False])
def test_the_audit_notices_wrong_bytes(verifies: bool, start: Starter, tmp_path: Path) -> None:
    """Control: bits flip on disk. A manager that verifies nothing hands them out; ours breaks its promises instead."""
    load = Load(seed=0)
    load.committed.append([])
    manager, engine = start(load.chance, verifies)
    while len(load.committed[-1]) < HOST_BLOCKS // 2:
        load.store_some(engine)
    stored = set(load.committed[-1])
    assert load.audit(engine).right == stored  # and so the manager has read the last commit
    engine.close()
    manager.close()
    flip_bits(tmp_path / "cache", LAYOUT.block_bytes)
    manager, engine = start(load.chance, verifies)
    findings = load.audit(engine)
    engine.close()
    manager.close()
    assert findings.right == set()
    if verifies:
        assert findings.wrong == []
        assert findings.broken
    else:
        assert set(findings.wrong) == stored

"""Library clients in processes of their own, at a manager in another one: shared blocks, and any of them killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the library copies torch tensors; torch is not installed")

import msgspec

import kvbm
from kvbm.settings import Settings
from process.library_child import BLOCKS, load, store, tokens_of
from rigs.checkout import ROOT
from rigs.library import NAMESPACE, layout, new_cache

DEADLINE_S = 60.0
SERVE = """
import sys, msgspec
from kvbm.manager.process import serve
from kvbm.settings import Settings
serve(msgspec.json.decode(sys.argv[2], type=Settings), sys.argv[1])
"""


class Manager:
    """A shared manager of 40 slots, as an operator runs it."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "m.sock")
        settings = Settings(manager=self.path, host_blocks=40, runtime_dir=str(directory), metrics=False)
        command = [sys.executable, "-c", SERVE, self.path, msgspec.json.encode(settings).decode()]
        self.process = subprocess.Popen(command)

    def connect(self) -> kvbm.BlockManager:
        return kvbm.BlockManager.connect(
            self.path, layout(), NAMESPACE, join_timeout_s=DEADLINE_S, reply_timeout_s=DEADLINE_S
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)


class Child:
    """Another client."""

    def __init__(self, path: str) -> None:
        search = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "process.library_child", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": search},
        )
        assert self._answer() == "connected"

    def ask(self, command: str, seed: int) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {seed}\n")
        self.process.stdin.flush()
        return int(self._answer())

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(DEADLINE_S)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path)
    yield manager
    manager.kill()


def test_processes_share_blocks_and_one_that_is_killed_holds_none(manager: Manager) -> None:
    with manager.connect() as ours:
        child = Child(manager.path)
        try:
            assert child.ask("store", 1) == BLOCKS
            assert load(ours, 1) == BLOCKS
            assert store(ours, 1) == 0, "it is held already"
            assert store(ours, 2) == BLOCKS
            assert child.ask("load", 2) == BLOCKS
            assert child.ask("hold", 2) == BLOCKS
            assert leased(ours) == BLOCKS
        finally:
            child.end()
        while leased(ours):
            pass
        for seed in range(10, 20):
            store(ours, seed)  # more than there is room for: what the child held is given up
        assert load(ours, 2) >= 0, "what is left of it is right"
        assert load(ours, 19) == BLOCKS


def leased(manager: kvbm.BlockManager) -> int:
    tiers = manager.status()["tiers"]
    assert isinstance(tiers, dict)
    return int(tiers["host"]["leased"])


def test_a_manager_that_is_killed_costs_misses_and_the_next_one_is_joined(
    manager: Manager, tmp_path: Path
) -> None:
    with manager.connect() as ours:
        assert store(ours, 1) == BLOCKS
        cache = new_cache(1)
        with ours.match(tokens_of(1)) as hit:
            manager.kill()
            assert hit.onboard(cache, range(10, 10 + BLOCKS)) == BLOCKS
        assert load(ours, 1) == 0
        assert store(ours, 1) == 0
        later = Manager(tmp_path)
        try:
            while not ours.status():
                assert later.process.poll() is None
            assert load(ours, 1) == 0, "its memory is new"
            assert store(ours, 1) == BLOCKS
            assert load(ours, 1) == BLOCKS
        finally:
            later.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("shared_library.py", "onboarded 8, equal: True"),
        ("store_library.py", "found 8 blocks in the store and onboarded 8, equal: True"),
        (
            "hybrid_library.py",
            "a boundary at 8 blocks, needed [[0, 1, 2, 3, 4, 5, 6, 7], [6, 7]], equal: True",
        ),
    ],
)
def test_the_example_runs(example: str, says: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / example)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert says in run.stdout

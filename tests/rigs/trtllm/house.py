"""Engines of the double on a real manager process, by the settings of the environment."""

from __future__ import annotations

import random
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from kvbm.trtllm_integration import engine_facts
from rigs.manager_probe import wait_for
from rigs.trtllm import package
from rigs.trtllm.engine import Engine, Request
from rigs.trtllm.model import BLOCK_TOKENS
from rigs.trtllm.ranks import Spec

DEADLINE_S = 30.0


class House:
    """Makes engines and waits until their caches are on; closes them all at the end."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.runtime_dir = str(directory / "run")
        self.model = directory / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"image_token_id": 999}')
        (self.model / "model.bin").write_bytes(b"weights")
        self._monkeypatch = monkeypatch
        self._made: list[Engine] = []
        self.set(
            RUNTIME_DIR=self.runtime_dir,
            CPU_CACHE_OVERRIDE_NUM_BLOCKS="256",
            ONBOARD="always",
            KV_EVENTS_ENABLE_CONSOLIDATOR="0",
        )
        monkeypatch.setenv("PMIX_NAMESPACE", secrets.token_hex(4))
        # A reply that comes late is a miss, and on a busy machine every one could be late.
        monkeypatch.setattr("kvbm.leader.step_budget.STEP_WAIT_S", 5.0)
        # The model's files were written long before this process began, as far as it knows.
        monkeypatch.setattr("kvbm.engine_start.engine_start_s", lambda: time.time() + 60.0)

    def set(self, **variables: str) -> None:
        """Settings of engines that are made from now on, without their prefix."""
        for name, value in variables.items():
            self._monkeypatch.setenv(f"DYN_KVBM_{name}", value)

    def engine(self, ready: bool = True, connected: bool = True, **options: Any) -> Engine:
        """An engine; fields of `Spec` are among the options."""
        fields = {name: options.pop(name) for name in list(options) if name in Spec._fields}
        if fields.get("ranks", 1) > 1:
            # The engine's n-th instance in each of its processes; here the first rank's process has had others.
            self._monkeypatch.setattr(engine_facts, "_instances", {"leader": 0, "worker": 0})
        engine = Engine(Spec(**{"model": str(self.model), **fields}), connected, **options)
        self._made.append(engine)
        if ready and connected:
            wait_for(lambda: is_ready(engine), DEADLINE_S, "the cache is not on")
        return engine

    def close(self) -> None:
        for engine in self._made:
            engine.close()
        package.remove()


def side_of(engine: Engine) -> Any:
    """The scheduler's half, past the guard."""
    side = engine.leader._side
    assert side is not None
    return side


def is_ready(engine: Engine) -> bool:
    with engine.leader._lock:
        side_of(engine).settle()
    return bool(side_of(engine).leader.ready)


def answered(engine: Engine) -> None:
    """Wait until the manager has answered all that it was asked for."""

    def nothing_open() -> bool:
        with engine.leader._lock:
            side_of(engine).settle()
            return not side_of(engine).leader.stores.unanswered

    wait_for(nothing_open, DEADLINE_S, "the manager does not answer")


def settle(engine: Engine) -> None:
    """Wait until all stores are committed or given up."""

    def settled() -> bool:
        with engine.leader._lock:
            return not side_of(engine).settle()

    wait_for(settled, DEADLINE_S, "stores are still under way")


def make_prompts(count: int, blocks: int = 6, seed: int = 1) -> list[list[int]]:
    """Random prompts: so many blocks each, and two tokens more."""
    chance = random.Random(seed)
    return [[chance.randrange(900) for _ in range(blocks * BLOCK_TOKENS + 2)] for _ in range(count)]


def push_out(engine: Engine, seed: int = 99) -> None:
    """Other prompts take all of the device's blocks, and everything is stored."""
    others = make_prompts(4, blocks=8, seed=seed)
    engine.serve(*(Request(900_000 + seed * 10 + n, prompt, 2) for n, prompt in enumerate(others)))
    settle(engine)

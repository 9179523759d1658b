"""Engines for tests: a process in which they are started one after the other, and the answers to compare with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.engine_process import EngineProcess
from engine.launcher import Launcher
from engine.manager_probe import SharedManager
from engine.workload import workload
from kvbm.testing.tiny_model import make_model

REFERENCE_BLOCKS = 2000


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, in fp32."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "tiny", "float32")


@pytest.fixture(scope="session")
def runtime_dir() -> Iterator[Path]:
    """A directory for sockets, with a short path: a socket's has at most 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="kvbm-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EngineProcess]]:
    """The processes of this session by name; ended with it."""
    started: dict[str, EngineProcess] = {}
    yield started
    for process in started.values():
        process.close()


def _process(
    processes: dict[str, EngineProcess], name: str, tmp_path_factory: pytest.TempPathFactory
) -> EngineProcess:
    process = processes.get(name)
    if process is None or not process.alive:
        process = processes[name] = EngineProcess(tmp_path_factory.mktemp("engine"), name)
    return process


@pytest.fixture
def launcher(
    processes: dict[str, EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    runtime_dir: Path,
) -> Iterator[Launcher]:
    """Starts engines; what a test started is stopped at its end."""
    found = Launcher(_process(processes, "engine", tmp_path_factory), model, runtime_dir)
    yield found
    if found.process.alive:
        found.process.stop()


@pytest.fixture
def second_launcher(
    processes: dict[str, EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    runtime_dir: Path,
) -> Iterator[Launcher]:
    """A second process for an engine beside the first."""
    found = Launcher(_process(processes, "second", tmp_path_factory), model, runtime_dir)
    yield found
    if found.process.alive:
        found.process.stop()


@pytest.fixture(scope="session")
def reference(
    processes: dict[str, EngineProcess], tmp_path_factory: pytest.TempPathFactory, model: Path
) -> dict[str, list[int]]:
    """The answers of an engine without KVBM that never evicts and never preempts."""
    process = _process(processes, "engine", tmp_path_factory)
    process.start({"model": str(model), "num_gpu_blocks_override": REFERENCE_BLOCKS}, {})
    answers = process.run(workload())
    process.stop()
    assert answers.preempted == 0
    assert len(answers.outputs) >= 96
    return answers.outputs


@pytest.fixture
def shared_manager(tmp_path: Path, runtime_dir: Path) -> Iterator[Any]:
    """Starts shared managers: `shared_manager("--host-blocks", "600")`, `at` a socket that another one had."""
    managers: list[SharedManager] = []

    def start(*options: str, at: str = "") -> SharedManager:
        path = at or str(runtime_dir / f"shared-{len(managers)}.sock")
        manager = SharedManager(tmp_path, path, *options)
        managers.append(manager)
        return manager

    yield start
    for manager in managers:
        manager.close()

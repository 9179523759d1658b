"""Engines for tests: a process in which they are started one after the other, and the answers to compare with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.engine_process import EngineProcess
from engine.hybrid_models import KINDS, HybridModel, make_hybrid_model
from engine.launcher import Launcher
from engine.model_runners import V1, V2, chosen
from engine.workload import Request, small_workload, workload
from kvbm.testing.tiny_model import make_model
from rigs.manager_probe import SharedManager

REFERENCE_BLOCKS = 2000
TIMEOUT_S, V2_TIMEOUT_S = 300.0, 600.0
"""Beside another engine on two cores the longest tests take two minutes."""

ProcessOf = Callable[[str, str], EngineProcess]


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


@pytest.fixture(scope="session")
def process_of(processes: dict[str, EngineProcess], tmp_path_factory: pytest.TempPathFactory) -> ProcessOf:
    """The process of that name whose engines have that model runner, started if need be."""

    def found(name: str, runner: str) -> EngineProcess:
        process = processes.get(name)
        if process is None or not process.alive:
            process = processes[name] = EngineProcess(tmp_path_factory.mktemp("engine"), name, runner)
        assert process.runner == runner
        return process

    return found


def _launcher(process: EngineProcess, model: Path, runtime_dir: Path) -> Iterator[Launcher]:
    """Starts engines; what a test started is stopped at its end."""
    yield Launcher(process, model, runtime_dir)
    if process.alive:
        process.stop()


@pytest.fixture
def launcher(process_of: ProcessOf, model: Path, runtime_dir: Path) -> Iterator[Launcher]:
    """Starts engines on the chosen model runner."""
    yield from _launcher(process_of(f"engine-{chosen()}", chosen()), model, runtime_dir)


@pytest.fixture
def second_launcher(process_of: ProcessOf, model: Path, runtime_dir: Path) -> Iterator[Launcher]:
    """A second process for an engine beside the first."""
    yield from _launcher(process_of(f"second-{chosen()}", chosen()), model, runtime_dir)


@pytest.fixture
def v2_launcher(process_of: ProcessOf, model: Path, runtime_dir: Path) -> Iterator[Launcher]:
    """Starts engines on V2, whichever runner was chosen."""
    yield from _launcher(process_of(f"engine-{V2}", V2), model, runtime_dir)


def engine_answers(process: EngineProcess, model: Path, requests: list[Request]) -> dict[str, list[int]]:
    """The answers of an engine without KVBM that never evicts and never preempts."""
    process.start({"model": str(model), "num_gpu_blocks_override": REFERENCE_BLOCKS}, {})
    answers = process.run(requests)
    process.stop()
    assert answers.preempted == 0
    assert answers.outputs
    return answers.outputs


@pytest.fixture(scope="session")
def reference(process_of: ProcessOf, model: Path) -> dict[str, list[int]]:
    """The answers to the workload, on the chosen model runner."""
    answers = engine_answers(process_of(f"engine-{chosen()}", chosen()), model, workload())
    assert len(answers) >= (96 if chosen() == V1 else 32)
    return answers


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> HybridModel:
    """The directory of a tiny hybrid model of that kind; each is made once."""
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_hybrid_model(tmp_path_factory.mktemp("hybrid") / "model", KINDS[kind])
        return made[kind]

    return model


@pytest.fixture(scope="session")
def references(process_of: ProcessOf, hybrid_model: HybridModel) -> Callable[[str], dict[str, list[int]]]:
    """The answers to the workload of an engine that never evicts, without us; each model is asked once."""
    known: dict[str, dict[str, list[int]]] = {}

    def reference(kind: str) -> dict[str, list[int]]:
        if kind not in known:
            process = process_of(f"engine-{chosen()}", chosen())
            known[kind] = engine_answers(process, hybrid_model(kind), workload())
            assert len(known[kind]) >= (96 if chosen() == V1 else 32)
        return known[kind]

    return reference


@pytest.fixture(scope="session")
def v1_reference(process_of: ProcessOf, model: Path) -> dict[str, list[int]]:
    """The answers to the small workload, on V1."""
    return engine_answers(process_of(f"engine-{V1}", V1), model, small_workload())


@pytest.fixture(scope="session")
def v2_reference(process_of: ProcessOf, model: Path) -> dict[str, list[int]]:
    """The answers to the small workload, on V2."""
    return engine_answers(process_of(f"engine-{V2}", V2), model, small_workload())


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Engines have more time than other tests. Where V2 was chosen only what starts engines on it is run, with still
    more time: the rest would say the same again."""
    engines = Path(__file__).parent
    if chosen() == V1:
        for item in items:
            if engines in item.path.parents and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        return
    launchers = {"launcher", "second_launcher", "v2_launcher", "v2_reference"}
    rest = [
        item
        for item in items
        if engines in item.path.parents and not launchers & set(getattr(item, "fixturenames", ()))
    ]
    config.hook.pytest_deselected(items=rest)
    items[:] = [item for item in items if item not in rest]
    for item in items:
        item.add_marker(pytest.mark.timeout(V2_TIMEOUT_S))

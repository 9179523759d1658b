"""Engines for tests: a process in which they are started one after the other, and the answers to compare with."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.engine_child import KV_CONNECTOR, Answers
from engine.engine_process import EngineProcess
from engine.manager_probe import Metrics, SharedManager, free_port, private_managers, scrape, wait_for
from engine.workload import workload
from kvbm.testing.tiny_model import make_model

DEVICE_BLOCKS = 48
"""Far too few for the workload: blocks are evicted from the device and requests are preempted all the time."""
REFERENCE_BLOCKS = 2000
GAUGES_S = 0.7
"""Longer than the manager's gauges stay as they are."""


class Launcher:
    """Starts engines with KVBM in one process, and looks at their private managers."""

    def __init__(self, process: EngineProcess, model: Path, runtime_dir: Path) -> None:
        self.process = process
        self._model = model
        self._runtime_dir = runtime_dir
        self.metrics_port = 0

    def start(
        self,
        environment: Mapping[str, str] | None = None,
        transfer: Mapping[str, Any] | None = KV_CONNECTOR,
        **options: Any,
    ) -> EngineProcess:
        """Start an engine with a device cache that is too small; it replaces the one before."""
        self.metrics_port = free_port()
        settings = {
            "DYN_KVBM_RUNTIME_DIR": str(self._runtime_dir),
            "DYN_KVBM_ONBOARD": "always",
            "DYN_KVBM_METRICS": "true",
            "DYN_KVBM_METRICS_PORT": str(self.metrics_port),
            **(environment or {}),
        }
        everything: dict[str, Any] = {
            "model": str(self._model),
            "num_gpu_blocks_override": DEVICE_BLOCKS,
            "kv_transfer_config": dict(transfer) if transfer is not None else None,
        }
        self.process.start({**everything, **options}, settings)
        return self.process

    def stop(self) -> None:
        """End the engine and wait for its private manager's end, so that the next finds the disk tier free."""
        self.process.stop()
        wait_for(lambda: not private_managers(self.process.pid), 20.0, "the private manager stays")

    def metrics(self) -> Metrics:
        """The private manager's metrics."""
        return scrape(self.metrics_port)

    def assert_nothing_held(self) -> None:
        """With no request left no block is leased or being filled. The gauges follow twice a second."""
        time.sleep(GAUGES_S)

        def settled() -> bool:
            metrics = self.metrics()
            held = [f'kvbm_leased_blocks{{tier="{tier}"}}' for tier in ("host", "disk")]
            held += [f'kvbm_pool_blocks{{tier="{tier}",state="filling"}}' for tier in ("host", "disk")]
            return not any(metrics[series] for series in held)

        wait_for(settled, 10.0, "blocks are still held")


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


def differences(reference: Mapping[str, list[int]], answers: Answers, suffix: str = "") -> list[str]:
    """The requests whose answers are not those of the reference."""
    return [name for name, tokens in reference.items() if answers.outputs.get(name + suffix) != tokens]

"""Start an engine with KVBM on a device cache that is too small, and look at its private manager."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine import reach
from engine.engine_child import KV_CONNECTOR, Answers
from engine.engine_process import EngineProcess
from rigs.manager_probe import Metrics, free_port, private_managers, scrape, wait_for

DEVICE_BLOCKS = 48
"""Far too few for the workload: blocks are evicted from the device and requests are preempted all the time."""

READY_S = 60.0
"""Until all ranks are attached to the manager."""

READY_S = 60.0

_starts = itertools.count(1)


class Launcher:
    """Starts engines with KVBM in one process, and looks at their private managers."""

    def __init__(self, process: EngineProcess, model: Path, runtime_dir: Path) -> None:
        self.process = process
        self._model = model
        self._sockets = runtime_dir
        self.runtime_dir = ""
        self.metrics_port = 0

    def start(
        self,
        environment: Mapping[str, str] | None = None,
        transfer: Mapping[str, Any] | None = KV_CONNECTOR,
        with_manager: bool = True,
        **options: Any,
    ) -> EngineProcess:
        """Start an engine with a device cache that is too small; it replaces the one before.

        What it computes before its ranks are attached is not stored. It is waited for, unless no manager is to be had.
        """
        self.metrics_port = free_port()
        # One directory for each engine: nothing that an earlier one left is taken for its own.
        self.runtime_dir = str(self._sockets / f"engine-{next(_starts)}")
        settings = {
            "DYN_KVBM_RUNTIME_DIR": self.runtime_dir,
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
        if with_manager:
            self.process.call(reach.wait_until_ready, READY_S, timeout_s=READY_S + 10.0)
        return self.process

    def stop(self) -> None:
        """End the engine and wait for its private manager's end, so that the next finds the disk tier free."""
        self.process.stop()
        wait_for(lambda: not private_managers(self.runtime_dir), 20.0, "the private manager stays")

    def metrics(self) -> Metrics:
        """The private manager's metrics."""
        try:
            return scrape(self.metrics_port)
        except AssertionError as error:
            raise AssertionError(
                f"{error}; managers that run: {private_managers(self.runtime_dir)}"
            ) from None

    def assert_nothing_held(self) -> None:
        """With no request left no block is leased or being filled."""

        def held() -> dict[str, float]:
            metrics = self.metrics()
            series = [f'kvbm_leased_blocks{{tier="{tier}"}}' for tier in ("host", "disk")]
            series += [f'kvbm_pool_blocks{{tier="{tier}",state="filling"}}' for tier in ("host", "disk")]
            return {name: metrics[name] for name in series if metrics[name]}

        wait_for(lambda: not held(), 10.0, lambda: f"blocks are still held: {held()}")


def differences(reference: Mapping[str, list[int]], answers: Answers, suffix: str = "") -> list[str]:
    """The requests whose answers are not those of the reference."""
    return [name for name, tokens in reference.items() if answers.outputs.get(name + suffix) != tokens]

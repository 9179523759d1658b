"""NVIDIA's Dynamo on this machine, from the scripts of `deploy/launch`: started, waited for, looked into, ended."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbm.demo.server import HOST, Server, free_port
from venvs import ROOT

LAUNCH = ROOT / "deploy" / "launch"
PORTS_APART = 100
"""A worker takes some ports above each of those that it is given."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ROUTED = re.compile(r"with (\d+)/(\d+) blocks overlap")
_TIERS = re.compile(r"Selected worker .*worker_type=(\w+).* host_pinned_blocks=(\d+) disk_blocks=(\d+)")


@dataclass(frozen=True)
class Choice:
    """A router's choice of a worker: the prompt's blocks, how many of them it believed there, as it weighs tiers, and
    which of these in host memory and on disk."""

    blocks: int
    overlap: int
    host: int
    disk: int


class Stack(Server):
    """A script of `deploy/launch`, ready when so many workers of each component (`backend`, `prefill`) serve.

    `environment` is all that the processes get but for ports and discovery, which are the stack's own. Its parts find
    one another through files, or through `services`: `ETCD_ENDPOINTS` and `NATS_SERVER`.
    """

    def __init__(
        self,
        script: str,
        workers: Mapping[str, int],
        environment: Mapping[str, str],
        directory: Path,
        services: Mapping[str, str] | None = None,
        *,
        start_timeout_s: float = 240.0,
        request_timeout_s: float = 120.0,
        while_starting: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Not below `directory`: the path of a socket is 108 bytes at most.
        self._runtime = tempfile.TemporaryDirectory(prefix="kvbm-")
        self.runtime_dir = self._runtime.name
        self._workers = dict(workers)
        self.metrics_port = _free_ports()
        self.discovery = dict(services or _files(directory))
        port = free_port()
        own = {
            "PYTHON": sys.executable,
            "DYN_HTTP_PORT": str(port),
            **self.discovery,
            "XDG_RUNTIME_DIR": self.runtime_dir,
            "EVENTS_PORT": str(_free_ports()),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_ports()),
            "DYN_KVBM_LEADER_ZMQ_PUB_PORT": str(_free_ports() - 1000),
            "DYN_KVBM_METRICS": "true",
            "DYN_KVBM_METRICS_PORT": str(self.metrics_port),
            "DYN_LOG": "debug",
            "NIXL_THREADS": "1",
        }
        super().__init__(
            script,
            ["bash", str(LAUNCH / script)],
            port,
            {**environment, **own},
            directory / "stack.log",
            start_timeout_s=start_timeout_s,
            request_timeout_s=request_timeout_s,
            while_starting=while_starting,
        )

    def stop(self) -> None:
        """End all of it."""
        super().stop()
        self._runtime.cleanup()

    def is_ready(self) -> bool:
        """Whether every worker is known to the frontend."""
        health = json.loads(self.client.page("/health"))
        serving = [
            each["component"] for each in health.get("instances", ()) if each.get("endpoint") == "generate"
        ]
        models = json.loads(self.client.page("/v1/models"))["data"]
        return bool(models) and all(serving.count(name) >= count for name, count in self._workers.items())

    def log(self) -> str:
        """What all processes have written, without colours."""
        return ANSI.sub("", self.log_path.read_text(errors="replace"))

    def choices(self, worker: str = "decode") -> list[Choice]:
        """The router's choices of workers of this kind, in order."""
        found: list[Choice] = []
        tiers: tuple[int, int] | None = None
        for line in self.log().splitlines():
            if match := _TIERS.search(line):
                tiers = (int(match[2]), int(match[3])) if match[1] == worker else None
            elif (match := _ROUTED.search(line)) and tiers is not None:
                found.append(Choice(int(match[2]), int(match[1]), *tiers))
                tiers = None
        return found


def _files(directory: Path) -> dict[str, str]:
    return {
        "DYN_FILE_KV": str(directory / "discovery"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_REQUEST_PLANE": "tcp",
    }


def _free_ports() -> int:
    """A port that is free now, as are, most likely, those above it that a worker takes too."""
    port = free_port()
    return port if 2000 <= port <= 65535 - PORTS_APART else _free_ports()


__all__ = ["HOST", "LAUNCH", "Choice", "Stack"]

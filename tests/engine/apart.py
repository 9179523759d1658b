"""An engine in a network namespace of its own, as on another machine: of ours it reaches what a cable leads to."""

from __future__ import annotations

import ctypes
import os

from engine.engine_child import Child
from engine.launcher import Launcher
from rigs.manager_probe import Metrics, scrape

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h
ENVIRONMENT = {"VLLM_HOST_IP": "127.0.0.1"}
"""For engines there: vLLM finds its own address by a route to the internet otherwise."""


class LauncherApart(Launcher):
    """Starts engines in a process that was moved to a namespace; their managers' metrics are read there."""

    def move(self, namespace: str) -> None:
        """Before the process starts its first engine: threads stay where they are, those made later come along."""
        self.process.call(_enter, namespace, timeout_s=20.0)

    def metrics(self) -> Metrics:
        found: Metrics = self.process.call(_scraped, self.metrics_port, timeout_s=30.0)
        return found


def _enter(child: Child, namespace: str) -> None:
    assert child.engine is None
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def _scraped(child: Child, port: int) -> Metrics:
    return scrape(port)


def network_of(pid: int) -> str:
    """Which network a process is in."""
    return os.readlink(f"/proc/{pid}/ns/net")

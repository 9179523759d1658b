"""Nodes of Ray on one machine, each a raylet with an environment of its own; and a platform of vLLM for them.

vLLM's CPU platform names no device that Ray could count (`ray_device_key` is empty), so its Ray executors refuse it.
The nodes here say that they have GPUs, which nothing uses, and vLLM gets a platform by its own plug-ins: the CPU's,
with that one name. Nothing else of vLLM or Ray is replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rigs.checkout import ROOT
from rigs.manager_probe import free_port, wait_for

PLATFORM = "rigs.ray_platform.CpuUnderRay"
OBJECT_STORE_BYTES = 100_000_000
"""Nothing large goes through it."""
STARTS_MAX = 3
"""Ray ends a node that is not there after 30 s; a busy machine may take longer."""


def platform() -> str:
    """What vLLM's entry point for platforms names."""
    return PLATFORM


def install_platform(directory: Path) -> str:
    """Make a distribution with that entry point in `directory`. The paths that processes need for it, as PYTHONPATH."""
    distribution = directory / "cpu_under_ray-0.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-under-ray\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text(
        f"[vllm.platform_plugins]\ncpu_under_ray = {__name__}:{platform.__name__}\n"
    )
    return os.pathsep.join((str(directory), str(ROOT / "tests"), str(ROOT / "src")))


class RayNode:
    """`ray start --block`, as an operator starts it on a node: the first one, or one that joins that.

    The variables of `environment` are those of this node; ranks on it start with them.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        devices: int,
        environment: Mapping[str, str],
        head: RayNode | None = None,
    ) -> None:
        self.address = head.address if head is not None else f"{host}:{free_port()}"
        self._log_path = directory / f"ray-{host}.log"
        if head is None:
            port = self.address.rpartition(":")[2]
            where = ["--head", f"--port={port}", f"--ray-client-server-port={free_port()}"]
            where += ["--include-dashboard=false", f"--temp-dir={directory / 'ray'}"]
        else:
            where = [f"--address={self.address}"]
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", *where]
        command += [f"--node-ip-address={host}", "--num-cpus=1", f"--num-gpus={devices}"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "RAY_"))}
        for _ in range(STARTS_MAX):
            self._start(command, {**outside, **environment})
            if self.alive:
                return
        raise AssertionError(f"no node of Ray\n{self.log()}")

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it once, and wait until it says that it is there, or has ended."""
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        wait_for(lambda: "--block" in self.log() or not self.alive, 120.0, self.log)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        """Its output so far."""
        return self._log_path.read_text()

    def close(self) -> None:
        """End it, and what it started."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30.0)

"""A manager seen from outside: its metrics, its process, its files."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

PRIVATE_MANAGER = "kvbm.manager.process"


class Metrics(dict[str, float]):
    """One scrape: series as they are written, `name{label="value"}`. What is not exported is 0."""

    def __missing__(self, series: str) -> float:
        return 0.0


def scrape(port: int, timeout_s: float = 20.0) -> Metrics:
    """The metrics of the manager at `port`, waiting for a manager that is being started."""
    text, trouble = "", ""

    def answered() -> bool:
        nonlocal text, trouble
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as reply:
                text = reply.read().decode()
        except OSError as error:
            trouble = repr(error)
            return False
        return True

    wait_for(answered, timeout_s, lambda: f"no metrics at port {port} ({trouble})")
    series = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return Metrics((name, float(value)) for name, value in series)


def wait_for(condition: Callable[[], bool], timeout_s: float, otherwise: str | Callable[[], str]) -> None:
    """Wait until `condition` holds; `otherwise` says what is there instead."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            said = otherwise if isinstance(otherwise, str) else otherwise()
            raise AssertionError(f"{said}, after {timeout_s:g} s")
        time.sleep(0.05)


def free_port() -> int:
    """A port that nobody listens on at the moment, and that the kernel gives to no outgoing connection meanwhile."""
    ports = random.SystemRandom()
    while True:
        port = ports.randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port


def private_managers(runtime_dir: str) -> list[int]:
    """The private managers whose sockets lie in this directory."""
    managers: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if PRIVATE_MANAGER in words and any(word.startswith(f"{runtime_dir}/private-") for word in words):
            managers.append(int(entry.name))
    return managers


class SharedManager:
    """`kvbm manager` as an operator starts it."""

    def __init__(
        self,
        directory: Path,
        socket_path: str,
        *options: str,
        start: Sequence[str] = ("-m", "kvbm.cli.main"),
    ) -> None:
        """`start` is what Python runs in place of the command."""
        self.socket_path = socket_path
        self.metrics_port = free_port()
        self._log_path = directory / f"manager-{self.metrics_port}.log"
        command = [sys.executable, *start, "manager", "--socket", socket_path]
        command += ["--metrics-port", str(self.metrics_port), *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [*command], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        wait_for(lambda: "engines use this manager" in self.log() or not self.alive, 20.0, "no manager")
        assert self.alive, self.log()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def metrics(self) -> Metrics:
        """Its metrics now."""
        return scrape(self.metrics_port)

    def log(self) -> str:
        """Its output so far."""
        return self._log_path.read_text()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait(10.0)

    def close(self) -> None:
        """SIGTERM, and the exit code must be 0."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
            assert self._process.wait(30.0) == 0, self.log()


def flip_bits(directory: Path, stride_bytes: int, offset_bytes: int = 0) -> int:
    """Flip one bit in every `stride_bytes` of all slab files below `directory`; the number of bits flipped."""
    flipped = 0
    for path in sorted(directory.rglob("slab*")):
        with path.open("r+b") as file:
            size = path.stat().st_size
            for offset in range(offset_bytes, size, stride_bytes):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 0x10]))
                flipped += 1
            file.flush()
            os.fsync(file.fileno())
    return flipped

"""One server: started, waited for, and always ended.

The process gets a group of its own, so that ending it ends everything it started (engine core, workers, a private
KVBM manager), also on Ctrl-C and when the experiment fails.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from kvbm.demo.client import Client, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

HOST = "127.0.0.1"
LOG_TAIL_LINES = 30
STOP_GRACE_S = 20.0
KILL_GRACE_S = 10.0
READY_POLL_S = 0.25
ANSI = re.compile(r"\x1b\[[0-9;]*m")


_Own = TypeVar("_Own", bound="Server")


class ServerError(RuntimeError):
    """A server did not start or died. The message ends with the last lines of its log."""


def free_port() -> int:
    """A TCP port that is free on loopback now. Nothing keeps another process from taking it before it is used."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def vllm_command(model: str) -> list[str]:
    """How to serve `model` with vLLM of this very environment.

    The `vllm` script asks for the metadata of a distribution named `vllm`, which the CPU wheel does not have: there
    the same server is started by its module.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    script = Path(sys.executable).with_name("vllm")
    start = (
        [sys.executable, str(script)]
        if script.exists()
        else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    )
    return [*start, "serve", model]


class Server:
    """A process that answers HTTP at a loopback port. Use it in a `with` statement.

    `name` stands in errors. `environment` is all that the process gets. `while_starting` is called with the seconds
    waited.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str],
        log_path: Path,
        *,
        start_timeout_s: float,
        request_timeout_s: float,
        while_starting: Callable[[float], None] | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.port = port
        self.log_path = log_path
        self.client = Client(HOST, port, timeout_s=request_timeout_s)
        self._environment = dict(environment)
        self._start_timeout_s = start_timeout_s
        self._while_starting = while_starting
        self._process: subprocess.Popen[bytes] | None = None
        self.start_s = 0.0

    @property
    def pid(self) -> int | None:
        """Its process, which leads a group of its own; None while it does not run."""
        return self._process.pid if self._process is not None else None

    def is_ready(self) -> bool:
        """Whether it can serve. May raise RequestError while it can't."""
        return self.client.is_ready()

    def __enter__(self: _Own) -> _Own:
        self.launch()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def launch(self) -> None:
        """Start the process, and do not wait for it."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        """Wait for a process that was launched. Raises ServerError when it ends first, or takes too long."""
        started = time.monotonic()
        assert self._process is not None
        while True:
            self.start_s = time.monotonic() - started
            if self._process.poll() is not None:
                raise self.failure(
                    f"{self.name} ended with status {self._process.returncode} before it was ready"
                )
            if self.start_s > self._start_timeout_s:
                raise self.failure(f"{self.name} was not ready after {self._start_timeout_s:.0f} s")
            with contextlib.suppress(RequestError):  # not ready yet
                if self.is_ready():
                    return
            if self._while_starting is not None:
                self._while_starting(self.start_s)
            time.sleep(READY_POLL_S)

    def failure(self, what: str) -> ServerError:
        """An error that says `what` and shows the end of the log."""
        tail = log_tail(self.log_path)
        return ServerError(f"{what}; the last lines of {self.log_path}:\n{tail}")

    def stop(self) -> None:
        """End the process and all it started: asked first, then killed. Safe to call again."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed below
                process.wait(STOP_GRACE_S)
        # Processes left in the group have lost their parent: nobody else would end them.
        _signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + KILL_GRACE_S
        while _group_alive(process.pid) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait(KILL_GRACE_S)


class VllmServer(Server):
    """A running `vllm serve MODEL …` on a loopback port of its own."""

    def __init__(
        self,
        model: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        *,
        start_timeout_s: float,
        request_timeout_s: float,
        while_starting: Callable[[float], None] | None = None,
    ) -> None:
        port = free_port()
        super().__init__(
            "vllm serve",
            [*vllm_command(model), "--host", HOST, "--port", str(port), *arguments],
            port,
            environment,
            log_path,
            start_timeout_s=start_timeout_s,
            request_timeout_s=request_timeout_s,
            while_starting=while_starting,
        )


def _signal_group(group: int, number: Literal[signal.Signals.SIGTERM, signal.Signals.SIGKILL]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(group, number)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, without colours. Empty when there is no log."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(ANSI.sub("", text).splitlines()[-lines:])

"""One server: started, waited for, and always ended, with all that it started (engine core, workers, a manager)."""

from __future__ import annotations

import contextlib
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


def make_vllm_command(model: str, port: int, arguments: Sequence[str]) -> list[str]:
    """What `vllm serve` runs. The script itself needs a distribution named `vllm`, which the CPU wheel is not."""
    serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*serve, "--host", HOST, "--port", str(port), *arguments]


class Server:
    """A process that answers HTTP at a loopback port. Use it in a `with` statement.

    `name` appears in errors. `environment` is the whole environment of the process. `while_starting` is called with the
    seconds waited.
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
        while_starting: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self.name = name
        self.port = port
        self.log_path = log_path
        self.client = Client(HOST, port, timeout_s=request_timeout_s)
        self.start_s = 0.0
        self._command = list(command)
        self._environment = dict(environment)
        self._start_timeout_s = start_timeout_s
        self._while_starting = while_starting
        self._process: subprocess.Popen[bytes] | None = None

    def is_ready(self) -> bool:
        """Whether it can serve. May raise RequestError while it can't."""
        return self.client.is_ready()

    def __enter__(self: _Own) -> _Own:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Raises ServerError when it ends first, or takes too long."""
        started = time.monotonic()
        while True:
            self.start_s = time.monotonic() - started
            if process.poll() is not None:
                raise self.failure(f"{self.name} ended with status {process.returncode} before it was ready")
            if self.start_s > self._start_timeout_s:
                raise self.failure(f"{self.name} was not ready after {self._start_timeout_s:.0f} s")
            with contextlib.suppress(RequestError):  # not ready yet
                if self.is_ready():
                    return
            self._while_starting(self.start_s)
            time.sleep(READY_POLL_S)

    def failure(self, what: str) -> ServerError:
        """An error that says `what` and shows the end of the log."""
        tail = log_tail(self.log_path)
        return ServerError(f"{what}; the last lines of {self.log_path}:\n{tail}")

    def stop(self) -> None:
        """End the process and all it started: SIGTERM first, then SIGKILL. Safe to call again."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed below
                process.wait(STOP_GRACE_S)
        # Processes left in the group have lost their parent.
        _signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + KILL_GRACE_S
        while _group_alive(process.pid) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait(KILL_GRACE_S)


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

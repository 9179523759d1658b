"""The test's side of a process that engines live in: calls with a bound on their time, and its log."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import engine_child
from engine.engine_child import Answers, Child
from engine.model_runners import V1
from engine.workload import Request

START_TIMEOUT_S = 150.0
RUN_TIMEOUT_S = 180.0
V2_RUN_TIMEOUT_S = 240.0
"""Interpreted kernels take their time, above all on two ranks at once."""


class EngineFailed(Exception):
    """The error that was raised in the engine's process, in its words."""


class EngineProcess:
    """A process in which one engine after the other is started; a call that hangs ends it and fails the test."""

    def __init__(self, directory: Path, name: str, runner: str = V1) -> None:
        self.runner = runner
        self.log_path = directory / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=engine_child.main, args=(theirs, str(self.log_path), runner), name=name, daemon=False
        )
        self._process.start()
        theirs.close()
        self._log_from = 0

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float, **keywords: Any) -> Any:
        """`function(child, …)` in the process."""
        self.send(function, *arguments, **keywords)
        return self.receive(timeout_s)

    def send(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Begin a call whose result `receive` fetches."""
        self._connection.send((function, arguments, keywords))

    def receive(self, timeout_s: float) -> Any:
        """The result of the call that `send` began. A call that is broken off, as by the test's time limit, ends the
        process: its answer would be taken for that of the next call."""
        try:
            in_time = self._connection.poll(timeout_s)
        except BaseException:
            self.kill()
            raise
        if not in_time:
            if self.alive:
                os.kill(self.pid, signal.SIGUSR1)
                time.sleep(0.5)
            self.kill()
            raise AssertionError(f"the engine hung for {timeout_s:g} s\n{self.log()[-8000:]}")
        try:
            kind, value = self._connection.recv()
        except EOFError:
            self._process.join(5.0)
            raise AssertionError(
                f"the engine's process died ({self._process.exitcode})\n{self.log()[-8000:]}"
            ) from None
        if kind == "error":
            raise EngineFailed(value)
        return value

    def start(self, options: Mapping[str, Any], environment: Mapping[str, str]) -> float:
        """Start an engine in place of the one before; the seconds it took."""
        self.mark_log()
        seconds: float = self.call(Child.start, dict(options), dict(environment), timeout_s=START_TIMEOUT_S)
        return seconds

    def stop(self) -> None:
        """End the engine and keep the process."""
        self.call(Child.stop, timeout_s=60.0)

    def run(self, requests: Sequence[Request], bound_s: float = 0.0, **keywords: Any) -> Answers:
        """Answer the requests, in so many seconds or in what a runner usually has."""
        bound_s = bound_s or (RUN_TIMEOUT_S if self.runner == V1 else V2_RUN_TIMEOUT_S)
        answers: Answers = self.call(run, list(requests), bound_s, timeout_s=bound_s + 15.0, **keywords)
        return answers

    def mark_log(self) -> None:
        """Forget the log so far."""
        self._log_from = self.log_path.stat().st_size if self.log_path.exists() else 0

    def log(self) -> str:
        """The output of the engine and its manager since the engine's start."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")

    def kill(self) -> None:
        """End the process and what it started, at once."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.join(10.0)
        self._connection.close()

    def close(self) -> None:
        """End the process in good order."""
        if not self.alive:
            return
        self._connection.close()
        self._process.join(30.0)
        if self.alive:
            self.kill()


def run(child: Child, requests: Sequence[Request], timeout_s: float, **keywords: Any) -> Answers:
    """`Engine.run` with a bound on its time."""
    assert child.engine is not None
    return child.engine.run(requests, timeout_s=timeout_s, **keywords)

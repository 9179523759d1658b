"""The test's side of one SGLang engine: its start, calls with a bound on their time, its log, its end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rigs.sglang.installation import environment, sglang_python

CHILD = Path(__file__).parent / "engine_child.py"
START_TIMEOUT_S = 150.0
CALL_TIMEOUT_S = 90.0
LOG_TAIL = 6000


class EngineFailed(Exception):
    """What the engine raised, in its words."""


class Cached(msgspec.Struct, frozen=True):
    """How many tokens of a prompt were found, and where."""

    device: int = 0
    host: int = 0
    storage: int = 0


class Answer(msgspec.Struct, frozen=True, rename={"where": "from"}):
    """One request's answer."""

    tokens: list[int]
    cached: int
    where: Cached
    finish: dict[str, Any]
    seconds: float


class Engine:
    """A process with one SGLang engine; a call that hangs ends it and fails the test."""

    def __init__(
        self, arguments: Mapping[str, Any], log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.log_path = log
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._buffer = b""
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [str(sglang_python()), str(CHILD), str(theirs_in), str(theirs_out)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment(**(variables or {})),
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,
                cwd=log.parent,
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._send(dict(arguments))

    def ready(self) -> Engine:
        """Wait until the engine has started."""
        self.receive(START_TIMEOUT_S)
        return self

    def generate(self, prompts: list[list[int]], tokens: int = 4, **request: Any) -> list[Answer]:
        """Greedy answers to prompts, one after the other."""
        self.begin(prompts, tokens, **request)
        return self.finish()

    def begin(self, prompts: list[list[int]], tokens: int = 4, **request: Any) -> None:
        """Start what `finish` waits for."""
        self._send({"call": "generate", "prompts": prompts, "tokens": tokens, **request})

    def finish(self) -> list[Answer]:
        """The answers that `begin` asked for."""
        return msgspec.convert(self.receive(CALL_TIMEOUT_S), list[Answer])

    def call(self, name: str, **arguments: Any) -> Any:
        """One of the methods of `engine_child.Child`."""
        self._send({"call": name, **arguments})
        return self.receive(CALL_TIMEOUT_S)

    def receive(self, timeout_s: float) -> Any:
        """The answer to what was sent."""
        words = json.loads(self._line(timeout_s))
        if "error" in words:
            raise EngineFailed(words["error"])
        return words["result"]

    def log(self) -> str:
        """What the engine has written so far."""
        return self.log_path.read_text(errors="replace")

    def end(self) -> None:
        """Shut down, and wait until every process of the engine has gone."""
        try:
            if self._process.poll() is None:
                self.call("end")
                self._process.wait(CALL_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End all processes of the engine at once, as a crash would."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(10.0)
        for number in (self._in, self._out):
            if number >= 0:
                os.close(number)
        self._in = self._out = -1

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._in >= 0:
            self.kill()

    def _send(self, words: dict[str, Any]) -> None:
        line = json.dumps(words).encode() + b"\n"
        while line:
            line = line[os.write(self._out, line) :]

    def _line(self, timeout_s: float) -> bytes:
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._in], [], [], timeout_s)
            piece = os.read(self._in, 65536) if readable else b""
            if not piece:
                state = "hung" if not readable else f"ended ({self._process.wait(10.0)})"
                self.kill()
                raise AssertionError(f"the engine {state}\n{self.log()[-LOG_TAIL:]}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

"""The test's side of SGLang engines: their start, calls with a bound on their time, their logs, their end."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rigs.sglang.installation import environment, sglang_python

NURSERY = Path(__file__).parent / "engine_nursery.py"
IMPORT_TIMEOUT_S = 150.0
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
    """One request's answer; `seconds` are from asking to the end, of all that were asked together."""

    tokens: list[int]
    cached: int
    where: Cached
    finish: dict[str, Any]
    seconds: float


class Nursery:
    """Starts engines, each as a fork of one process that has imported SGLang (`engine_nursery`)."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as file:
            self._process = subprocess.Popen(
                [str(sglang_python()), str(NURSERY), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._ready = False

    def start(
        self, arguments: Mapping[str, Any], log: Path, variables: Mapping[str, str] | None = None
    ) -> Engine:
        """An engine that is starting; `Engine.ready` waits for it."""
        if not self._ready:
            assert self._receive(IMPORT_TIMEOUT_S) == b"ready"
            self._ready = True
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        with log.open("ab") as file:
            message = json.dumps(environment(**(variables or {}))).encode()
            socket.send_fds(self._socket, [message], [theirs_in, theirs_out, file.fileno()])
            pid = json.loads(self._receive(CALL_TIMEOUT_S))
        os.close(theirs_in)
        os.close(theirs_out)
        engine = Engine(pid, ours_in, ours_out, log)
        engine.send(dict(arguments))
        return engine

    def close(self) -> None:
        """End the process; its engines end when their lines do."""
        self._socket.close()
        self._process.wait(CALL_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> bytes:
        readable, _, _ = select.select([self._socket], [], [], timeout_s)
        message = self._socket.recv(1 << 16) if readable else b""
        if not message:
            raise AssertionError(
                f"SGLang was not imported\n{self._log.read_text(errors='replace')[-LOG_TAIL:]}"
            )
        return message


class Engine:
    """A process with one SGLang engine; a call that hangs ends it and fails the test."""

    def __init__(self, pid: int, reader: int, writer: int, log: Path) -> None:
        self.pid = pid
        self.log_path = log
        self._in, self._out = reader, writer
        self._buffer = b""

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
        self.send({"call": "generate", "prompts": prompts, "tokens": tokens, **request})

    def finish(self) -> list[Answer]:
        """The answers that `begin` asked for."""
        return msgspec.convert(self.receive(CALL_TIMEOUT_S), list[Answer])

    def call(self, name: str, **arguments: Any) -> Any:
        """One of the methods of `engine_child.Child`."""
        self.send({"call": name, **arguments})
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
            self.call("end")
        finally:
            self.kill()

    def kill(self) -> None:
        """End all processes of the engine at once, as a crash would."""
        if self._in < 0:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.close(self._out)
        # The end of its lines: each process of the engine has this pipe, and all are gone when it ends.
        while os.read(self._in, 65536):
            pass
        os.close(self._in)
        self._in = self._out = -1

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def send(self, words: dict[str, Any]) -> None:
        """One line; `receive` fetches its answer."""
        line = json.dumps(words).encode() + b"\n"
        while line:
            line = line[os.write(self._out, line) :]

    def _line(self, timeout_s: float) -> bytes:
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._in], [], [], timeout_s)
            piece = os.read(self._in, 65536) if readable else b""
            if not piece:
                state = "ended" if readable else f"hung for {timeout_s:g} s"
                self.kill()
                raise AssertionError(f"the engine {state}\n{self.log()[-LOG_TAIL:]}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

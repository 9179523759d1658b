"""Managers as an operator has them: processes of the `kvbm` command, engines attached to them, and the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from kvbm.block import BlockKey
from kvbm.client.channel import Channel
from kvbm.hashing import join_keys
from kvbm.layout import Namespace
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Commit,
    Hello,
    Lookup,
    LookupReply,
    Progress,
    Ready,
    Reserve,
    ReserveReply,
)
from kvbm.settings import SCHEMA, variable
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.host import open_arena
from rigs.manager import NAMESPACE, worker_hello

DEADLINE_S = 60.0


class Engine:
    """A leader and a rank, which store blocks and look them up as an engine's do."""

    def __init__(
        self,
        socket_path: str,
        name: str,
        namespace: Namespace = NAMESPACE,
        device_blocks: int = 0,
        **hello_fields: Any,
    ) -> None:
        """`device_blocks` is what the leader says, `hello_fields` are the rank's."""
        self.leader, self.worker = Channel.connect(socket_path), Channel.connect(socket_path)
        leader = Hello(version=PROTOCOL_VERSION, role="leader", engine=name, device_blocks=device_blocks)
        self.leader.introduce(leader, DEADLINE_S)
        hello = worker_hello(name, namespace=namespace, **hello_fields)
        self.welcome = self.worker.introduce(hello, DEADLINE_S)
        self.memory, generations = open_arena(self.worker.take_fds())
        generations.close()
        self._inbox: deque[Any] = deque()
        assert self.expect(Ready).ready
        self._numbers = iter(range(1, 1000))

    def expect(self, kind: type[Any]) -> Any:
        """The next message of this kind to the leader; those before it are passed over."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            while self._inbox:
                if isinstance(message := self._inbox.popleft(), kind):
                    return message
            assert self.leader.wait(end_s - time.monotonic()), f"no {kind.__name__} came"
            self._inbox.extend(self.leader.receive())

    def store(self, keys: list[BlockKey], tokens: Iterable[int] = ()) -> None:
        """One store from end to end, said to be of these tokens; it can be found when this returns."""
        number = next(self._numbers)
        said = array("I", tokens).tobytes()
        self.leader.send(Reserve(store=number, parent=b"", keys=join_keys(keys), tokens=said))
        size = self.welcome.slot_bytes
        for key, slot in zip(keys, self.expect(ReserveReply).slots, strict=True):
            self.memory[slot * size : (slot + 1) * size] = block_bytes(key, 0, size)
        self.leader.send(Commit(store=number))
        assert len(self.lookup(keys).slots) == len(keys)

    def lookup(self, keys: list[BlockKey]) -> LookupReply:
        """Its lease stays until the engine ends."""
        self.leader.send(Lookup(lookup=next(self._numbers), keys=join_keys(keys)))
        reply: LookupReply = self.expect(LookupReply)
        return reply

    def arrived(self) -> Progress:
        """All blocks of a lookup have come up from disk, or will not."""
        while not (progress := self.expect(Progress)).final:
            pass
        assert isinstance(progress, Progress)
        return progress

    def close(self) -> None:
        self.leader.close()
        self.worker.close()


class Node:
    """A runtime directory with managers in it, and an environment that names nothing else."""

    def __init__(self, directory: Path, **settings: object) -> None:
        ours = {setting.variable for setting in SCHEMA}
        self.environment = {name: value for name, value in os.environ.items() if name not in ours}
        self.runtime_dir = directory / "run"
        self.set(**{"runtime_dir": self.runtime_dir, "host_blocks": 16, "log_level": "warn", **settings})
        self.managers: list[subprocess.Popen[str]] = []
        self.engines: list[Engine] = []

    def set(self, **settings: object) -> None:
        """What managers and commands that start from now on find in their environment."""
        self.environment |= {variable(field): str(value) for field, value in settings.items()}

    def manage(self, name: str = "manager.sock", *words: str, stderr: IO[str] | None = None) -> str:
        """Start `kvbm manager`, which logs to `stderr`; its socket, once it listens."""
        path = str(self.runtime_dir / name)
        command = [sys.executable, "-m", "kvbm.cli.main", "manager", "--socket", path, *words]
        child = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        self.managers.append(child)
        assert child.stdout is not None
        assert path in child.stdout.readline()
        return path

    def engine(
        self,
        socket_path: str,
        name: str = "engine-1",
        namespace: Namespace = NAMESPACE,
        device_blocks: int = 0,
    ) -> Engine:
        self.engines.append(Engine(socket_path, name, namespace, device_blocks))
        return self.engines[-1]

    def kvbm(self, *words: str) -> tuple[int, str, str]:
        """Run a command as a user does: exit status, standard output, standard error."""
        command = [sys.executable, "-m", "kvbm.cli.main", *words]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S
        )
        return done.returncode, done.stdout, done.stderr

    def json(self, *words: str) -> Any:
        """What a command that must succeed prints for a script."""
        code, out, err = self.kvbm(*words, "--json")
        assert (code, err) == (0, ""), (code, out, err)
        return json.loads(out)

    def refused(self, *words: str) -> str:
        """The one line of a command that refuses what it was given."""
        code, out, err = self.kvbm(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        return err.strip()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for child in self.managers:
            child.terminate()
        for child in self.managers:
            child.communicate(timeout=DEADLINE_S)

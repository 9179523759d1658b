"""A node of a fleet as a process: a manager above a store, and clients that act as engines and know every byte."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvbm.block import BlockKey
from kvbm.client.channel import Channel
from kvbm.hashing import chain_keys, join_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Commit,
    FromManager,
    Hello,
    Lookup,
    LookupReply,
    Progress,
    Ready,
    Release,
    Reserve,
    ReserveReply,
)
from kvbm.settings import Settings
from kvbm.testing.oracle import block_bytes
from kvbm.tiers.host import open_arena
from rigs.manager_probe import Metrics, free_port, scrape, wait_for

LAYOUT = BlockLayout(block_tokens=4, shard_bytes=8192)
NAMESPACE = Namespace(model="bad days", fields=(("weights", "aa"),))
CHAIN_BLOCKS = 6
DEADLINE_S = 0.5
"""Of a read from the store, as the nodes' settings have it."""
BOUND_S = 5.0
"""A lookup may end so long after that deadline: what a starved machine takes, and far less than any default."""
PATIENCE_S = 30.0
CHILD = Path(__file__).parent / "remote_node_child.py"

Reply = TypeVar("Reply", bound=FromManager)


def chain(number: int, blocks: int = CHAIN_BLOCKS) -> list[BlockKey]:
    """The keys of a chain; no two chains have a block in common."""
    first = number * 100_000
    return chain_keys(bytes(32), range(first, first + LAYOUT.block_tokens * blocks), LAYOUT.block_tokens)


class Looked(NamedTuple):
    """What a lookup brought. `promised`: blocks of its first answer; `ready`: those that came, verified."""

    ready: int
    promised: int
    seconds: float


class Engine:
    """A leader's session and its one rank's, in this process."""

    _names = itertools.count()

    def __init__(self, socket_path: str, namespace: Namespace = NAMESPACE) -> None:
        name = f"engine-{next(self._names)}"
        self._worker = Channel.connect(socket_path)
        hello = Hello(
            version=PROTOCOL_VERSION, role="worker", engine=name, namespace=namespace, layout=LAYOUT
        )
        welcome = self._worker.introduce(hello, PATIENCE_S)
        self._size = welcome.slot_bytes
        self._memory, generations = open_arena(self._worker.take_fds())
        generations.close()
        self._leader = Channel.connect(socket_path)
        self._leader.introduce(Hello(version=PROTOCOL_VERSION, role="leader", engine=name), PATIENCE_S)
        self._inbox: list[FromManager] = []
        assert self._expect(Ready, PATIENCE_S).ready
        self._number = 0

    def store(self, keys: Sequence[BlockKey], parent: BlockKey | None = None) -> int:
        """Compute blocks and commit them; how many got a slot."""
        self._number += 1
        self._leader.send(Reserve(store=self._number, parent=parent or b"", keys=join_keys(list(keys))))
        slots = self._expect(ReserveReply, PATIENCE_S).slots
        for key, slot in zip(keys, slots, strict=True):
            if slot >= 0:
                self._memory[slot * self._size : (slot + 1) * self._size] = block_bytes(key, 0, self._size)
        stored = sum(slot >= 0 for slot in slots)
        if stored:
            self._leader.send(Commit(store=self._number))
        return stored

    def begin(self, keys: Sequence[BlockKey]) -> tuple[int, float]:
        """Look a chain up, without waiting; `end` has what came of it."""
        self._number += 1
        self._leader.send(Lookup(lookup=self._number, keys=join_keys(list(keys))))
        return self._number, time.monotonic()

    def end(self, begun: tuple[int, float], keys: Sequence[BlockKey], limit_s: float = 0.0) -> Looked:
        """What that lookup brought. Every block that is said to be ready has its bytes; it ends in time."""
        number, begun_s = begun
        limit_s = limit_s or DEADLINE_S + BOUND_S
        until_s = begun_s + limit_s
        reply = self._of(LookupReply, number, until_s)
        ready, final = reply.ready, reply.ready == len(reply.slots)
        while not final:
            progress = self._of(Progress, number, until_s)
            ready, final = progress.ready, progress.final
        seconds = time.monotonic() - begun_s
        for key, slot in zip(keys[:ready], reply.slots, strict=False):
            content = bytes(self._memory[slot * self._size : (slot + 1) * self._size])
            assert content == block_bytes(key, 0, self._size), f"block {key.hex()[:12]} has wrong bytes"
        if reply.slots:
            self._leader.send(Release(lookup=number))
        return Looked(ready, len(reply.slots), seconds)

    def has_ended(self, begun: tuple[int, float]) -> bool:
        """Whether all that this lookup will bring is here by now."""
        self._inbox += self._leader.receive()
        for message in self._inbox:
            if isinstance(message, LookupReply) and message.lookup == begun[0]:
                if message.ready == len(message.slots):
                    return True
            elif isinstance(message, Progress) and message.lookup == begun[0] and message.final:
                return True
        return False

    def look(self, keys: Sequence[BlockKey], limit_s: float = 0.0) -> Looked:
        """Look a chain up and wait for what comes."""
        return self.end(self.begin(keys), keys, limit_s)

    def close(self) -> None:
        """As if the process were killed."""
        self._leader.close()
        self._worker.close()
        self._memory.close()

    def _of(self, kind: type[Any], number: int, until_s: float) -> Any:
        while True:
            message = self._expect(kind, until_s - time.monotonic())
            if message.lookup == number:
                return message

    def _expect(self, kind: type[Reply], seconds: float) -> Reply:
        """The next message of that kind; others stay."""
        until_s = time.monotonic() + seconds
        while True:
            for place, message in enumerate(self._inbox):
                if isinstance(message, kind):
                    del self._inbox[place]
                    return message
            assert self._leader.wait(max(0.0, until_s - time.monotonic())), f"no {kind.__name__} came"
            self._inbox += self._leader.receive()


class Node:
    """A manager in a process of its own."""

    def __init__(
        self,
        directory: Path,
        remote: str,
        options: Mapping[str, Any] | None = None,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """`options` as `remote_node_child` takes them; `prefix`: words before the program."""
        self._runtime_dir = tempfile.mkdtemp(prefix="kvbm-")  # a socket's path has at most 107 bytes
        self._socket_path = f"{self._runtime_dir}/manager.sock"
        self._log_path = directory / f"node-{free_port()}.log"
        self._metrics_port = free_port()
        chosen: dict[str, Any] = {
            "host_blocks": 64,
            "remote_linger_s": 0,
            "remote_deadline_ms": int(1000 * DEADLINE_S),
            "remote_collect": False,
            **settings,
        }
        self.settings = Settings(
            runtime_dir=self._runtime_dir,
            remote=remote,
            metrics=True,
            metrics_host="127.0.0.1",
            metrics_port=self._metrics_port,
            log_level="info",
            **chosen,
        )
        further = {"poll_s": 0.1, "poll_max_s": 0.5, "breaker_wait_s": 0.25, **(options or {})}
        words = [*prefix, sys.executable, str(CHILD), self._socket_path]
        words += [msgspec.json.encode(self.settings).decode(), json.dumps(further)]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**variables, **(environment or {})},
                start_new_session=True,
            )
        assert self._line() == b"listening\n", self.log()
        self.engines: list[Engine] = []

    def engine(self, namespace: Namespace = NAMESPACE) -> Engine:
        """Another client."""
        self.engines.append(Engine(self._socket_path, namespace))
        return self.engines[-1]

    def describe(self) -> dict[str, Any]:
        """What the tier says of itself."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found

    def metrics(self) -> Metrics:
        """The manager's metrics."""
        return scrape(self._metrics_port)

    def wait_until(self, condition: Any, what: str, seconds: float = PATIENCE_S) -> None:
        """Wait until this holds of what the tier says of itself."""
        wait_for(lambda: bool(condition(self.describe())), seconds, lambda: f"{what}: {self.describe()}")

    def wait_until_written(self, blocks: int) -> None:
        """Until so many blocks have been written to the store, since the start."""
        wait_for(
            lambda: self.metrics()["kvbm_offload_blocks_d2o"] >= blocks,
            PATIENCE_S,
            lambda: f"{self.metrics()['kvbm_offload_blocks_d2o']:g} of {blocks} blocks were written",
        )

    def wait_until_knows(self, packs: int) -> None:
        """Until it knows of so many packs."""
        self.wait_until(lambda tier: tier["packs"] >= packs, f"{packs} packs are known")

    def assert_nothing_held(self) -> None:
        """No block is leased or being filled, and no slot is lost."""

        def held() -> dict[str, float]:
            metrics = self.metrics()
            series = ['kvbm_leased_blocks{tier="host"}', 'kvbm_pool_blocks{tier="host",state="filling"}']
            return {name: metrics[name] for name in series if metrics[name]}

        wait_for(lambda: not held(), PATIENCE_S, lambda: f"blocks are still held: {held()}\n{self.log()}")
        metrics = self.metrics()
        states = [
            metrics[f'kvbm_pool_blocks{{tier="host",state="{state}"}}'] for state in ("free", "resident")
        ]
        assert sum(states) == self.settings.host_blocks

    def log(self) -> str:
        """Its output so far."""
        return self._log_path.read_text()

    def wait_killed(self) -> None:
        """Until it has killed itself (see `remote_node_child`)."""
        assert self._process.wait(PATIENCE_S) == -signal.SIGKILL, self.log()
        self._ended()

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._ended()

    def close(self) -> None:
        """SIGTERM, and the exit code must be 0, in bounded time."""
        if self._process.poll() is None:
            self._process.terminate()
            assert self._process.wait(PATIENCE_S) == 0, self.log()
        self._ended()

    def _ended(self) -> None:
        self._process.wait(PATIENCE_S)
        for engine in self.engines:
            engine.close()
        self.engines = []
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        shutil.rmtree(self._runtime_dir, ignore_errors=True)

    def _line(self) -> bytes:
        out = self._process.stdout
        assert out is not None
        assert select.select([out], [], [], PATIENCE_S)[0], f"the node says nothing\n{self.log()}"
        return out.readline()


@contextlib.contextmanager
def ended(nodes: list[Node]) -> Iterator[list[Node]]:
    """Nodes that end with the block: in order where it ended well, killed otherwise."""
    try:
        yield nodes
        for node in nodes:
            node.close()
    finally:
        for node in nodes:
            node.kill()

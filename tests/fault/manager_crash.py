"""A manager in a process of its own, to be killed while it writes to disk, and an engine that knows what it stored."""

from __future__ import annotations

import hashlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from kvbm.block import BlockKey
from kvbm.client.channel import Channel
from kvbm.hashing import join_keys
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
from kvbm.tiers.host import open_arena

LAYOUT = BlockLayout(block_tokens=16, shard_bytes=8000, shard_count=2)
NAMESPACE = Namespace(model="manager crash", fields=())
HOST_BLOCKS = 64
DISK_BLOCKS = 384
DEADLINE_S = 30.0
CHAIN_BLOCKS_MAX = 32

VERIFIES_NOTHING = """
import sys
from kvbm.tiers.disk import block_io

class EqualToAll(bytes):
    __hash__ = bytes.__hash__
    def __eq__(self, other):
        return True

block_io.block_checksum = lambda *_: EqualToAll(16)
from kvbm.cli.main import main
sys.exit(main())
"""
"""A manager that takes every block on disk for whole; only a control starts it."""

Reply = TypeVar("Reply", bound=FromManager)


def make_key(seed: int, chain: int, position: int) -> BlockKey:
    """The key of one block of a seed's chains."""
    return BlockKey(hashlib.sha256(b"manager crash %d %d %d" % (seed, chain, position)).digest())


def make_shards(key: BlockKey) -> list[bytes]:
    """The block of that key, shard by shard, padding included; no page of it is in any other block."""
    content = hashlib.shake_128(key).digest(LAYOUT.block_bytes)
    size = LAYOUT.slot_bytes
    return [content[i * size : (i + 1) * size] for i in range(LAYOUT.shard_count)]


class ManagerProcess:
    """`kvbm manager` on a directory that managers before it may have left behind."""

    def __init__(
        self, directory: Path, socket_path: str, chance: random.Random, verifies: bool = True
    ) -> None:
        """How much goes to disk at one time is left to chance: a kill meets another number of open writes."""
        self._log_path = directory / "manager.log"
        program = ["-m", "kvbm.cli.main"] if verifies else ["-c", VERIFIES_NOTHING]
        options = {
            "--socket": socket_path,
            "--host-blocks": HOST_BLOCKS,
            "--disk-blocks": DISK_BLOCKS,
            "--disk-dir": directory / "cache",
            "--max-concurrent-transfers": chance.choice((1, 2, 4)),
            "--max-transfer-batch-size": chance.choice((2, 8)),
        }
        command = [sys.executable, *program, "manager", "--no-disk-offload-filter"]
        command += [str(word) for option in options.items() for word in option]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        out = self._process.stdout
        assert out is not None
        listening = bool(select.select([out], [], [], DEADLINE_S)[0]) and b"engines use" in out.readline()
        if not listening:
            self.kill()
        assert listening, self.log()

    def log(self) -> str:
        """The output of all managers of this directory."""
        return self._log_path.read_text()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL; nothing of it runs any more on return."""
        self._process.kill()
        self._process.communicate(timeout=DEADLINE_S)
        assert self._process.returncode == -signal.SIGKILL, self.log()

    def close(self) -> None:
        """SIGTERM: what waits for disk is written, and the exit code must be 0."""
        self._process.terminate()
        self._process.communicate(timeout=DEADLINE_S)
        assert self._process.returncode == 0, self.log()


class Shard:
    """One rank's session: its shard of the arena and the generations of the slots, mapped as a worker maps them."""

    def __init__(self, socket_path: str, shard: int) -> None:
        self.channel = Channel.connect(socket_path)
        hello = Hello(
            version=PROTOCOL_VERSION,
            role="worker",
            engine="crash",
            rank=shard,
            rank_count=LAYOUT.shard_count,
            shard=shard,
            namespace=NAMESPACE,
            layout=LAYOUT,
        )
        welcome = self.channel.introduce(hello, DEADLINE_S)
        assert (welcome.slot_count, welcome.slot_bytes) == (HOST_BLOCKS, LAYOUT.slot_bytes)
        fds = self.channel.take_fds()
        self._region, self._table = open_arena(fds)
        self._generations = memoryview(self._table).cast("Q")

    def intact(self, slot: int, generation: int) -> bool:
        """The slot is still the one that was spoken of."""
        return self._generations[slot] == generation

    def write(self, slot: int, content: bytes) -> None:
        start = slot * LAYOUT.slot_bytes
        self._region[start : start + LAYOUT.slot_bytes] = content

    def read(self, slot: int) -> bytes:
        start = slot * LAYOUT.slot_bytes
        return self._region[start : start + LAYOUT.slot_bytes]

    def close(self) -> None:
        self.channel.close()
        self._generations.release()
        self._table.close()
        self._region.close()


class Findings:
    """The results of lookups: blocks by their end."""

    def __init__(self) -> None:
        self.right: set[BlockKey] = set()
        self.wrong: list[BlockKey] = []
        self.missed: list[BlockKey] = []
        self.broken: list[BlockKey] = []
        """Promised from disk and not delivered: a record was there without its bytes."""


class Engine:
    """A leader's session and one of each rank's, in this process."""

    def __init__(self, socket_path: str) -> None:
        self._shards = [Shard(socket_path, shard) for shard in range(LAYOUT.shard_count)]
        self._leader = Channel.connect(socket_path)
        self._leader.introduce(Hello(version=PROTOCOL_VERSION, role="leader", engine="crash"), DEADLINE_S)
        self._inbox: list[FromManager] = []
        assert self._expect(Ready).ready
        self._number = 0

    def close(self) -> None:
        self._leader.close()
        for shard in self._shards:
            shard.close()

    def store(self, parent: BlockKey | None, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Fill what slots there are and commit; the blocks that were committed."""
        self._number += 1
        reserve = Reserve(store=self._number, parent=parent or b"", keys=join_keys(keys))
        self._leader.send(reserve)
        reply = self._expect(ReserveReply)
        given = [(key, slot) for key, slot in zip(keys, reply.slots, strict=True) if slot >= 0]
        for (key, slot), generation in zip(given, reply.generations, strict=True):
            for shard, content in zip(self._shards, make_shards(key), strict=True):
                assert shard.intact(slot, generation)
                shard.write(slot, content)
        if given:
            self._leader.send(Commit(store=self._number))
        return [key for key, _ in given]

    def check(self, keys: Sequence[BlockKey], findings: Findings) -> None:
        """Look up a whole chain, what lies behind a missing block too, and compare all that comes."""
        position = 0
        while position < len(keys):
            position += self._check_run(keys, position, findings)
            if position < len(keys):
                position += 1

    def begin_lookup(self, keys: Sequence[BlockKey]) -> None:
        """Ask, and wait for no answer."""
        self._number += 1
        self._leader.send(Lookup(lookup=self._number, keys=join_keys(keys)))

    def _check_run(self, keys: Sequence[BlockKey], skip: int, findings: Findings) -> int:
        """One lookup; how many blocks it brought. The block after them is noted as missed or broken."""
        self._number += 1
        self._leader.send(Lookup(lookup=self._number, keys=join_keys(keys), skip=skip))
        reply = self._expect(LookupReply)
        ready = reply.ready
        final = ready == len(reply.slots)
        while not final:
            progress = self._expect(Progress)
            if progress.lookup == self._number:
                ready, final = progress.ready, progress.final
        for i in range(ready):
            key, slot, generation = keys[skip + i], reply.slots[i], reply.generations[i]
            whole = True
            for shard, content in zip(self._shards, make_shards(key), strict=True):
                assert shard.intact(slot, generation), "a leased slot changed hands"
                whole = whole and shard.read(slot) == content
                assert shard.intact(slot, generation), "a leased slot changed hands"
            if whole:
                findings.right.add(key)
            else:
                findings.wrong.append(key)
        if skip + ready < len(keys):
            (findings.missed if ready == len(reply.slots) else findings.broken).append(keys[skip + ready])
        if reply.slots:
            self._leader.send(Release(lookup=self._number))
        return ready

    def _expect(self, kind: type[Reply]) -> Reply:
        """The next message of that kind; others before it are dropped."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            while self._inbox:
                message = self._inbox.pop(0)
                if isinstance(message, kind):
                    return message
            assert self._leader.wait(deadline_s - time.monotonic()), f"no {kind.__name__} came"
            self._inbox += self._leader.receive()

"""How long a manager is silent while the file system of its disk is frozen.

    python -m benchmarks.frozen_disk [--seconds 8] [--output DIR]

A client asks for blocks in host memory every 10 ms. Meanwhile blocks are stored and the disk evicts, and every write to
the journal waits at a gate for so many seconds, as after `fsfreeze`. The longest wait for an answer is printed, and
after how many seconds the manager says that the disk is slow.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.manager import LAYOUT, NAMESPACE, ask
from kvbm.block import BlockKey
from kvbm.client.channel import Channel
from kvbm.clock import monotonic
from kvbm.hashing import chain_keys, join_keys
from kvbm.manager import assembly
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.server import Server
from kvbm.manager.traffic import Traffic
from kvbm.observe.metrics import Metrics
from kvbm.present.tables import console, plain_table, save_json
from kvbm.protocol import (
    PROTOCOL_VERSION,
    Commit,
    Hello,
    Lookup,
    LookupReply,
    Ready,
    Release,
    Reserve,
    ReserveReply,
    Welcome,
)
from kvbm.settings import Settings
from kvbm.tiers.disk.syscalls import Syscalls

DISK_BLOCKS, RUN_BLOCKS = 64, 32
EVERY_S = 0.01


class FrozenJournal(Syscalls):
    """The kernel, but writes to the journal wait while it is frozen."""

    def __init__(self) -> None:
        self.thawed = threading.Event()
        self.thawed.set()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not self.thawed.is_set() and "journal" in os.readlink(f"/proc/self/fd/{fd}"):
            self.thawed.wait()
        return super().pwritev(fd, buffers, offset)


class Bench:
    """A manager in a thread, an engine of one rank, and chains of `RUN_BLOCKS` blocks."""

    def __init__(self, directory: Path, kernel: Syscalls) -> None:
        self.kernel = kernel
        assembly.open_disk_tier = partial(assembly.open_disk_tier, syscalls=kernel)
        settings = Settings(
            host_blocks=1024,
            disk_blocks=DISK_BLOCKS,
            disk_dir=str(directory / "disk"),
            disk_admission="all",
            runtime_dir=str(directory),
        )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(directory / "m.sock"))
        listener.listen(16)
        metrics = Metrics()
        spaces = partial(SpaceTable, settings, 1, metrics, monotonic)
        self.server = Server(listener, spaces, Traffic(metrics, settings, monotonic), monotonic)
        self._ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.leader = Channel.connect(str(directory / "m.sock"))
        ask(self.leader, Hello(version=PROTOCOL_VERSION, role="leader", engine="e"), Welcome)
        self.worker = Channel.connect(str(directory / "m.sock"))
        rank = Hello(version=PROTOCOL_VERSION, role="worker", engine="e", namespace=NAMESPACE, layout=LAYOUT)
        self.worker.introduce(rank, 60.0)
        self.numbers = iter(range(1, 1 << 30))
        while not any(isinstance(each, Ready) and each.ready for each in self.leader.receive()):
            time.sleep(EVERY_S)

    def _serve(self) -> None:
        while not self._ended:
            self.server.step()
        self.server.close(keep=False)

    def store(self, chain: int) -> None:
        number, keys = next(self.numbers), self.keys(chain)
        ask(self.leader, Reserve(store=number, parent=b"", keys=join_keys(keys)), ReserveReply)
        self.leader.send(Commit(store=number))

    def keys(self, chain: int) -> list[BlockKey]:
        first = 100_000 * chain
        tokens = range(first, first + RUN_BLOCKS * LAYOUT.block_tokens)
        return chain_keys(bytes(32), tokens, LAYOUT.block_tokens)

    def look_up_s(self, chain: int) -> float:
        """Seconds until the answer."""
        number, begun_s = next(self.numbers), time.monotonic()
        ask(self.leader, Lookup(lookup=number, keys=join_keys(self.keys(chain))), LookupReply)
        waited_s = time.monotonic() - begun_s
        self.leader.send(Release(lookup=number))
        return waited_s

    def close(self) -> None:
        self._ended = True
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="how long the journal is frozen")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    kernel = FrozenJournal()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), kernel)
        for chain in range(2 * DISK_BLOCKS // RUN_BLOCKS):
            bench.store(chain)
        time.sleep(1.0)  # they are written
        side = next(space.disk for _, space in bench.server.spaces)
        assert side is not None
        kernel.thawed.clear()
        begun_s, slow_after_s, waits_s = time.monotonic(), -1.0, list[float]()
        threading.Timer(options.seconds, kernel.thawed.set).start()
        chain = 100
        while (now_s := time.monotonic() - begun_s) < options.seconds + 1.0:
            if now_s > 0.2 * (chain - 100) and not kernel.thawed.is_set():
                chain += 1
                bench.store(chain)
            waits_s.append(bench.look_up_s(0))
            if slow_after_s < 0.0 and getattr(side, "trouble", ""):
                slow_after_s = time.monotonic() - begun_s
            time.sleep(EVERY_S)
        bench.close()
    result = {
        "frozen_s": options.seconds,
        "lookups": len(waits_s),
        "longest_answer_s": max(waits_s),
        "called_slow_after_s": slow_after_s,
    }
    table = plain_table(("measured", "value"), words={"measured"}, title="A frozen disk")
    for name, value in result.items():
        table.add_row(name, f"{value:.3f}")
    console().print(table)
    if options.output is not None:
        save_json(result, options.output / "frozen_disk.json")


if __name__ == "__main__":
    main()

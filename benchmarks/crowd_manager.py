"""The manager in a crowd: many long requests arrive together; the processor time of one turn of its loop.

    python -m benchmarks.crowd_manager [--requests 256] [--chains 7] [--blocks 8192] [--output DIR]

A real leader asks a real manager, in a process of its own, over a socket; host memory holds all chains and a disk lies
below. Four phases: the requests arrive together; single long hits, one after the other; the same chains from disk;
chains are stored although host memory is full and the disk has a backlog. A turn is one `Server.step`, in processor
time of the loop's thread.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.manager import LAYOUT, NAMESPACE, ask
from kvbm.client.channel import Channel
from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.clock import monotonic
from kvbm.hashing import chain_key, join_keys
from kvbm.leader import Leader
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.garbage import collected_when_idle
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
    Progress,
    Ready,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
    Watch,
)
from kvbm.settings import Settings, process_environment

TURN_S_MAX = 0.005
ANSWER_S_MAX = 120.0
QUIET_S = 120.0
LONG_HITS = 40
STORED_CHAINS = 12


class ManagerChild:
    """A manager in a process of its own. It keeps the processor time of every turn until it is asked for them."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(settings.manager)
        listener.listen(16)
        self._process = context.Process(target=_serve, args=(listener, settings, theirs))
        self._process.start()
        theirs.close()
        listener.close()

    def turns(self) -> list[float]:
        """Seconds of processor time of each turn since the last call."""
        self._ours.send("turns")
        times: list[float] = self._ours.recv()
        return times

    def settle(self) -> list[float]:
        """Wait until the manager has nothing left to do. Returns the turns until then."""
        times: list[float] = []
        deadline_s = time.monotonic() + QUIET_S
        while time.monotonic() < deadline_s:
            time.sleep(0.3)
            new = self.turns()
            times += new
            if sum(new) < 0.005:
                break
        return times

    def close(self) -> None:
        self._ours.send("end")
        self._process.join(60.0)
        assert self._process.exitcode == 0, "the manager failed"


def _serve(listener: socket.socket, settings: Settings, commands: Connection) -> None:
    metrics = Metrics()
    spaces = partial(SpaceTable, settings, 1, metrics, monotonic)
    server = Server(listener, spaces, Traffic(metrics, settings, monotonic), monotonic)
    turns: list[float] = []
    asked: list[str] = []
    server.watch_descriptor(commands.fileno(), lambda: asked.append(commands.recv()))
    with collected_when_idle(monotonic) as turn_ended:
        while "end" not in asked:
            began_s = time.thread_time()
            server.step()
            turn_ended(server.idle)
            turns.append(time.thread_time() - began_s)
            if asked == ["turns"]:
                commands.send(turns)
                turns.clear()
                asked.clear()
    server.close(keep=False)


@contextlib.contextmanager
def manager(slots: int, eviction: str) -> Iterator[tuple[ManagerChild, Settings]]:
    """A manager with so many slots in host memory, and twice as many on disk."""
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as directory:
        settings = Settings(
            host_blocks=slots,
            disk_blocks=2 * slots,
            disk_dir=directory,
            runtime_dir=directory,
            manager=f"{directory}/m.sock",
            eviction=eviction,
        )
        child = ManagerChild(settings)
        try:
            yield child, settings
        finally:
            child.close()


class Engine:
    """A rank and, on demand, a leader's bare session: what it sends is what the manager gets."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.finder = ManagerFinder(
            ManagerAddress.of(settings, name), settings, process_environment(), monotonic
        )
        hello = Hello(
            version=PROTOCOL_VERSION, role="worker", engine=name, namespace=NAMESPACE, layout=LAYOUT
        )
        self.worker, _ = self.finder.establish(hello, 60.0, time.sleep)
        self.hello = Hello(version=PROTOCOL_VERSION, role="leader", engine=name)
        self._numbers = iter(range(1, 1 << 30))

    def lead(self) -> Channel:
        self.leader, _ = self.finder.establish(self.hello, 60.0, time.sleep)
        while not any(isinstance(m, Ready) and m.ready for m in self.leader.receive()):
            self.leader.wait(1.0)
        return self.leader

    def store(self, keys: bytes, parent: bytes = b"") -> int:
        """Store a chain behind `parent`; its bytes need not be written. Returns the blocks that got a slot."""
        number = next(self._numbers)
        reply = ask(self.leader, Reserve(store=number, parent=parent, keys=keys), ReserveReply)
        self.leader.send(Commit(store=number))
        return sum(slot >= 0 for slot in reply.slots)

    def hit(self, keys: bytes) -> int:
        """Look a chain up, wait until it is in host memory and release it. Returns the blocks that were found."""
        number = next(self._numbers)
        reply = ask(self.leader, Lookup(lookup=number, keys=keys), LookupReply)
        self._await(number, reply.ready == len(reply.slots))
        self.leader.send(Release(lookup=number, loaded=len(reply.slots), seconds=0.01))
        return len(reply.slots)

    def _await(self, number: int, arrived: bool) -> None:
        """Until the blocks of a lookup that are on disk are in host memory."""
        deadline_s = time.monotonic() + QUIET_S
        while not arrived and time.monotonic() < deadline_s:
            self.leader.wait(1.0)
            told = [m for m in self.leader.receive() if isinstance(m, Progress) and m.lookup == number]
            arrived = any(progress.final for progress in told)
            if not told:  # it may have come together with the answer
                self.leader.send(Watch(lookup=number))
        assert arrived, "blocks did not come from disk"

    def clear_host(self) -> None:
        """Drop all blocks from host memory; those on disk stay."""
        ask(self.leader, Reset(tier="host"), ResetReply)


def chain(number: int, blocks: int) -> list[bytes]:
    keys, parent = [], bytes(32)
    for block in range(blocks):
        parent = chain_key(NAMESPACE.fingerprint, parent, (number, block))
        keys.append(parent)
    return keys


def burst(
    settings: Settings, chains: list[list[bytes]], requests: int, apart_s: float
) -> tuple[Leader, list[str], dict[str, Any]]:
    """All requests arrive at once; each is asked for until it has an answer."""
    engine = Engine(settings, "crowd")
    leader = Leader(engine.finder, engine.hello, LAYOUT.block_tokens, True, monotonic, load_always=True)
    while not leader.ready:
        leader.step((), (), 0, idle=True)
        time.sleep(0.01)
    names = [f"request-{number}" for number in range(requests)]
    began_s = time.perf_counter()
    for number, name in enumerate(names):
        leader.request_added(name, chains[number % len(chains)], b"", 0)
        time.sleep(apart_s)
    arrived_s = time.perf_counter() - began_s
    waiting, found = dict.fromkeys(names), dict.fromkeys(names, 0)
    while waiting and time.perf_counter() - began_s < ANSWER_S_MAX:
        for name in list(waiting):
            answer = leader.matched(name, 0)
            if not answer.later:
                found[name] = answer.blocks
                del waiting[name]
        leader.step((), (), 0, idle=True)
    answered_s = time.perf_counter() - began_s
    return (
        leader,
        names,
        {
            "requests": requests,
            "nothing_found": sum(1 for blocks in found.values() if not blocks),
            "never_answered": len(waiting),
            "arrival_s": arrived_s,
            "answered_s": answered_s,
        },
    )


def distribution(phase: str, turns: list[float]) -> dict[str, Any]:
    """Of a phase's turns, in ms."""
    ordered = sorted(turns)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3

    return {
        "phase": phase,
        "turns": len(turns),
        "p50_ms": statistics.median(ordered) * 1e3,
        "p99_ms": at(0.99),
        "p99.9_ms": at(0.999),
        "max_ms": ordered[-1] * 1e3,
        "cpu_s": sum(turns),
        "ratio": at(0.999) / (TURN_S_MAX * 1e3),
    }


def measure(
    requests: int, chain_count: int, blocks: int, slots: int, eviction: str, apart_s: float
) -> dict[str, Any]:
    """All phases, with one manager."""
    chains = [chain(number, blocks) for number in range(chain_count)]
    joined = [join_keys(keys) for keys in chains]
    new = [join_keys(chain(chain_count + number, blocks)) for number in range(STORED_CHAINS)]
    rows = []
    with manager(slots, eviction) as (child, settings):
        filler = Engine(settings, "filler")
        filler.lead()
        for keys in joined:
            assert filler.store(keys) == blocks, "the pool is too small"
        child.settle()
        leader, names, crowd = burst(settings, chains, requests, apart_s)
        turns = child.turns()
        for name in names:
            leader.finished(name, 1)
            leader.step((), (), 0, idle=False)
        rows.append(distribution("requests together", turns + child.settle()))
        leader.close()
        turns = child.settle()
        for number in range(LONG_HITS):
            assert filler.hit(joined[number % chain_count]) == blocks
            time.sleep(0.02)
        rows.append(distribution("single long hits", child.turns() + child.settle()))
        filler.clear_host()
        child.settle()
        for keys in joined:
            assert filler.hit(keys) == blocks, "not all of the chain is on disk"
        rows.append(distribution("long hits from disk", child.turns() + child.settle()))
        for keys in new:
            filler.store(keys)
            filler.hit(keys)  # the second offer: the disk filter lets the chain in
            filler.hit(keys)
        rows.append(distribution("stores at a full pool", child.turns() + child.settle()))
    return {"crowd": crowd, "turns": rows, "eviction": eviction}


def render(found: dict[str, Any]) -> list[Table]:
    """A ratio of at most 1 is within the budget."""
    crowd = plain_table(
        ("requests", "nothing found", "never answered", "arrival, s", "all answered, s"),
        title="Requests that arrive together",
    )
    row = found["crowd"]
    crowd.add_row(
        *map(str, (row["requests"], row["nothing_found"], row["never_answered"])),
        *(f"{row[name]:.2f}" for name in ("arrival_s", "answered_s")),
    )
    names = ("turns", "p50_ms", "p99_ms", "p99.9_ms", "max_ms", "cpu_s", "ratio")
    turns = plain_table(
        ("phase", *names),
        words={"phase"},
        title=f"Processor time of one turn (p99.9 against {TURN_S_MAX * 1e3:g} ms), eviction {found['eviction']}",
    )
    for row in found["turns"]:
        turns.add_row(row["phase"], *(f"{row[name]:.4g}" for name in names))
    return [crowd, turns]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--chains", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=8192, help="of a chain")
    parser.add_argument("--slots", type=int, default=66_000, help="of host memory")
    parser.add_argument("--apart", type=float, default=0.0, help="ms between two arrivals")
    parser.add_argument("--eviction", default=Settings().eviction)
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    found = measure(
        options.requests,
        options.chains,
        options.blocks,
        options.slots,
        options.eviction,
        options.apart / 1e3,
    )
    save_json(found, options.output / "crowd_manager.json")
    for table in render(found):
        console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

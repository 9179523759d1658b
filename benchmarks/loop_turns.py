"""The manager's loop at a million blocks: processor time of one turn, for the messages that have the most blocks.

    python -m benchmarks.loop_turns [--blocks 1000000] [--tenants 50] [--output DIR]

A real manager in a process of its own, over its socket. First without a disk: chains of 65,536 blocks, half of one in a
message, are stored into free slots and again by many tenants at a full pool; they are looked up, held by thousands of
leases whose engine goes, and reset. Then a namespace whose directory on disk has as many blocks starts, and is reset
while it does. A turn is one `Server.step`, in processor time of the loop's thread; `longest_s` is the longest wait of
another client for an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.crowd_manager import TURN_S_MAX, Engine, ManagerChild, chain, distribution
from benchmarks.manager import LAYOUT, NAMESPACE, ask
from kvbm.block import KEY_BYTES, SlotIndex
from kvbm.client.channel import Channel
from kvbm.hashing import join_keys
from kvbm.present.tables import console, plain_table, save_json
from kvbm.protocol import (
    KEYS_PER_MESSAGE_MAX,
    PROTOCOL_VERSION,
    STORED_KEYS_MAX,
    Commit,
    Hello,
    Lookup,
    LookupReply,
    Release,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
    Status,
    StatusQuery,
)
from kvbm.settings import Settings
from kvbm.tiers.disk.block_io import disk_namespace
from kvbm.tiers.disk.directory import JOURNAL_NAME
from kvbm.tiers.disk.journal import BlockRecord, encode_record
from kvbm.tiers.disk.tier import open_disk_tier

CHAIN_BLOCKS = KEYS_PER_MESSAGE_MAX
LEASES = 1000
LEASE_BLOCKS = 1024
PROBE_S = 0.005


class Probe:
    """Another client, which asks for the status all the time while a phase runs: how long it waits at most."""

    def __init__(self, settings: Settings) -> None:
        self._engine = Engine(settings, "probe")
        self._channel = self._engine.lead()

    @contextlib.contextmanager
    def asking(self, row: dict[str, Any]) -> Iterator[None]:
        """Note the longest wait in the row."""
        end, waits_s = threading.Event(), [0.0]

        def ask_again() -> None:
            while not end.wait(PROBE_S):
                began_s = time.perf_counter()
                ask(self._channel, StatusQuery(), Status)
                waits_s.append(time.perf_counter() - began_s)

        thread = threading.Thread(target=ask_again)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
            row["longest_ms"] = max(waits_s) * 1e3


class Phases:
    """The phases by name, each with its turns and what else was measured of it."""

    def __init__(self, child: ManagerChild, probe: Probe | None) -> None:
        self._child, self._probe = child, probe
        self.rows: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._child.settle()
        row: dict[str, Any] = {"longest_ms": 0.0}
        began_s = time.perf_counter()
        with self._probe.asking(row) if self._probe is not None else contextlib.nullcontext():
            yield
            row["seconds"] = time.perf_counter() - began_s
        self.rows.append({**row, **distribution(name, self._child.turns() + self._child.settle())})


@contextlib.contextmanager
def running(settings: Settings) -> Iterator[ManagerChild]:
    child = ManagerChild(settings)
    try:
        yield child
    finally:
        child.close()


def in_host_memory(blocks: int, tenants: int, eviction: str, directory: str) -> list[dict[str, Any]]:
    """All phases without a disk."""
    settings = Settings(
        host_blocks=blocks, runtime_dir=directory, manager=f"{directory}/m.sock", eviction=eviction
    )
    count = blocks // CHAIN_BLOCKS
    chains = [join_keys(chain(number, CHAIN_BLOCKS)) for number in range(2 * count)]
    with running(settings) as child:
        filler = Engine(settings, "filler")
        leader = filler.lead()
        probe = Probe(settings)
        phases = Phases(child, probe)
        with phases.phase("stores into free slots"):
            for keys in chains[:count]:
                for start in range(0, len(keys), KEY_BYTES * STORED_KEYS_MAX):
                    filler.store(keys[start : start + KEY_BYTES * STORED_KEYS_MAX], keys[:start][-KEY_BYTES:])
        with phases.phase(f"stores at a full pool, {tenants} tenants"):
            for number in range(tenants):
                few = chains[count - 1][: KEY_BYTES * (number + 1)]
                leader.send(Lookup(lookup=1 << 20 | number, keys=few, tenant=f"tenant-{number}"))
            for number, keys in enumerate(chains[count:]):
                _store_for(leader, number, keys, f"tenant-{number % tenants}")
        with phases.phase(f"hits of {CHAIN_BLOCKS:,} blocks"):
            for keys in chains[count:]:
                filler.hit(keys)
        other = Engine(settings, "other")
        going = other.lead()
        with phases.phase(f"{LEASES:,} leases end with their engine"):
            for number in range(LEASES):
                ask(going, Lookup(lookup=number, keys=chains[-1][: KEY_BYTES * LEASE_BLOCKS]), LookupReply)
            going.close()
            other.worker.close()
        with phases.phase(f"reset of {blocks:,} blocks"):
            ask(operator(filler), Reset(), ResetReply)
    return phases.rows


def operator(engine: Engine) -> Channel:
    """A session that resets all engines."""
    return engine.finder.establish(Hello(version=PROTOCOL_VERSION, role="admin"), 60.0, time.sleep)[0]


def _store_for(leader: Channel, number: int, keys: bytes, tenant: str) -> None:
    for start in range(0, len(keys), KEY_BYTES * STORED_KEYS_MAX):
        store, before = 1 << 20 | number << 1 | (start > 0), keys[:start][-KEY_BYTES:]
        part = keys[start : start + KEY_BYTES * STORED_KEYS_MAX]
        ask(leader, Reserve(store=store, parent=before, keys=part, tenant=tenant), ReserveReply)
        leader.send(Commit(store=store))


def fill_directory(directory: str, blocks: int) -> list[list[bytes]]:
    """A tier of so many blocks as a manager leaves it, but for their bytes. Returns the chains."""
    tier = open_disk_tier(directory, LAYOUT, NAMESPACE, capacity_blocks=blocks)
    path = tier.path
    assert path is not None
    tier.close(keep=True)
    fingerprint = disk_namespace(NAMESPACE, "").fingerprint
    chains = [chain(number, CHAIN_BLOCKS) for number in range(blocks // CHAIN_BLOCKS)]
    with (path / JOURNAL_NAME).open("r+b") as journal:
        for number, keys in enumerate(chains):
            records = []
            for place, key in enumerate(keys):
                slot = SlotIndex(number * CHAIN_BLOCKS + place)
                record = BlockRecord(
                    slot=slot,
                    key=key,
                    parent=keys[place - 1] if place else None,
                    checksum=bytes(16),
                    length=LAYOUT.block_bytes,
                    sequence=slot + 1,
                )
                records.append(encode_record(record, fingerprint))
            journal.write(b"".join(records))
    return chains


def on_disk(blocks: int, eviction: str, directory: str) -> list[dict[str, Any]]:
    """A start over a full directory, and a reset."""
    settings = Settings(
        host_blocks=CHAIN_BLOCKS,
        disk_blocks=blocks,
        disk_dir=directory,
        runtime_dir=directory,
        manager=f"{directory}/m.sock",
        eviction=eviction,
    )
    chains = fill_directory(directory, blocks)
    with running(settings) as child:
        phases = Phases(child, None)
        first_s = all_s = 0.0
        with phases.phase(f"start over {blocks:,} blocks on disk"):
            began_s = time.perf_counter()
            engine = Engine(settings, "filler")
            leader = engine.lead()
            waiting = dict(enumerate(chains))
            while waiting:
                for number, keys in list(waiting.items()):
                    reply = ask(leader, Lookup(lookup=1 << 16 | number, keys=keys[-1]), LookupReply)
                    leader.send(Release(lookup=1 << 16 | number))
                    if reply.slots or reply.refused:
                        del waiting[number]
                        first_s = first_s or time.perf_counter() - began_s
                time.sleep(PROBE_S)
            all_s = time.perf_counter() - began_s
        phases.rows[-1] |= {"first_hit_s": first_s, "all_found_s": all_s}
        with phases.phase(f"reset of {blocks:,} blocks on disk"):
            ask(leader, Reset(), ResetReply)
    return phases.rows


def render(found: list[dict[str, Any]], eviction: str) -> list[Table]:
    """A ratio of at most 1 is within the budget; it is that of the longest turn."""
    names = ("turns", "p50_ms", "p99.9_ms", "max_ms", "cpu_s", "seconds", "longest_ms")
    turns = plain_table(
        ("phase", *names, "ratio"),
        words={"phase"},
        title=f"Processor time of one turn (longest against {TURN_S_MAX * 1e3:g} ms), eviction {eviction}",
    )
    for row in found:
        ratio = row["max_ms"] / (TURN_S_MAX * 1e3)
        turns.add_row(row["phase"], *(f"{row[name]:.4g}" for name in names), f"{ratio:.2f}")
    starts = plain_table(("start", "first hit, s", "all found, s"), words={"start"})
    for row in found:
        if "first_hit_s" in row:
            starts.add_row(row["phase"], f"{row['first_hit_s']:.2f}", f"{row['all_found_s']:.2f}")
    return [turns, starts]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000 // CHAIN_BLOCKS * CHAIN_BLOCKS)
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--eviction", default=Settings().eviction)
    parser.add_argument("--only", choices=("host", "disk"))
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    found = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as directory:
        if options.only != "disk":
            found += in_host_memory(options.blocks, options.tenants, options.eviction, directory)
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as directory:
        if options.only != "host":
            found += on_disk(options.blocks, options.eviction, directory)
    save_json(found, options.output / "loop_turns.json")
    for table in render(found, options.eviction):
        console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

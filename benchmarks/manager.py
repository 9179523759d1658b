"""What the manager costs: a lookup over the socket, the index per block, an idle engine step, the engine's start.

python -m benchmarks.manager [--blocks 1000000]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kvbm.block import Tier
from kvbm.client.channel import Channel
from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.hashing import chain_key, derive_key, join_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.leader import Leader
from kvbm.manager.pool import SlotPool
from kvbm.policy import LeafFirstLru
from kvbm.present.tables import console, plain_table, save_json
from kvbm.protocol import PROTOCOL_VERSION, Commit, Hello, Lookup, LookupReply, Release, Reserve, ReserveReply
from kvbm.settings import Settings, process_environment
from kvbm.step_plan import StepPlan
from kvbm.transfer import DeviceCache
from kvbm.worker import Worker

RUN_KEYS = 8192
CHAIN_BLOCKS = 8192
LAYOUT = BlockLayout(block_tokens=16, shard_bytes=4096)
NAMESPACE = Namespace(model="bench", fields=())


def index_bytes_per_block(blocks: int) -> float:
    """Python memory of the index of a full tier, its keys included, per block."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    pool = SlotPool(Tier.HOST, blocks, LeafFirstLru(blocks))
    parent = None
    for number in range(blocks):
        if number % CHAIN_BLOCKS == 0:
            parent = None
        key = derive_key(NAMESPACE.fingerprint, number.to_bytes(8, "little"))
        slot = pool.reserve(key, parent, float(number))
        assert slot is not None
        pool.commit(slot)
        parent = key
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / blocks


def connect(directory: str, blocks: int) -> tuple[Channel, Channel]:
    """A worker's and a leader's session with a private manager in a process of its own."""
    settings = Settings(host_blocks=blocks, runtime_dir=directory)
    address = ManagerAddress.of(settings, "bench")
    finder = ManagerFinder(address, settings, process_environment(), time.monotonic)
    worker = Hello(
        version=PROTOCOL_VERSION, role="worker", engine="bench", namespace=NAMESPACE, layout=LAYOUT
    )
    leader = Hello(version=PROTOCOL_VERSION, role="leader", engine="bench")
    attached, _ = finder.establish(worker, 60.0, time.sleep)
    return attached, finder.establish(leader, 60.0, time.sleep)[0]


def ask(channel: Channel, message: Any, answer: type) -> Any:
    """Send a message and wait for its answer."""
    channel.send(message)
    while True:
        channel.wait(10.0)
        for reply in channel.receive():
            if isinstance(reply, answer):
                return reply


def lookup_times_s(leader: Channel, blocks: int, rounds: int) -> list[float]:
    """Round trips of a lookup that hits `RUN_KEYS` blocks, with `blocks` blocks resident."""
    chains: list[bytes] = []
    for chain in range(blocks // CHAIN_BLOCKS):
        keys, parent = [], bytes(32)
        for number in range(CHAIN_BLOCKS):
            parent = chain_key(NAMESPACE.fingerprint, parent, (chain, number))
            keys.append(parent)
        chains.append(join_keys(keys))
        reply = ask(leader, Reserve(store=chain, parent=b"", keys=chains[-1]), ReserveReply)
        assert min(reply.slots) >= 0, "the pool is too small"
        leader.send(Commit(store=chain))
    times = []
    for number in range(rounds):
        started = time.perf_counter()
        reply = ask(leader, Lookup(lookup=number + 1, keys=chains[number % len(chains)]), LookupReply)
        times.append(time.perf_counter() - started)
        assert len(reply.slots) == RUN_KEYS
        leader.send(Release(lookup=number + 1))
        time.sleep(0.02)
    return times


def idle_leader_step_s(directory: str, rounds: int) -> float:
    """An engine step with nothing to do, on the scheduler's side, with a manager attached."""
    settings = Settings(host_blocks=64, runtime_dir=directory)
    finder = ManagerFinder(
        ManagerAddress.of(settings, "bench-idle"), settings, process_environment(), time.monotonic
    )
    worker = Hello(
        version=PROTOCOL_VERSION, role="worker", engine="bench-idle", namespace=NAMESPACE, layout=LAYOUT
    )
    attached, _ = finder.establish(worker, 60.0, time.sleep)
    hello = Hello(version=PROTOCOL_VERSION, role="leader", engine="bench-idle")
    leader = Leader(finder, hello, 16, promise_early=True, clock=time.monotonic)
    while not leader.ready:
        leader.step((), (), 0, idle=True)
        time.sleep(0.01)
    started = time.perf_counter()
    for _ in range(rounds):
        leader.step((), (), 0, idle=True)
        leader.updated(None, (), set())
    seconds = (time.perf_counter() - started) / rounds
    leader.close()
    attached.close()
    return seconds


def new_worker(directory: str, engine: str, host_blocks: int, shard_bytes: int) -> Worker:
    """A rank with one layer of KV, not yet attached to its private manager."""
    kv = {"layer": torch.zeros(4, shard_bytes // 8, dtype=torch.float64)}
    cache = DeviceCache.from_tensors(kv, 4)
    settings = Settings(host_blocks=host_blocks, runtime_dir=directory)
    finder = ManagerFinder(
        ManagerAddress.of(settings, engine), settings, process_environment(), time.monotonic
    )
    layout = BlockLayout(block_tokens=16, shard_bytes=cache.shard_bytes)
    hello = Hello(version=PROTOCOL_VERSION, role="worker", engine=engine, namespace=NAMESPACE, layout=layout)
    return Worker(finder, hello, cache, stores_here=True)


def idle_worker_step_s(directory: str, rounds: int) -> float:
    """An engine step with nothing to do, on a rank's side, with a manager attached."""
    worker = new_worker(directory, "bench-worker", 64, LAYOUT.shard_bytes)
    worker.attach(60.0)
    worker.start()
    plan = StepPlan()
    started = time.perf_counter()
    for _ in range(rounds):
        worker.store(plan)
        worker.load(plan)
        worker.finished(plan)
        worker.report()
    seconds = (time.perf_counter() - started) / rounds
    worker.close()
    return seconds


def attach_s(directory: str, engine: str, host_bytes: int) -> float:
    """How long a rank waits for its manager's start and memory; the pages are touched afterwards."""
    shard_bytes = 2 << 20
    worker = new_worker(directory, engine, host_bytes // shard_bytes, shard_bytes)
    started = time.perf_counter()
    worker.attach(60.0)
    seconds = time.perf_counter() - started
    worker.close()
    return seconds


def rows(blocks: int) -> list[dict[str, Any]]:
    """What, budget, measured; times in ms, memory in bytes."""
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as directory:
        os.chmod(directory, 0o700)
        worker, leader = connect(directory, blocks)
        lookup_s = statistics.median(lookup_times_s(leader, blocks, rounds=30))
        leader.close()
        worker.close()
        step_s = idle_leader_step_s(directory, rounds=2000)
        worker_step_s = idle_worker_step_s(directory, rounds=2000)
        small_s = min(attach_s(directory, f"bench-small-{i}", 64 << 20) for i in range(3))
        large_s = min(attach_s(directory, f"bench-large-{i}", 8 << 30) for i in range(3))
    return [
        {
            "what": f"lookup of {RUN_KEYS} keys, {blocks:,} blocks resident, round trip",
            "unit": "ms",
            "budget": 3.0,
            "measured": lookup_s * 1e3,
        },
        {
            "what": f"index, {blocks:,} blocks",
            "unit": "bytes/block",
            "budget": 200.0,
            "measured": index_bytes_per_block(blocks),
        },
        {"what": "idle engine step, leader", "unit": "us", "budget": 50.0, "measured": step_s * 1e6},
        {"what": "idle engine step, rank", "unit": "us", "budget": 50.0, "measured": worker_step_s * 1e6},
        {
            "what": "engine start, 8 GiB of host memory against 64 MiB",
            "unit": "ms",
            "budget": 200.0,
            "measured": (large_s - small_s) * 1e3,
        },
    ]


def render(found: list[dict[str, Any]]) -> Table:
    """A ratio of at most 1 is within the budget."""
    columns = ("what", "unit", "budget", "measured", "ratio")
    table = plain_table(columns, words={"what", "unit"}, title="The manager")
    for row in found:
        ratio = row["measured"] / row["budget"]
        table.add_row(
            row["what"], row["unit"], f"{row['budget']:g}", f"{row['measured']:.3g}", f"{ratio:.2f}"
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000 // CHAIN_BLOCKS * CHAIN_BLOCKS)
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    found = rows(options.blocks)
    save_json(found, options.output / "manager.json")
    console().print(render(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

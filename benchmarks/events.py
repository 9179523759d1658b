"""What it costs a manager to publish KV events: stores of new blocks with and without, in turn.

    python -m benchmarks.events [--rounds 5] [--output DIR]

One leader stores chains of 256 blocks of 16 tokens at a manager in a process of its own, and host memory is full after
the first of them: each block that comes evicts one. The manager's processor time tells what is its own; both threads of
it count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from benchmarks.manager import LAYOUT, NAMESPACE, ask
from kvbm.admin_protocol import Describe, Description
from kvbm.client.admin import Admin
from kvbm.client.channel import Channel
from kvbm.client.finder import ManagerAddress, ManagerFinder
from kvbm.hashing import chain_keys, join_keys
from kvbm.present.tables import console, plain_table, save_json
from kvbm.protocol import PROTOCOL_VERSION, Commit, Hello, Reserve, ReserveReply
from kvbm.settings import Settings, process_environment

CHAINS, CHAIN_BLOCKS = 600, 256
HOST_BLOCKS = 8 * CHAIN_BLOCKS
MODES = ("off", "on, nobody listens", "on, one subscriber")


def main() -> None:
    """Print the medians of all rounds, and write every round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("bench-output"))
    options = parser.parse_args()
    rows = [measured(mode) for _ in range(options.rounds) for mode in MODES]
    table = plain_table(("events", "blocks/s", "manager's processor µs a block"), words={"events"})
    for mode in MODES:
        of_mode = [row for row in rows if row["events"] == mode]
        wall, own = (statistics.median(row[name] for row in of_mode) for name in ("blocks_per_s", "cpu_us"))
        table.add_row(mode, f"{wall:,.0f}", f"{own:.1f}")
    console().print(table)
    options.output.mkdir(parents=True, exist_ok=True)
    save_json({"events": rows}, options.output / "events.json")


def measured(mode: str) -> dict[str, Any]:
    """One round with a manager of its own."""
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as directory:
        os.chmod(directory, 0o700)
        endpoint = f"ipc://{directory}/e" if mode != "off" else None
        settings = Settings(host_blocks=HOST_BLOCKS, runtime_dir=directory, events_endpoint=endpoint)
        worker, leader, pid = connect(settings)
        with subscribed(endpoint if mode == MODES[2] else None):
            keys = list(chain_keys(NAMESPACE.fingerprint, range(CHAINS * CHAIN_BLOCKS * 16), 16))
            spent_s, began_s = processor_s(pid), time.perf_counter()
            for number in range(CHAINS):
                store(leader, number, keys[number * CHAIN_BLOCKS :][:CHAIN_BLOCKS], endpoint is not None)
            seconds, spent_s = time.perf_counter() - began_s, processor_s(pid) - spent_s
        leader.close()
        worker.close()
    blocks = CHAINS * CHAIN_BLOCKS
    return {"events": mode, "blocks_per_s": blocks / seconds, "cpu_us": spent_s / blocks * 1e6}


def connect(settings: Settings) -> tuple[Channel, Channel, int]:
    """A rank's and a leader's session, and the process of their manager."""
    address = ManagerAddress.of(settings, "bench")
    finder = ManagerFinder(address, settings, process_environment(), time.monotonic)
    hello = Hello(version=PROTOCOL_VERSION, role="worker", engine="bench", namespace=NAMESPACE, layout=LAYOUT)
    worker, _ = finder.establish(hello, 60.0, time.sleep)
    leader, welcome = finder.establish(
        Hello(version=PROTOCOL_VERSION, role="leader", engine="bench"), 60.0, time.sleep
    )
    assert welcome.events is (settings.events_endpoint is not None)
    with Admin(address.socket_path, settings) as admin:
        return worker, leader, admin.ask(Describe(), Description).pid


def store(leader: Channel, number: int, keys: list[bytes], said: bool) -> None:
    """A chain, with its tokens where they are asked for."""
    tokens = bytes(len(keys) * LAYOUT.block_tokens * 4) if said else b""
    reply = ask(leader, Reserve(store=number, parent=b"", keys=join_keys(keys), tokens=tokens), ReserveReply)
    assert min(reply.slots) >= 0
    leader.send(Commit(store=number))


@contextlib.contextmanager
def subscribed(endpoint: str | None) -> Iterator[None]:
    """Somebody reads all that is published."""
    if endpoint is None:
        yield
        return
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            if socket.poll(100):
                socket.recv_multipart()

    reader = threading.Thread(target=read)
    reader.start()
    yield
    ended.set()
    reader.join()
    context.destroy(0)


def processor_s(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

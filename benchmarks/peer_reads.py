"""Blocks out of another process's host memory over loopback, against a bare socket that does the same, in turn.

    python -m benchmarks.peer_reads [--output DIR] [--block-bytes N]

With NIXL where it is installed, between two movers on this machine: UCX_TLS=tcp in the environment says how.

Bare: a process sends the same bytes with `send`, and `recv_into` puts them into the same targets; each block's
checksum is computed as it comes. The tier does more: the lender asks its loop for leases and computes checksums too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import select
import selectors
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import xxhash

from kvbm.block import BlockKey, Outcome
from kvbm.clock import monotonic
from kvbm.fleet.static import StaticDirectory
from kvbm.hashing import chain_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.host_side import SpaceOptions
from kvbm.manager.lending import Lending, LendOptions
from kvbm.manager.peer_server import PeerServer
from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmitAll
from kvbm.present.tables import console, plain_table, save_json
from kvbm.tiers.host import HostArena
from kvbm.tiers.nixl.package import is_installed
from kvbm.tiers.peers.mover import Mover
from kvbm.tiers.peers.options import PeerOptions
from kvbm.tiers.peers.tier import PeerTier, open_peer_tier

HOST = "127.0.0.1"
BYTES = 512 << 20
ROUNDS = 7
NAMESPACE = Namespace(model="benchmark", fields=(("weights", "none"),))
AT_ONCE = 16
PIECE = 1 << 18

Told = multiprocessing.connection.Connection


def layout_of(block_bytes: int) -> BlockLayout:
    return BlockLayout(block_tokens=16, shard_bytes=block_bytes)


def keys_for(count: int) -> list[BlockKey]:
    return chain_keys(bytes(32), range(16 * count), 16)


def lend(block_bytes: int, told: Told) -> None:
    """A process that lends; it says at which port, and how long its loop's turns for readers took when it ends."""
    layout, count = layout_of(block_bytes), BYTES // block_bytes
    arena = HostArena(layout, count, touch_threads=1)
    space = Space(layout, arena, None, AdmitAll(), Metrics(), monotonic, lambda lease: None, SpaceOptions())
    keys = keys_for(count)
    for slot in space.reserve(1, 1, None, keys):
        arena.slot_views(slot)[0][:] = bytes((slot % 251,)) * block_bytes
    space.commit(1, 1)
    lending = Lending([(NAMESPACE, space)], monotonic, LendOptions(share=0.25))
    mover = Mover() if is_installed() else None
    server = PeerServer(f"{HOST}:0", None, "benchmark", "lender", lending, mover=mover)
    told.send(server.port)
    turns: list[float] = []
    with selectors.DefaultSelector() as selector:
        selector.register(lending.fileno(), selectors.EVENT_READ)
        while not told.poll():
            if selector.select(0.05):
                started = time.perf_counter()
                lending.turn()
                turns.append(time.perf_counter() - started)
    server.close()
    lending.close()
    if mover is not None:
        mover.close()
    turns.sort()
    told.send((statistics.median(turns), turns[int(0.99 * len(turns))], turns[-1]))


def send(told: Told) -> None:
    """A process that sends all bytes whenever one comes."""
    memory = memoryview(bytearray(BYTES))
    memory[:] = bytes(range(256)) * (BYTES // 256)
    listener = socket.create_server((HOST, 0))
    told.send(listener.getsockname()[1])
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(1):
        for first in range(0, BYTES, PIECE):
            connection.sendall(memory[first : first + PIECE])


class Bare:
    """The receiving end of `send`."""

    def __init__(self, port: int, block_bytes: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._block_bytes = block_bytes

    def read(self, targets: list[memoryview]) -> None:
        self._socket.sendall(b"!")
        for target in targets:
            checksum, left = xxhash.xxh3_128(), target
            while left:
                count = self._socket.recv_into(left)
                checksum.update(left[:count])
                left = left[count:]
            checksum.digest()


def read(tier: PeerTier, keys: list[BlockKey], targets: list[memoryview]) -> None:
    """All blocks through the tier."""
    places = tier.places(keys)
    waiting = set[int]()
    for number, first in enumerate(range(0, len(keys), AT_ONCE)):
        chosen = keys[first : first + AT_ONCE]
        blocks = [[target] for target in targets[first : first + AT_ONCE]]
        while tier.submit_load(number, chosen, places[first], blocks, None) is Outcome.THROTTLED:
            collect(tier, waiting)
        waiting.add(number)
    while waiting:
        collect(tier, waiting)


def open_tier(port: int, layout: BlockLayout, keys: list[BlockKey], mover: Mover | None = None) -> PeerTier:
    """A tier that knows where all blocks are."""
    tier = open_peer_tier(
        StaticDirectory(f"{HOST}:{port}"),
        layout,
        NAMESPACE,
        PeerOptions(fleet="benchmark", node="reader", deadline_s=20.0),
        monotonic,
        mover=mover,
    )
    while not all(tier.held_elsewhere(keys)):
        time.sleep(0.01)
    return tier


def wait_for_nixl(tier: PeerTier, keys: list[BlockKey], targets: list[memoryview]) -> None:
    """Until blocks come that way."""
    while "nixl" not in cast("dict[str, int]", tier.describe()["links"]):
        tier.tick()
        read(tier, keys[:1], targets[:1])
        time.sleep(0.1)


def collect(tier: PeerTier, waiting: set[int]) -> None:
    select.select([tier.fileno()], [], [], 1.0)
    for completion in tier.poll():
        assert completion.outcome is Outcome.HIT, completion.error
        waiting.discard(completion.job_id)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    options = parser.parse_args()
    block_bytes: int = options.block_bytes
    context = multiprocessing.get_context("spawn")
    ends: list[Told] = []
    processes = []
    for target, arguments in ((lend, (block_bytes,)), (send, ())):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        ends.append(ours)
        processes.append(process)
    lender_port, sender_port = (end.recv() for end in ends)
    layout, count = layout_of(block_bytes), BYTES // block_bytes
    arena = HostArena(layout, count, touch_threads=0)
    targets = [arena.slot_views(slot)[0] for slot in range(count)]
    for target in targets:
        target[:] = bytes(len(target))
    keys = keys_for(count)
    mover = Mover() if is_installed() else None
    tiers = {"tcp": open_tier(lender_port, layout, keys)}
    if mover is not None:
        tiers["nixl"] = open_tier(lender_port, layout, keys, mover)
        wait_for_nixl(tiers["nixl"], keys, targets)
    bare = Bare(sender_port, block_bytes)
    rates: dict[str, list[float]] = {name: [] for name in ("bare", *tiers)}
    for _ in range(ROUNDS):
        rates["bare"].append(_rate(lambda: bare.read(targets)))
        for name, tier in tiers.items():
            rates[name].append(_rate(partial(read, tier, keys, targets)))
    ones_ms = {
        name: statistics.median(_milliseconds(partial(read, tier, keys[:1], targets[:1])) for _ in range(50))
        for name, tier in tiers.items()
    }
    for tier in tiers.values():
        tier.close()
    if mover is not None:
        mover.close()
    ends[0].send("end")
    turn = ends[0].recv()
    processes[1].kill()
    ratios = {
        name: statistics.median(t / b for t, b in zip(rates[name], rates["bare"], strict=True))
        for name in tiers
    }
    table = plain_table(
        ("read", "GB/s"), words={"read"}, title=f"{count} blocks of {block_bytes} bytes over loopback"
    )
    for name, all_rates in rates.items():
        table.add_row(name, f"{statistics.median(all_rates) / 1e9:.2f}")
    console().print(f"{count} blocks of {block_bytes} bytes over loopback")
    console().print(table)
    for name in tiers:
        console().print(f"{name} / bare: {ratios[name]:.2f}; one block alone: {ones_ms[name]:.2f} ms")
    console().print(
        "the lender's turns, µs: median {:.0f}, 99 % {:.0f}, longest {:.0f}".format(*(t * 1e6 for t in turn))
    )
    if options.output:
        found = {
            "block_bytes": block_bytes,
            "ratio": ratios,
            "one_block_ms": ones_ms,
            "turn_s": turn,
            **rates,
        }
        save_json(options.output / "peer_reads.json", found)
    return 0


def _rate(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return BYTES / (time.perf_counter() - started)


def _milliseconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    raise SystemExit(main())

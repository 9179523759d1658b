"""Loads out of a store, against bare ranged reads of the same bytes with the same client; and how many requests.

One node writes blocks to a store, another one finds them there and brings them into its host memory, all through a
space as a manager has it: packs, discovery, verification. The bare reads ask the same client for the same ranges from
as many threads, and neither verify nor keep what they get. Both take turns; medians count.

    python -m benchmarks.remote_loads [--url s3://bucket?endpoint=…] [--block-mb 2] [--blocks 128] [--rounds 7]

Without `--url` the store is a directory. Credentials come as everywhere: from the environment, or `DYN_KVBM_OBJECT_*`.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from kvbm.block import BlockKey
from kvbm.clock import monotonic
from kvbm.hashing import chain_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.remote_opening import RemoteOpening
from kvbm.manager.space import Space
from kvbm.observe.metrics import Metrics
from kvbm.policy import AdmitAll
from kvbm.present.tables import plain_table, save_json
from kvbm.settings import load_settings, process_environment
from kvbm.tiers.host import HostArena
from kvbm.tiers.remote.blobs import BlobStore
from kvbm.tiers.remote.options import RemoteOptions
from kvbm.tiers.remote.pack_size import LOAD_BYTES_MAX

WAIT_S = 120.0
SPARE_BLOCKS = 8


class Node:
    """A manager's space over the store; what it does is waited for."""

    def __init__(
        self, opening: RemoteOpening, namespace: Namespace, layout: BlockLayout, blocks: int
    ) -> None:
        self.arena = HostArena(layout, blocks + SPARE_BLOCKS)
        self.arena.touch(0)
        self.space = Space(
            layout,
            self.arena,
            None,
            AdmitAll(),
            Metrics(),
            monotonic,
            lambda lease: None,
            remotes=opening.open(namespace, layout, 1),
        )
        self.tier = self.space.remotes[0].tier

    def until(self, done: object, wait_s: float = WAIT_S) -> None:
        """Turn as a manager's loop does until `done()`."""
        assert callable(done)
        deadline_s = time.monotonic() + wait_s
        while not done():
            assert time.monotonic() < deadline_s, f"not done after {wait_s:g} s: {self.tier.describe()}"
            select.select([self.tier.fileno()], [], [], 0.05)
            self.space.move(time.monotonic() + 0.001)
            while self.space.tell_policies():
                pass
            self.space.below.tick()

    def write(self, keys: Sequence[BlockKey]) -> float:
        """Compute these blocks; the seconds until they are in the store."""
        slots = self.space.reserve(1, 1, None, keys)
        for slot in slots:
            self.arena.slot_views(slot)[0][:] = os.urandom(self.arena.layout.slot_bytes)
        begun_s = time.perf_counter()
        self.space.commit(1, 1)
        writer = self.space.remotes[0].writer
        assert writer is not None
        writer.flush()
        self.until(lambda: writer.queued_count == 0)
        return time.perf_counter() - begun_s

    def knows(self, keys: Sequence[BlockKey]) -> bool:
        """Whether it has heard of all these blocks by now."""
        self.space.below.tick()
        self.space.below.collect()
        return all(self.space.below.held(list(keys)))

    def load(self, keys: Sequence[BlockKey], number: int) -> float:
        """Bring these blocks up; the seconds that it took."""
        self.space.clear("host")
        begun_s = time.perf_counter()
        lease = self.space.lookup(1, number, keys, 0)
        assert lease is not None and len(lease.slots) == len(keys)
        self.until(lambda: lease.final)
        seconds = time.perf_counter() - begun_s
        assert lease.ready == len(keys), f"{lease.ready} of {len(keys)} blocks came"
        self.space.release(1, number)
        return seconds

    def requests(self) -> dict[str, int]:
        """How many requests it has made, by kind."""
        made = self.tier.describe()["requests"]
        assert isinstance(made, dict)
        return made


def ranges_of(store: BlobStore, prefix: str, piece_bytes: int) -> list[tuple[str, int, int]]:
    """All packs in pieces such as a load asks for."""
    found = list(store.listing(f"{prefix}packs/"))
    return [
        (info.name, start, min(start + piece_bytes, info.size))
        for info in found
        for start in range(0, info.size, piece_bytes)
    ]


def bare(store: BlobStore, ranges: Sequence[tuple[str, int, int]], pool: ThreadPoolExecutor) -> float:
    """Read these ranges; the seconds that it took."""
    begun_s = time.perf_counter()
    parts = list(pool.map(lambda each: store.read(*each), ranges))
    assert all(part is not None for part in parts)
    return time.perf_counter() - begun_s


@contextmanager
def some_url(url: str) -> Iterator[str]:
    """The URL, or that of a directory for the moment."""
    if url:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="kvbm-remote-") as directory:
        yield f"file://{directory}"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one store: medians, in seconds. `ratio` is what bare reads took for each second of ours."""

    store: str
    block_bytes: int
    blocks: int
    write_s: float
    first_load_s: float
    load_s: float
    bare_s: float
    ratio: float
    writes_per_block: float
    reads_per_block: float
    requests: dict[str, dict[str, int]]

    def megabytes_per_s(self, seconds: float) -> str:
        """The rate at which all blocks were moved in this time."""
        return f"{self.block_bytes * self.blocks / 1e6 / seconds:.0f}"


def measure(url: str, block_bytes: int, blocks: int, rounds: int) -> Row:
    """The figures of one store."""
    overrides = {"remote": url, "host_blocks": blocks, "remote_linger_s": 1}
    settings = load_settings(process_environment(), overrides=overrides).settings
    opening = RemoteOpening(settings, monotonic)
    layout = BlockLayout(block_tokens=16, shard_bytes=block_bytes)
    namespace = Namespace(model="bench", fields=(("run", os.urandom(8).hex()),))
    keys = chain_keys(bytes(32), range(blocks * layout.block_tokens), layout.block_tokens)
    a, b = (Node(opening, namespace, layout, blocks) for _ in range(2))
    store, threads = opening.store(), RemoteOptions().load_threads
    with ThreadPoolExecutor(threads) as pool:
        written_s = a.write(keys)
        a.until(lambda: b.knows(keys))
        before = {"a": a.requests(), "b": b.requests()}
        first_s = b.load(keys, 1)
        after = b.requests()
        ranges = ranges_of(store, f"{namespace.fingerprint.hex()}/", LOAD_BYTES_MAX)
        ours, theirs = list[float](), list[float]()
        for round_number in range(rounds):
            theirs.append(bare(store, ranges, pool))
            ours.append(b.load(keys, 2 + round_number))
    gets = sum(after.values()) - sum(before["b"].values())
    row = Row(
        store=url.partition("?")[0],
        block_bytes=block_bytes,
        blocks=blocks,
        write_s=written_s,
        first_load_s=first_s,
        load_s=statistics.median(ours),
        bare_s=statistics.median(theirs),
        ratio=statistics.median(t / o for t, o in zip(theirs, ours, strict=True)),
        writes_per_block=before["a"].get("put", 0) / blocks,
        reads_per_block=gets / blocks,
        requests=before | {"b": after},
    )
    store.close()
    for node in (a, b):
        node.space.close(keep=True)
    return row


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="", help="the store; a directory for the moment if not given")
    parser.add_argument("--block-mb", type=float, default=2.0)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("bench-output"))
    options = parser.parse_args()
    with some_url(options.url) as url:
        row = measure(url, int(options.block_mb * (1 << 20)), options.blocks, options.rounds)
    options.output.mkdir(parents=True, exist_ok=True)
    save_json(msgspec.structs.asdict(row), options.output / "remote_loads.json")
    table = plain_table(
        ("store", "write MB/s", "load MB/s", "bare MB/s", "of bare", "reads/block", "writes/block")
    )
    table.add_row(
        row.store,
        *map(row.megabytes_per_s, (row.write_s, row.load_s, row.bare_s)),
        f"{row.ratio:.2f}",
        f"{row.reads_per_block:.3f}",
        f"{row.writes_per_block:.3f}",
    )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

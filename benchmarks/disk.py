"""G2⇄G3: the disk tier against plain O_DIRECT calls of the same size, depth and kind of pages, in turn.

    python -m benchmarks.disk [--output DIR] [--directory DIR]

Both sides use memfd pages and as many threads. The tier also checks every byte and keeps its journal. Small blocks are
measured in a table of their own: see `benchmarks.disk_runs`.
"""

from __future__ import annotations

import argparse
import mmap
import os
import select
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import disk_runs
from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.layout import BlockLayout, Namespace
from kvbm.present.tables import console, plain_table, save_json
from kvbm.tiers.contract import BlockHead, Completion
from kvbm.tiers.disk.threads import IO_THREADS
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from kvbm.tiers.host import HostArena

BLOCK_BYTES = 3 << 20
BLOCKS = 96
ROUNDS = 5


class PlainFile:
    """The ceiling: a preallocated file written and read with `pwritev`/`preadv` in so many threads."""

    def __init__(self, directory: Path, threads: int) -> None:
        descriptor, self._name = tempfile.mkstemp(dir=directory)
        os.close(descriptor)
        self._direct = os.open(self._name, os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(self._direct, 0, BLOCK_BYTES * BLOCKS)
        self._pool = ThreadPoolExecutor(threads)

    def rates(self, views: list[memoryview]) -> tuple[float, float]:
        """Bytes per second of writing and of reading all views."""
        write = _rate(lambda: self._all(os.pwritev, views))
        return write, _rate(lambda: self._all(os.preadv, views))

    def _all(self, call: Callable[[int, list[memoryview], int], int], views: list[memoryview]) -> None:
        for moved in self._pool.map(
            lambda i: call(self._direct, [views[i]], i * BLOCK_BYTES), range(len(views))
        ):
            assert moved == BLOCK_BYTES

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._direct)
        Path(self._name).unlink()


def tier_rates(tier: DiskTier, views: list[memoryview]) -> tuple[float, float]:
    """Bytes per second of storing and loading all views through the tier, checksums and journal included."""
    keys = [BlockKey(index.to_bytes(32, "big")) for index in range(len(views))]

    def store() -> None:
        _run(
            tier,
            [
                lambda i=i: tier.submit_store(i, [BlockHead(keys[i], None)], SlotIndex(i), [views[i]])
                for i in range(len(keys))
            ],
        )

    def load() -> None:
        _run(
            tier,
            [lambda i=i: tier.submit_load(i, [keys[i]], SlotIndex(i), [views[i]]) for i in range(len(keys))],
        )

    rates = _rate(store), _rate(load)
    for index in range(len(keys)):
        tier.forget(SlotIndex(index))
    return rates


def _run(tier: DiskTier, submissions: list[Callable[[], Outcome]]) -> None:
    waiting, done = list(reversed(submissions)), list[Completion]()
    while len(done) < len(submissions):
        while waiting and waiting[-1]() is Outcome.PENDING:
            waiting.pop()
        select.select([tier.fileno()], [], [], 5.0)
        done += tier.poll()
    assert all(completion.outcome is Outcome.HIT for completion in done)


def _rate(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return BLOCKS * BLOCK_BYTES / (time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    parser.add_argument(
        "--directory", type=Path, help="where the disk to measure is mounted; default: --output"
    )
    parser.add_argument("--threads", type=int, default=IO_THREADS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    layout = BlockLayout(block_tokens=128, shard_bytes=BLOCK_BYTES)
    arena = HostArena(layout, BLOCKS)
    views = [arena.slot_views(slot)[0] for slot in range(BLOCKS)]
    noise = mmap.mmap(-1, BLOCK_BYTES)
    noise[:] = os.urandom(BLOCK_BYTES)
    for view in views:
        view[:] = noise
    samples: dict[str, list[float]] = {"store": [], "plain write": [], "load": [], "plain read": []}
    with tempfile.TemporaryDirectory(dir=options.directory or options.output) as scratch:
        tier = open_disk_tier(
            scratch,
            layout,
            Namespace(model="bench", fields=()),
            capacity_blocks=BLOCKS,
            io_threads=options.threads,
        )
        plain = PlainFile(Path(scratch), options.threads)
        for round_number in range(-1, ROUNDS):
            for names, rates in (
                (("plain write", "plain read"), plain.rates(views)),
                (("store", "load"), tier_rates(tier, views)),
            ):
                # The first round turns preallocated extents into written ones, on both sides.
                for name, rate in zip(names, rates, strict=True) if round_number >= 0 else ():
                    samples[name].append(rate)
        plain.close()
        tier.close(keep=False)
    small = disk_runs.measure(options.directory or options.output, options.threads)
    rows = _rows(samples)
    result = {"rows": rows, "samples": samples, "small_rows": disk_runs.rows(small), "small_samples": small}
    save_json(result, options.output / "disk.json")
    title = f"Host ⇄ disk, {options.threads} threads, {BLOCK_BYTES >> 20} MiB blocks"
    table = plain_table(("what", "budget", "GB/s", "ceiling", "ratio"), words={"what"}, title=title)
    for row in rows:
        table.add_row(
            row["what"],
            "0.95",
            f"{row['measured'] / 1e9:.2f}",
            f"{row['ceiling'] / 1e9:.2f}",
            f"{row['ratio']:.2f}",
        )
    console().print(table)
    console().print(disk_runs.table(small, options.threads))
    return 0


def _rows(samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for what, ceiling in (("store", "plain write"), ("load", "plain read")):
        measured, best = statistics.median(samples[what]), statistics.median(samples[ceiling])
        rows.append(
            {"what": f"{what} (verified)", "measured": measured, "ceiling": best, "ratio": measured / best}
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())

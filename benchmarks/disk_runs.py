"""The disk tier with many small blocks, as runs and block by block, against a bare loop over the same blocks.

The bare loop reads each block with one `preadv` and computes its checksum, or computes it and writes the block with one
`pwritev`, in as many threads, with O_DIRECT where the tier has it. The tier also keeps a record of each block.
"""

from __future__ import annotations

import itertools
import os
import select
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.layout import BlockLayout, Namespace
from kvbm.present.tables import plain_table
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.disk.journal import block_checksum
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from kvbm.tiers.host import HostArena

BLOCK_BYTES = 64 << 10
BLOCKS = 2048
ROUNDS = 5
BUDGET = 0.7

Work = Callable[[], None]


class SmallBlocks:
    """The blocks in host memory, on disk in a tier, and on disk in a plain file."""

    def __init__(self, directory: str, threads: int) -> None:
        layout = BlockLayout(block_tokens=16, shard_bytes=BLOCK_BYTES)
        self.arena = HostArena(layout, BLOCKS)
        self.keys = [BlockKey(number.to_bytes(32, "big")) for number in range(BLOCKS)]
        self.views = [self.arena.slot_views(slot)[0] for slot in range(BLOCKS)]
        for view in self.views:
            view[:] = os.urandom(BLOCK_BYTES)
        namespace = Namespace(model="bench", fields=())
        self._fingerprint = namespace.fingerprint
        self.tier: DiskTier = open_disk_tier(
            directory, layout, namespace, capacity_blocks=BLOCKS, io_threads=threads
        )
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.tier.direct else 0)
        self._file = os.open(Path(directory) / "plain", flags, 0o600)
        os.posix_fallocate(self._file, 0, BLOCKS * BLOCK_BYTES)
        self._pool, self._threads = ThreadPoolExecutor(threads), threads

    def bare(self, read: bool) -> None:
        """Every block once, each thread taking the next one that is left."""
        left = iter(range(BLOCKS))

        def work() -> None:
            for number in left:
                place = (self._file, [self.views[number]], number * BLOCK_BYTES)
                if read:
                    assert os.preadv(*place) == BLOCK_BYTES
                block_checksum(self._fingerprint, self.keys[number], [self.views[number]])
                if not read:
                    assert os.pwritev(*place) == BLOCK_BYTES

        for done in [self._pool.submit(work) for _ in range(self._threads)]:
            done.result()

    def by_block(self, read: bool) -> None:
        """Every block once through the tier, submitted one by one."""
        submit = self._load if read else self._store
        self._drive([lambda number=number: submit(number) for number in range(BLOCKS)])

    def by_run(self, read: bool) -> None:
        """Every block once through the tier, in its longest runs."""
        length = self.tier.run_blocks_max
        submit = self._load_run if read else self._store_run
        starts = range(0, BLOCKS, length)
        self._drive([lambda first=first: submit(first, min(length, BLOCKS - first)) for first in starts])

    def _load(self, number: int) -> Outcome:
        slot = SlotIndex(number)
        return self.tier.submit_load(number, [self.keys[number]], slot, [self.views[number]])

    def _store(self, number: int) -> Outcome:
        slot = SlotIndex(number)
        return self.tier.submit_store(
            number, [BlockHead(self.keys[number], None)], slot, [self.views[number]]
        )

    def _load_run(self, first: int, count: int) -> Outcome:
        keys, slot = self.keys[first : first + count], SlotIndex(first)
        return self.tier.submit_load(first, keys, slot, self.arena.slot_views(first, count))

    def _store_run(self, first: int, count: int) -> Outcome:
        blocks, slot = [BlockHead(key, None) for key in self.keys[first : first + count]], SlotIndex(first)
        return self.tier.submit_store(first, blocks, slot, self.arena.slot_views(first, count))

    def _drive(self, submissions: list[Callable[[], Outcome]]) -> None:
        waiting, left = list(reversed(submissions)), len(submissions)
        while left:
            while waiting and waiting[-1]() is Outcome.PENDING:
                waiting.pop()
            select.select([self.tier.fileno()], [], [], 5.0)
            for completion in self.tier.poll():
                assert completion.outcome is Outcome.HIT, completion
                left -= 1

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)
        self.tier.close(keep=False)


def measure(directory: Path, threads: int) -> dict[str, list[float]]:
    """Bytes per second of each way, one sample a round; the ways alternate."""
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        blocks = SmallBlocks(scratch, threads)
        ways = {"bare": blocks.bare, "by block": blocks.by_block, "by run": blocks.by_run}
        # The first round turns preallocated extents into written ones, on both sides.
        for number, (what, read) in itertools.product(
            range(-1, ROUNDS), (("stores", False), ("loads", True))
        ):
            for how, way in ways.items():
                started = time.perf_counter()
                way(read)
                if number >= 0:
                    rate = BLOCKS * BLOCK_BYTES / (time.perf_counter() - started)
                    samples.setdefault(f"{what} {how}", []).append(rate)
        blocks.close()
    return samples


def rows(samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Medians, each way of the tier against the bare loop."""
    found = []
    for what, how in itertools.product(("loads", "stores"), ("by run", "by block")):
        measured = statistics.median(samples[f"{what} {how}"])
        bare = statistics.median(samples[f"{what} bare"])
        found.append(
            {"what": f"{what} {how}", "measured": measured, "ceiling": bare, "ratio": measured / bare}
        )
    return found


def table(samples: dict[str, list[float]], threads: int) -> Table:
    """The rows for people."""
    title = f"Host ⇄ disk, {threads} threads, {BLOCK_BYTES >> 10} KiB blocks"
    small = plain_table(("what", "budget", "GB/s", "bare loop", "ratio"), words={"what"}, title=title)
    for row in rows(samples):
        rates = f"{row['measured'] / 1e9:.2f}", f"{row['ceiling'] / 1e9:.2f}"
        small.add_row(row["what"], f"{BUDGET:g}", *rates, f"{row['ratio']:.2f}")
    return small

"""How close copies between device blocks and host slots come to the machine's plain copy of the same bytes.

The device is the CPU. Every method moves the same number of bytes between the same two regions of memory, by
turns with all others, so that a neighbour's load hits all alike; medians are compared, never times of
different runs. The ceiling is the fastest contiguous copy with as many threads.

    python benchmarks/transfer_copy.py --json copies.json
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from kvbm.present.tables import plain_table, save_json
from kvbm.transfer import CpuCopier, DeviceCache, arena_tensor
from kvbm.transfer.cpu import prepare_thread

LAYERS = 28
MOVED_BYTES = 112 << 20
Copy = Callable[[bool], None]


@dataclass(frozen=True)
class Row:
    """One method's result; speeds in GB/s (10^9), medians over the rounds."""

    case: str
    method: str
    store_gb_s: float
    load_gb_s: float
    store_ratio: float
    load_ratio: float


@dataclass(frozen=True)
class Case:
    """One shape of cache: bytes per block and layer, and how the layers lie."""

    piece_bytes: int
    layout: str

    @property
    def name(self) -> str:
        return f"{self.piece_bytes >> 10} KiB, {self.layout}"

    def caches(self, memory: torch.Tensor, block_count: int) -> dict[str, torch.Tensor]:
        """Views `[blocks, 1, 1, bytes]` of `memory`, or of allocations of their own."""
        shape = (block_count, 1, 1, self.piece_bytes)
        if self.layout == "own allocations":
            views = [torch.zeros(shape, dtype=torch.uint8) for _ in range(LAYERS)]
        elif self.layout == "block-outermost":
            whole = memory.view(block_count, LAYERS, 1, 1, self.piece_bytes)
            views = list(whole.unbind(1))
        else:
            views = list(memory.view(LAYERS, *shape).unbind(0))
        return {f"layers.{index}": view for index, view in enumerate(views)}


CASES = [
    Case(64 << 10, "one allocation"),
    Case(64 << 10, "own allocations"),
    Case(64 << 10, "block-outermost"),
    Case(16 << 10, "one allocation"),
    Case(4 << 10, "one allocation"),
]


def contiguous(device: torch.Tensor, host: torch.Tensor, threads: int) -> dict[str, Copy]:
    """The candidates for the ceiling: plain copies between two flat regions, `threads` at once."""
    pool = ThreadPoolExecutor(threads, initializer=prepare_thread)
    part_bytes = MOVED_BYTES // threads

    def in_parts(copy_part: Callable[[bool, int], object]) -> Copy:
        return lambda load: [
            None for _ in pool.map(lambda part: copy_part(load, part), range(threads))
        ].clear()

    def by_torch(load: bool, part: int) -> None:
        there, here = (side[part * part_bytes : (part + 1) * part_bytes] for side in (device, host))
        (there if load else here).copy_(here if load else there)

    def by_memmove(load: bool, part: int) -> None:
        there, here = (side.data_ptr() + part * part_bytes for side in (device, host))
        ctypes.memmove(there if load else here, here if load else there, part_bytes)

    def by_team(load: bool) -> None:
        (device if load else host).copy_(host if load else device)

    return {
        "plain: torch, own threads": in_parts(by_torch),
        "plain: memmove, own threads": in_parts(by_memmove),
        "plain: torch, OpenMP team": by_team,
    }


def methods(case: Case, threads: int) -> tuple[dict[str, Copy], list[CpuCopier]]:
    """(all methods of a case, what must be closed); the first ones are the ceiling's candidates."""
    slot_bytes = LAYERS * case.piece_bytes
    copied = MOVED_BYTES // slot_bytes
    block_count, slot_count = 2 * copied, copied + copied // 2
    memory = torch.zeros(block_count * slot_bytes, dtype=torch.uint8)
    file = os.memfd_create("arena")
    os.ftruncate(file, slot_count * slot_bytes)
    arena = arena_tensor(mmap.mmap(file, slot_count * slot_bytes), slot_count, slot_bytes)
    os.close(file)
    arena.fill_(1)  # pages of both sides are there before anything is timed
    cache = DeviceCache.from_tensors(case.caches(memory, block_count), block_count)
    copiers = {count: CpuCopier(cache, arena, count) for count in sorted({1, threads})}
    chance = random.Random(7)
    scattered = list(
        zip(chance.sample(range(block_count), copied), chance.sample(range(slot_count), copied), strict=True)
    )
    in_order = [(index, index) for index in range(copied)]

    def copies(copier: CpuCopier, pairs: list[tuple[int, int]]) -> Copy:
        return lambda load: copier.load(pairs) if load else copier.store(pairs)

    found = contiguous(memory[: copied * slot_bytes], arena.view(-1)[: copied * slot_bytes], threads)
    found |= {f"CpuCopier({count}), scattered": copies(copiers[count], scattered) for count in copiers}
    found[f"CpuCopier({threads}), in order"] = copies(copiers[threads], in_order)
    return found, list(copiers.values())


def measure(case: Case, threads: int, rounds: int) -> list[Row]:
    """Time every method once per round and direction, by turns."""
    found, copiers = methods(case, threads)
    moved_bytes = MOVED_BYTES // (LAYERS * case.piece_bytes) * LAYERS * case.piece_bytes
    seconds: dict[tuple[str, bool], list[float]] = {
        (name, load): [] for name in found for load in (False, True)
    }
    for turn in range(rounds + 1):
        for name, copy in found.items():
            for load in (False, True):
                start = time.perf_counter()
                copy(load)
                if turn:  # the first round warms caches and threads
                    seconds[name, load].append(time.perf_counter() - start)
    for copier in copiers:
        copier.close()
    speed = {key: moved_bytes / statistics.median(taken) / 1e9 for key, taken in seconds.items()}
    ceiling = {
        load: max(speed[name, load] for name in found if name.startswith("plain")) for load in (False, True)
    }
    return [
        Row(
            case.name,
            name,
            speed[name, False],
            speed[name, True],
            speed[name, False] / ceiling[False],
            speed[name, True] / ceiling[True],
        )
        for name in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="how many copy at once (default 2)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds per case (default 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for case in CASES:
        rows += measure(case, arguments.threads, arguments.rounds)
    columns = ("piece, layout", "method", "store GB/s", "load GB/s", "store ratio", "load ratio")
    title = f"device block ⇄ host slot on the CPU, {LAYERS} layers, {MOVED_BYTES >> 20} MiB moved"
    table = plain_table(columns, words=columns[:2], title=title)
    previous = ""
    for row in rows:
        if previous and previous != row.case:
            table.add_section()
        figures = (
            f"{row.store_gb_s:.1f}",
            f"{row.load_gb_s:.1f}",
            f"{row.store_ratio:.2f}",
            f"{row.load_ratio:.2f}",
        )
        table.add_row("" if previous == row.case else row.case, row.method, *figures)
        previous = row.case
    Console(width=max(110, Console().width)).print(table)
    if arguments.json:
        save_json(rows, arguments.json)


if __name__ == "__main__":
    main()

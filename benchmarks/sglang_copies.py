"""Copies under SGLang against a plain copy of the same bytes: its device pool ⇄ its host pool, and that ⇄ our slots.

The first is what stands in for a CUDA kernel when SGLang runs on a CPU (`tests/rigs/sglang/without_cuda`): a verdict
on times to first token needs that to be near a plain copy. The second is ours, in batches as SGLang asks for them. The
pools are tensors of the shapes of SGLang's, so SGLang itself need not be installed. All methods take turns; medians.

    python -m benchmarks.sglang_copies
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from kvbm.present.tables import plain_table, save_json
from kvbm.sglang_integration.host_pages import MappedPages
from kvbm.transfer import CpuCopier, DeviceCache, arena_tensor

sys.path.append(str(Path(__file__).parents[1] / "tests" / "rigs" / "sglang" / "without_cuda"))

import page_copies

LAYERS, HEADS, HEAD_DIM, PAGE_TOKENS = 12, 8, 64, 16
PAGES = 256
BATCH = 128
"""Pages that SGLang asks for at once."""
LAYOUTS = ("layer_first", "page_first_direct")
Copy = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One method's result; the ratio is to a plain copy of the same bytes."""

    case: str
    method: str
    gb_s: float
    ratio: float


class HostPool:
    """A host pool as SGLang lays it out, `[2, …]` for K and V, and what it says about its pages."""

    def __init__(self, layout: str) -> None:
        pages = (LAYERS, PAGE_TOKENS, HEADS, HEAD_DIM)
        shape = (
            (2, LAYERS, PAGES * PAGE_TOKENS, HEADS, HEAD_DIM) if layout == LAYOUTS[0] else (2, PAGES, *pages)
        )
        self.kv_buffer = torch.ones(shape)
        self.layout, self.page_size, self.size = layout, PAGE_TOKENS, PAGES * PAGE_TOKENS

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the pieces of pages, page after page."""
        piece = PAGE_TOKENS * HEADS * HEAD_DIM * 4
        base, half = self.kv_buffer.data_ptr(), self.kv_buffer.numel() * 2
        addresses = []
        for page in (indices[::PAGE_TOKENS] // PAGE_TOKENS).tolist():
            if self.layout == LAYOUTS[0]:
                for layer in range(LAYERS):
                    at = base + layer * PAGES * piece + page * piece
                    addresses += [at, at + half]
            else:
                at = base + page * LAYERS * piece
                addresses += [at, at + half]
        return addresses, [piece if self.layout == LAYOUTS[0] else LAYERS * piece] * len(addresses)


def device_pool() -> list[torch.Tensor]:
    """K of each layer, then V, `[tokens, heads, width]`, with the page that SGLang leaves unused."""
    shape = ((PAGES + 1) * PAGE_TOKENS, HEADS, HEAD_DIM)
    return [torch.ones(shape) for _ in range(2 * LAYERS)]


def stub_copies(
    pool: HostPool, device: list[torch.Tensor], pages: list[int], slots: list[int]
) -> dict[str, Copy]:
    """Backup to the host pool, and the loads of all layers."""
    host_at, device_at = _tokens(pages), _tokens(slots)
    kv, pairs = pool.kv_buffer, [(k, v) for k, v in zip(device[:LAYERS], device[LAYERS:], strict=True)]
    if pool.layout == LAYOUTS[0]:
        refs = [*kv[0], *kv[1]]
        return {
            "device → host pool": lambda: page_copies.transfer_kv_direct(
                device, refs, device_at, host_at, PAGE_TOKENS
            ),
            "host pool → device": lambda: [
                page_copies.transfer_kv_direct(
                    [kv[0][i], kv[1][i]], pairs[i], host_at, device_at, PAGE_TOKENS
                )
                for i in range(LAYERS)
            ],
        }
    return {
        "device → host pool": lambda: page_copies.transfer_kv_all_layer_direct_lf_pf(
            device, [kv[0], kv[1]], device_at, host_at, PAGE_TOKENS
        ),
        "host pool → device": lambda: [
            page_copies.transfer_kv_per_layer_direct_pf_lf(
                [kv[0], kv[1]], list(pairs[i]), host_at, device_at, i, PAGE_TOKENS
            )
            for i in range(LAYERS)
        ],
    }


def _tokens(pages: list[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()


def arena_of(slot_bytes: int) -> torch.Tensor:
    """Slots in shared memory, each page of which is there."""
    file = os.memfd_create("arena")
    os.ftruncate(file, PAGES * slot_bytes)
    arena = arena_tensor(mmap.mmap(file, PAGES * slot_bytes), PAGES, slot_bytes)
    os.close(file)
    return arena.fill_(1)


def measure(layout: str, scattered: bool, rounds: int) -> list[Row]:
    """All copies of one layout, in turns."""
    chance = random.Random(5)
    pool, device = HostPool(layout), device_pool()
    pages, slots = (chance.sample(range(PAGES), BATCH) if scattered else list(range(BATCH)) for _ in range(2))
    mapped = MappedPages(pool)
    cache = DeviceCache.from_tensors(mapped.cache, PAGES)
    arena = arena_of(mapped.page_bytes)
    copier = CpuCopier(cache, arena, 1)
    pairs = list(zip(pages, slots, strict=True))
    moved = BATCH * mapped.page_bytes
    source, target = torch.ones(moved, dtype=torch.uint8), torch.ones(moved, dtype=torch.uint8)
    copies: dict[str, Copy] = {
        "plain": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), moved),
        **stub_copies(pool, device, pages, slots),
        "host pool → slots": lambda: copier.store(pairs),
        "slots → host pool": lambda: copier.load(pairs),
    }
    taken: dict[str, list[float]] = {name: [] for name in copies}
    for turn in range(rounds + 1):
        for name, copy in copies.items():
            begun_s = time.perf_counter()
            copy()
            if turn:  # the first round touches all memory
                taken[name].append(time.perf_counter() - begun_s)
    copier.close()
    median = {name: statistics.median(times) for name, times in taken.items()}
    case = f"{layout}, {'scattered' if scattered else 'in order'}"
    return [Row(case, name, moved / s / 1e9, median["plain"] / s) for name, s in median.items()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row for layout in LAYOUTS for far in (False, True) for row in measure(layout, far, options.rounds)
    ]
    piece = PAGE_TOKENS * HEADS * HEAD_DIM * 4 >> 10
    title = f"{BATCH} pages of {2 * LAYERS} pieces of {piece} KiB, one thread"
    table = plain_table(("layout", "copy", "GB/s", "of a plain copy"), words=("layout", "copy"), title=title)
    for row in rows:
        table.add_row(row.case, row.method, f"{row.gb_s:.1f}", f"{row.ratio:.2f}")
    Console(width=max(110, Console().width)).print(table)
    if options.json:
        save_json(rows, options.json)


if __name__ == "__main__":
    main()

"""G4: packing and unpacking blocks, against a bare checksum and copy of the same bytes; and the cost of a seal.

    python -m benchmarks.packs [--output DIR] [--mib N]

One thread, all in memory: no store is asked. The bytes are like KV in bfloat16: normally distributed, each channel at
a scale of its own. The ways take turns; a row has the median of its rates, and the median of its ratios within a round.

What plain packing has to do is one checksum, and plain unpacking a copy and a checksum.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvbm.block import BlockKey, Outcome
from kvbm.layout import BlockLayout
from kvbm.present.tables import console, plain_table, save_json
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.remote.packs import pack, unpack
from kvbm.tiers.remote.records import checksum
from kvbm.tiers.remote.sealing import MasterKey, Seal, Sealer

BLOCK_BYTES = (2 << 20, 64 << 10)
CHANNELS = 128
ROUNDS = 7
FINGERPRINT = bytes(32)
TENANT = "bench"


class Blocks:
    """Blocks of one shard, in memory, and room for as many."""

    def __init__(self, block_bytes: int, total_bytes: int) -> None:
        count = total_bytes // block_bytes
        self.layout = BlockLayout(block_tokens=16, shard_bytes=block_bytes)
        self.heads = [BlockHead(BlockKey(number.to_bytes(32, "big")), None) for number in range(count)]
        self.keys = [head.key for head in self.heads]
        source, target = memoryview(like_kv(total_bytes)), memoryview(bytearray(total_bytes))
        places = range(0, count * block_bytes, block_bytes)
        self.sources = [[source[place : place + block_bytes]] for place in places]
        self.targets = [[target[place : place + block_bytes]] for place in places]
        self.total_bytes = count * block_bytes

    def bare_checksum(self) -> None:
        """What plain packing cannot do without."""
        for key, source in zip(self.keys, self.sources, strict=True):
            checksum(FINGERPRINT, key, source)

    def bare_copy_and_checksum(self) -> None:
        """What plain unpacking cannot do without."""
        for key, (source,), (target,) in zip(self.keys, self.sources, self.targets, strict=True):
            target[:] = source
            checksum(FINGERPRINT, key, [target])

    def pack(self, seal: Seal | None) -> list[Any]:
        """The parts of a pack of all blocks."""
        packed = pack(self.layout, FINGERPRINT, self.heads, self.sources, seal=seal, tenant=TENANT)
        return list(packed.parts)

    def unpack(self, blob: bytes, seal: Seal | None) -> None:
        """All blocks out of a pack."""
        ends = unpack(self.layout, FINGERPRINT, self.keys, blob, self.targets, unseal=seal, tenant=TENANT)
        assert all(end.outcome is Outcome.HIT for end in ends)


def like_kv(byte_count: int) -> bytes:
    """Elements of bfloat16, channel after channel for each token."""
    draw = np.random.default_rng(1)
    scales = np.exp(draw.normal(0, 0.7, CHANNELS))
    values = (draw.standard_normal((byte_count // 2 // CHANNELS, CHANNELS)) * scales).astype(np.float32)
    taken: bytes = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return taken


def measure(block_bytes: int, total_bytes: int) -> list[dict[str, Any]]:
    """A row for each way: its rate, and how it stands to the bare one in the same rounds."""
    blocks = Blocks(block_bytes, total_bytes)
    sealer = Sealer([MasterKey("bench", bytes(32))])
    kinds: dict[str, Seal | None] = {"plain": None, "sealed": sealer}
    blobs = {kind: b"".join(blocks.pack(seal)) for kind, seal in kinds.items()}
    ways: dict[str, Callable[[], object]] = {
        "bare pack": blocks.bare_checksum,
        "bare unpack": blocks.bare_copy_and_checksum,
    }
    for kind, seal in kinds.items():
        ways[f"{kind} pack"] = partial(blocks.pack, seal)
        ways[f"{kind} unpack"] = partial(blocks.unpack, blobs[kind], seal)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, run in ways.items():
            started = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - started)
    return [
        {
            "block_bytes": block_bytes,
            "way": way,
            "bytes_per_s": blocks.total_bytes / statistics.median(took),
            "of_bare": statistics.median(
                bare / own for bare, own in zip(seconds[f"bare {way.rsplit(' ', 1)[1]}"], took, strict=True)
            ),
        }
        for way, took in seconds.items()
    ]


def main() -> int:
    """Measure both sizes and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="where the JSON goes")
    parser.add_argument("--mib", type=int, default=32, help="MiB of blocks")
    options = parser.parse_args()
    rows = [row for block_bytes in BLOCK_BYTES for row in measure(block_bytes, options.mib << 20)]
    options.output.mkdir(parents=True, exist_ok=True)
    save_json({"rows": rows}, options.output / "packs.json")
    columns = ("block KiB", "way", "GB/s", "of the bare one")
    table = plain_table(columns, words={"way"}, title="Packs of the remote tier, one thread")
    for row in rows:
        figures = f"{row['bytes_per_s'] / 1e9:.2f}", f"{row['of_bare']:.2f}"
        table.add_row(str(row["block_bytes"] >> 10), row["way"], *figures)
    console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

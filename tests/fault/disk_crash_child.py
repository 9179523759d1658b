"""A process that stores, overwrites, forgets and loads blocks, singly and in runs, as fast as it can, until it is
killed.

Run as a program: ROOT LOG SEED WRITES ORDER. After WRITES writes it kills itself in the middle of the next one; a
negative number leaves that to the parent. ORDER "right" is the tier as it is; "wrong" writes the record before the
bytes and voids nothing, which the audit must notice. It appends to LOG what a later audit may rely on:

- ``begin SLOT`` before the slot is touched,
- ``stored SLOT NUMBER`` after a store completed,
- ``forgot SLOT`` after a forget returned.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import select
import sys
from pathlib import Path

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.layout import BlockLayout, Namespace
from kvbm.tiers.contract import BlockEnd, BlockHead
from kvbm.tiers.disk import block_io
from kvbm.tiers.disk import medium as disk_medium
from kvbm.tiers.disk.tier import DiskTier, open_disk_tier
from rigs.faulty_syscalls import FaultySyscalls

LAYOUT = BlockLayout(block_tokens=16, shard_bytes=20_000, shard_count=2)
NAMESPACE = Namespace(model="crash", fields=())
SLOT_COUNT = 24
KEY_COUNT = 400
IN_FLIGHT_MAX = 6
RUN_BLOCKS_MAX = 4


def make_key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"crash %d" % number).digest())


def make_bytes(number: int) -> bytes:
    """The block of that key; no page of it is in any other block."""
    return b"".join(
        hashlib.sha256(b"%d %d" % (number, page)).digest() * 128 for page in range(LAYOUT.block_bytes // 4096)
    )


def open_tier(root: Path, seed: int, cut_after_writes: int = -1) -> DiskTier:
    syscalls = FaultySyscalls(seed)
    tier = open_disk_tier(
        root, LAYOUT, NAMESPACE, capacity_blocks=SLOT_COUNT, io_threads=3, syscalls=syscalls
    )
    if cut_after_writes >= 0:
        syscalls.cut_power(cut_after_writes, kill=True)
    return tier


class Load:
    """The work: at most one operation on a slot at a time, as a manager would have it."""

    def __init__(self, tier: DiskTier, log_fd: int, seed: int) -> None:
        self.tier = tier
        self.log_fd = log_fd
        self.random = random.Random(seed)
        memory = memoryview(mmap.mmap(-1, LAYOUT.block_bytes * IN_FLIGHT_MAX * RUN_BLOCKS_MAX))
        size = LAYOUT.slot_bytes * RUN_BLOCKS_MAX
        self.buffers = [
            [memory[(2 * i + shard) * size : (2 * i + shard + 1) * size] for shard in range(2)]
            for i in range(IN_FLIGHT_MAX)
        ]
        # For each job the slots, and the numbers of the blocks that it stores there; none for a load.
        self.pending: dict[int, tuple[range, list[int]]] = {}
        self.resident: dict[int, int] = {}
        # Slots that were forgotten and not used again, each with the number of the sync that makes it durable.
        self.forgotten: dict[int, int] = {}

    def log(self, text: str) -> None:
        os.write(self.log_fd, text.encode() + b"\n")

    def run(self) -> None:
        while True:
            for job in range(IN_FLIGHT_MAX):
                if job not in self.pending:
                    self.begin(job)
            select.select([self.tier.fileno()], [], [], 10)
            for slot in [slot for slot, number in self.forgotten.items() if number <= self.tier.synced]:
                del self.forgotten[slot]
                self.log(f"forgot {slot}")
            for completion in self.tier.poll():
                slots, numbers = self.pending.pop(completion.job_id)
                if not numbers:
                    continue
                assert {end.outcome for end in completion.blocks} == {Outcome.HIT}, completion
                for slot, number in zip(slots, numbers, strict=True):
                    self.log(f"stored {slot} {number}")
                    self.resident[slot] = number

    def begin(self, job: int) -> None:
        first, length = self.random.randrange(SLOT_COUNT), self.random.choice((1, 1, 2, RUN_BLOCKS_MAX))
        slots = range(first, min(first + length, SLOT_COUNT))
        if any(slot in busy for busy, _ in self.pending.values() for slot in slots):
            return
        views = [view[: len(slots) * LAYOUT.slot_bytes] for view in self.buffers[job]]
        action = self.random.random()
        if action < 0.2 and all(slot in self.resident for slot in slots):
            keys = [make_key(self.resident[slot]) for slot in slots]
            self.tier.submit_load(job, keys, SlotIndex(first), views)
            self.pending[job] = (slots, [])
            return
        for slot in slots:
            self.log(f"begin {slot}")
            self.resident.pop(slot, None)
            self.forgotten.pop(slot, None)
        if action < 0.4:
            self.tier.forget(SlotIndex(first), len(slots))
            self.forgotten.update(dict.fromkeys(slots, self.tier.sync()))
            return
        numbers = self.random.sample(range(KEY_COUNT), len(slots))
        size = LAYOUT.slot_bytes
        for place, number in enumerate(numbers):
            content = make_bytes(number)
            for shard, view in enumerate(views):
                view[place * size : (place + 1) * size] = content[shard * size : (shard + 1) * size]
        heads = [BlockHead(make_key(number), None) for number in numbers]
        self.tier.submit_store(job, heads, SlotIndex(first), views)
        self.pending[job] = (slots, numbers)


def store_in_the_wrong_order(medium, slot, blocks, sequence, memory):  # type: ignore[no-untyped-def]
    """A `DiskMedium.store` as it must never be."""
    checksums = [
        block_io.block_checksum(medium._fingerprint, block.key, part)
        for block, part in zip(blocks, memory.blocks, strict=True)
    ]
    medium._journal.write_run(slot, blocks, checksums, sequence)
    medium._slabs.write(slot, memory.whole)
    return disk_medium.RunEnd([BlockEnd(Outcome.HIT)] * len(blocks))


def main() -> None:
    root, log, seed, writes, order = sys.argv[1:]
    if order == "wrong":
        disk_medium.DiskMedium.store = store_in_the_wrong_order  # type: ignore[method-assign]
    tier = open_tier(Path(root), int(seed), int(writes))
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(1, b"ready\n")
    Load(tier, log_fd, int(seed)).run()


if __name__ == "__main__":
    main()

"""Runs of test blocks: their keys, their bytes, and storing and loading them on a tier, for the kits."""

from __future__ import annotations

import hashlib
import mmap
import select
import time
from collections.abc import Iterable, Sequence

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.layout import BlockLayout, Namespace
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion, RecoveredBlock, RunTier

DEADLINE_S = 30.0
LAYOUT = BlockLayout(block_tokens=16, shard_bytes=9000, shard_count=2)
NAMESPACE = Namespace(model="contract/model", fields=(("weights", "0123"), ("dtype", "bfloat16")))
OTHER_NAMESPACE = Namespace(model="contract/model", fields=(("weights", "4567"), ("dtype", "bfloat16")))


def make_key(number: int) -> BlockKey:
    """The key of test block `number`."""
    return BlockKey(hashlib.sha256(b"test block %d" % number).digest())


class RunMemory:
    """Page-aligned memory for a run: one view per shard, as consecutive slots lie in host memory.

    A key has the same bytes in all tests: a stream that no other key has.
    """

    def __init__(self, layout: BlockLayout, count: int = 1) -> None:
        self.layout = layout
        size = count * layout.slot_bytes
        memory = memoryview(mmap.mmap(-1, size * layout.shard_count))
        self.views = [memory[i * size : (i + 1) * size] for i in range(layout.shard_count)]

    @classmethod
    def of(cls, keys: Sequence[BlockKey], layout: BlockLayout) -> RunMemory:
        """Filled with the bytes of these keys."""
        memory = cls(layout, len(keys))
        for place, key in enumerate(keys):
            content = hashlib.shake_128(key).digest(layout.block_bytes)
            for shard, part in enumerate(memory._block(place)):
                part[:] = content[shard * len(part) : (shard + 1) * len(part)]
        return memory

    def holds(self, key: BlockKey, place: int = 0) -> bool:
        """True when every byte of the block at this place is the key's."""
        return b"".join(self._block(place)) == hashlib.shake_128(key).digest(self.layout.block_bytes)

    def _block(self, place: int) -> list[memoryview]:
        size = self.layout.slot_bytes
        return [view[place * size : (place + 1) * size] for view in self.views]


def heads(numbers: Sequence[int]) -> list[BlockHead]:
    """A chain of these blocks; each has a hash and a group of its own."""
    keys = [make_key(number) for number in numbers]
    parents: list[BlockKey | None] = [None, *keys]
    return [
        BlockHead(key, parent, hashlib.sha256(key).digest() if number % 2 else b"", number)
        for number, key, parent in zip(numbers, keys, parents, strict=False)
    ]


def wait_readable(tier: RunTier, deadline_s: float = DEADLINE_S) -> bool:
    """Wait for the tier's descriptor."""
    return bool(select.select([tier.fileno()], [], [], deadline_s)[0])


def collect(tier: RunTier, count: int, deadline_s: float = DEADLINE_S) -> dict[int, Completion]:
    """Poll until `count` completions came; fails when one comes twice or the deadline passes."""
    found: dict[int, Completion] = {}
    end_s = time.monotonic() + deadline_s
    while len(found) < count:
        assert wait_readable(tier, end_s - time.monotonic()), f"{len(found)} of {count} completions came"
        for completion in tier.poll():
            assert completion.job_id not in found, "completed twice"
            found[completion.job_id] = completion
    return found


def heal(tier: RunTier) -> bool:
    """Have a tier that is off open its medium again, and wait. Whether it works then."""
    while (outcome := tier.heal()) is Outcome.PENDING:
        assert tier.drain(DEADLINE_S)
    return outcome is Outcome.HIT


def store(
    tier: RunTier,
    layout: BlockLayout,
    key: BlockKey,
    slot: int,
    parent: BlockKey | None = None,
    engine_hash: bytes = b"",
    group: int = 0,
) -> Completion:
    """Store the key's own bytes as a run of one block and wait."""
    return _store(tier, layout, [BlockHead(key, parent, engine_hash, group)], slot)


def store_run(tier: RunTier, layout: BlockLayout, numbers: Sequence[int], slot: int) -> Completion:
    """Store the blocks' own bytes as one run and wait."""
    return _store(tier, layout, heads(numbers), slot)


def _store(tier: RunTier, layout: BlockLayout, blocks: Sequence[BlockHead], slot: int) -> Completion:
    memory = RunMemory.of([block.key for block in blocks], layout)
    assert tier.submit_store(slot, blocks, SlotIndex(slot), memory.views) is Outcome.PENDING
    return collect(tier, 1)[slot]


def load(tier: RunTier, layout: BlockLayout, key: BlockKey, slot: int) -> Completion:
    """Load a run of one block, wait, and fail when a HIT has brought any other bytes than the key's own."""
    return _load(tier, layout, [key], slot)


def load_run(tier: RunTier, layout: BlockLayout, numbers: Sequence[int], slot: int) -> Completion:
    """`load` of a run."""
    return _load(tier, layout, [make_key(number) for number in numbers], slot)


def _load(tier: RunTier, layout: BlockLayout, keys: Sequence[BlockKey], slot: int) -> Completion:
    memory = RunMemory(layout, len(keys))
    outcome = tier.submit_load(slot, keys, SlotIndex(slot), memory.views)
    if outcome is not Outcome.PENDING:
        return Completion.of(slot, [BlockEnd(outcome)] * len(keys), layout.block_bytes)
    completion = collect(tier, 1)[slot]
    for place, (key, end) in enumerate(zip(keys, completion.blocks, strict=True)):
        assert end.outcome is not Outcome.HIT or memory.holds(key, place), "a HIT brought wrong bytes"
    return completion


def outcomes(completion: Completion) -> list[Outcome]:
    """How each block ended."""
    return [end.outcome for end in completion.blocks]


def by_slot(blocks: Iterable[RecoveredBlock]) -> dict[int, RecoveredBlock]:
    """The recovered blocks by slot; fails when a slot or a key comes twice."""
    found = list(blocks)
    slots = {int(block.slot): block for block in found}
    assert len(slots) == len(found) == len({block.key for block in found})
    return slots

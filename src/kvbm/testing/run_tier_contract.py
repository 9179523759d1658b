"""The contract of runs as tests, beside that of `tier_contract`. Subclass it as that one::

    class TestMyRuns(RunTierContract):
        def make_tier(self, tmp_path, slot_count, layout, namespace, pending_limit):
            return MyTier(tmp_path, slot_count, layout, namespace, pending_limit)

A tier that moves single blocks can be tested too: as `tiers.runs.with_runs` makes it one of runs.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvbm.block import BlockKey, Outcome, SlotIndex
from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.tier_contract import (
    NAMESPACE,
    PENDING_LIMIT,
    TierContract,
    by_slot,
    collect,
    load,
    make_key,
    store,
)
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion, RunTier, SlotTier
from kvbm.tiers.runs import with_runs

LENGTH = 5


class RunMemory:
    """Page-aligned memory for a run: one view per shard, as consecutive slots lie in host memory."""

    def __init__(self, layout: BlockLayout, count: int) -> None:
        self.layout = layout
        size = count * layout.slot_bytes
        memory = memoryview(mmap.mmap(-1, size * layout.shard_count))
        self.views = [memory[i * size : (i + 1) * size] for i in range(layout.shard_count)]

    @classmethod
    def of(cls, keys: Sequence[BlockKey], layout: BlockLayout) -> RunMemory:
        """Filled with the bytes that belong to the keys in all tests."""
        memory = cls(layout, len(keys))
        for place, key in enumerate(keys):
            content = hashlib.shake_128(key).digest(layout.block_bytes)
            for shard, part in enumerate(memory._block(place)):
                part[:] = content[shard * len(part) : (shard + 1) * len(part)]
        return memory

    def holds(self, place: int, key: BlockKey) -> bool:
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


def store_run(tier: RunTier, layout: BlockLayout, numbers: Sequence[int], slot: int) -> Completion:
    """Store the blocks' own bytes as one run and wait."""
    blocks = heads(numbers)
    memory = RunMemory.of([block.key for block in blocks], layout)
    assert tier.submit_store_run(slot, blocks, SlotIndex(slot), memory.views) is Outcome.PENDING
    return collect(tier, 1)[slot]


def load_run(tier: RunTier, layout: BlockLayout, numbers: Sequence[int], slot: int) -> Completion:
    """Load a run, wait, and fail when a HIT has brought any other bytes than its key's own."""
    keys = [make_key(number) for number in numbers]
    memory = RunMemory(layout, len(keys))
    outcome = tier.submit_load_run(slot, keys, SlotIndex(slot), memory.views)
    if outcome is not Outcome.PENDING:
        return Completion(job_id=slot, outcome=outcome, blocks=[BlockEnd(outcome)] * len(keys))
    completion = collect(tier, 1)[slot]
    for place, (key, end) in enumerate(zip(keys, completion.blocks, strict=True)):
        assert end.outcome is not Outcome.HIT or memory.holds(place, key), "a HIT brought wrong bytes"
    return completion


def outcomes(completion: Completion) -> list[Outcome]:
    """How each block of a run ended."""
    return [end.outcome for end in completion.blocks]


class RunTierContract(TierContract):
    """The duties of a tier that moves runs, those of every tier included."""

    @pytest.fixture
    def runs(self, tmp_path: Path) -> Iterator[RunTier]:
        tier = self.make_runs(tmp_path)
        yield tier
        tier.close(keep=False)

    def make_runs(self, tmp_path: Path, namespace: Namespace = NAMESPACE) -> RunTier:
        tier: SlotTier = self.make(tmp_path, namespace)
        return with_runs(tier)

    @staticmethod
    def run_length(tier: RunTier) -> int:
        return min(LENGTH, tier.run_blocks_max)

    def test_says_how_long_a_run_may_be_and_how_many_there_may_be(self, runs: RunTier) -> None:
        assert runs.run_blocks_max >= 1
        assert 0 < runs.store_room <= runs.pending_limit
        assert 0 < runs.load_room <= runs.pending_limit

    def test_a_stored_run_comes_back_bit_for_bit(self, runs: RunTier) -> None:
        numbers = range(1, 1 + self.run_length(runs))
        size = len(numbers) * self.layout.block_bytes
        stored = store_run(runs, self.layout, numbers, 2)
        assert (stored.outcome, stored.bytes_moved) == (Outcome.HIT, size)
        assert stored.blocks and set(outcomes(stored)) == {Outcome.HIT}
        loaded = load_run(runs, self.layout, numbers, 2)
        assert (loaded.outcome, loaded.bytes_moved, loaded.error) == (Outcome.HIT, size, "")
        assert list(loaded.blocks) == [
            BlockEnd(Outcome.HIT, False, head.engine_hash, head.group) for head in heads(numbers)
        ]

    def test_blocks_and_runs_are_the_same_blocks(self, runs: RunTier) -> None:
        numbers = range(1, 1 + self.run_length(runs))
        store_run(runs, self.layout, numbers, 3)
        for place, number in enumerate(numbers):
            assert load(runs, self.layout, make_key(number), 3 + place).outcome is Outcome.HIT
        for place, number in enumerate(numbers):
            store(runs, self.layout, make_key(10 + number), 3 + place)
        assert set(outcomes(load_run(runs, self.layout, numbers, 3))) == {Outcome.MISS}
        others = [10 + number for number in numbers]
        assert set(outcomes(load_run(runs, self.layout, others, 3))) == {Outcome.HIT}

    def test_each_block_of_a_run_ends_for_itself(self, runs: RunTier) -> None:
        numbers = list(range(1, 1 + self.run_length(runs)))
        store_run(runs, self.layout, numbers, 0)
        for place in range(len(numbers)):
            wanted = [*numbers]
            wanted[place] = 99
            loaded = load_run(runs, self.layout, wanted, 0)
            expected = [Outcome.HIT] * len(numbers)
            expected[place] = Outcome.MISS
            assert outcomes(loaded) == expected
            assert (loaded.outcome, loaded.corrupt) == (Outcome.MISS, False)
            assert loaded.bytes_moved == (len(numbers) - 1) * self.layout.block_bytes
        for place in range(len(numbers)):
            runs.forget(SlotIndex(place))
            expected = [Outcome.MISS] * (place + 1) + [Outcome.HIT] * (len(numbers) - place - 1)
            assert outcomes(load_run(runs, self.layout, numbers, 0)) == expected
        assert runs.fault == ""

    def test_a_forgotten_run_is_a_miss_and_its_neighbours_stay(self, runs: RunTier) -> None:
        for slot in range(self.slot_count):
            store(runs, self.layout, make_key(slot), slot)
        runs.forget_run(SlotIndex(2), 4)
        runs.forget_run(SlotIndex(2), 1)  # forgetting nothing is no error
        for slot in range(self.slot_count):
            expected = Outcome.MISS if 2 <= slot < 6 else Outcome.HIT
            assert load(runs, self.layout, make_key(slot), slot).outcome is expected

    def test_it_takes_what_it_has_room_for(self, runs: RunTier) -> None:
        """Room is an upper bound: where there is none, a run is refused, and then there is none."""
        block = heads([1])
        memory = RunMemory.of([block[0].key], self.layout)
        accepted = 0
        while (room := runs.store_room) and accepted <= PENDING_LIMIT:
            if (
                runs.submit_store_run(accepted, block, SlotIndex(accepted), memory.views)
                is not Outcome.PENDING
            ):
                break
            accepted += 1
            assert runs.store_room < room
        assert 0 < accepted <= runs.pending_limit
        assert runs.submit_store_run(99, block, SlotIndex(0), memory.views) is Outcome.THROTTLED
        collect(runs, accepted)
        assert runs.load_room > 0 and runs.store_room > 0

    def test_closing_completes_pending_runs(self, tmp_path: Path) -> None:
        runs = self.make_runs(tmp_path)
        blocks = heads(range(self.run_length(runs)))
        memory = RunMemory.of([block.key for block in blocks], self.layout)
        assert runs.submit_store_run(7, blocks, SlotIndex(0), memory.views) is Outcome.PENDING
        runs.close(keep=False)
        (completion,) = runs.poll()
        assert (completion.job_id, len(completion.blocks)) == (7, len(blocks))
        assert runs.poll() == []
        keys = [block.key for block in blocks]
        assert runs.submit_load_run(8, keys, SlotIndex(0), memory.views) is Outcome.RETRY
        assert runs.submit_store_run(9, blocks, SlotIndex(0), memory.views) is Outcome.RETRY


class PersistentRunTierContract(RunTierContract):
    """The further duty of a tier that finds its blocks again after a restart."""

    def test_runs_survive_a_restart(self, tmp_path: Path) -> None:
        runs = self.make_runs(tmp_path)
        length = self.run_length(runs)
        store_run(runs, self.layout, range(length), 1)
        store(runs, self.layout, make_key(50), 0)
        runs.close(keep=True)
        runs = self.make_runs(tmp_path)
        found = by_slot(runs.recovered())
        assert sorted(found) == list(range(length + 1))
        for slot, head in enumerate(heads(range(length)), 1):
            block = found[slot]
            assert BlockHead(block.key, block.parent, block.engine_hash, block.group) == head
        sequences = [found[slot].sequence for slot in (*range(1, length + 1), 0)]
        assert sequences == sorted(set(sequences)), "later blocks have higher sequences"
        assert set(outcomes(load_run(runs, self.layout, range(length), 1))) == {Outcome.HIT}
        runs.close(keep=False)

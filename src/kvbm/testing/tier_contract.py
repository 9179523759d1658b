"""The contract of a storage tier as tests. Subclass `TierContract`, say how to make your tier, and run pytest::

    class TestMyTier(TierContract):
        def make_tier(self, tmp_path, slot_count, layout, namespace, pending_limit):
            return MyTier(tmp_path, slot_count, layout, namespace, pending_limit)

A tier that finds its blocks again after a restart mixes in `PersistentTierContract` too. The tests wait on `fileno`
with deadlines and never sleep.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.block import GROUP_MAX, Outcome, SlotIndex
from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.stored_runs import (
    DEADLINE_S,
    LAYOUT,
    NAMESPACE,
    OTHER_NAMESPACE,
    RunMemory,
    by_slot,
    collect,
    heads,
    load,
    load_run,
    make_key,
    outcomes,
    store,
    store_run,
    wait_readable,
)
from kvbm.tiers.contract import BlockEnd, BlockHead, RunTier

PENDING_LIMIT = 8
SLOT_COUNT = 12
RUN_LENGTH = 5
_NAMES = ((b"", 0), (bytes(range(32)), 0), (b"", 3), (b"\xff" * 32, GROUP_MAX))
"""Engine's hash and group of a few blocks."""

BLOCK = (BlockHead(make_key(1), None),)
"""A run of one block."""


class TierContract(abc.ABC):
    """The duties of every tier. Override `make_tier`; `layout` and `slot_count` may be overridden too."""

    layout: BlockLayout = LAYOUT
    slot_count: int = SLOT_COUNT

    @abc.abstractmethod
    def make_tier(
        self, tmp_path: Path, slot_count: int, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> RunTier:
        """A new tier with exactly `slot_count` slots whose data, if it has any on disk, lives under `tmp_path`.

        Called again with the same path after a `close(keep=True)`, it is what comes after a restart.
        """

    def make(self, tmp_path: Path, namespace: Namespace = NAMESPACE) -> RunTier:
        return self.make_tier(tmp_path, self.slot_count, self.layout, namespace, PENDING_LIMIT)

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[RunTier]:
        tier = self.make(tmp_path)
        yield tier
        tier.close(keep=False)

    def test_says_what_it_is(self, tier: RunTier) -> None:
        assert tier.name
        assert tier.slot_count == self.slot_count
        assert 0 < tier.pending_limit <= PENDING_LIMIT
        assert tier.fault == ""

    def test_a_stored_block_comes_back_bit_for_bit(self, tier: RunTier) -> None:
        stored = store(tier, self.layout, make_key(1), 3)
        assert stored.outcome is Outcome.HIT
        assert stored.bytes_moved == self.layout.block_bytes
        loaded = load(tier, self.layout, make_key(1), 3)
        assert loaded.outcome is Outcome.HIT
        assert loaded.bytes_moved == self.layout.block_bytes
        assert loaded.seconds >= 0.0
        assert not loaded.error

    def test_every_slot_keeps_its_own_block(self, tier: RunTier) -> None:
        for slot in range(self.slot_count):
            assert store(tier, self.layout, make_key(slot), slot).outcome is Outcome.HIT
        for slot in reversed(range(self.slot_count)):
            assert load(tier, self.layout, make_key(slot), slot).outcome is Outcome.HIT

    def test_what_the_engine_calls_a_block_comes_back_with_it(self, tier: RunTier) -> None:
        for slot, (engine_hash, group) in enumerate(_NAMES):
            store(tier, self.layout, make_key(slot), slot, None, engine_hash, group)
        for slot, name in enumerate(_NAMES):
            loaded = load(tier, self.layout, make_key(slot), slot)
            assert list(loaded.blocks) == [BlockEnd(Outcome.HIT, False, *name)]

    def test_an_empty_slot_is_a_miss(self, tier: RunTier) -> None:
        missed = load(tier, self.layout, make_key(1), 0)
        assert missed.outcome is Outcome.MISS
        assert not missed.corrupt

    def test_another_key_is_a_miss_and_no_corruption(self, tier: RunTier) -> None:
        store(tier, self.layout, make_key(1), 0)
        missed = load(tier, self.layout, make_key(2), 0)
        assert missed.outcome is Outcome.MISS
        assert not missed.corrupt
        assert load(tier, self.layout, make_key(1), 0).outcome is Outcome.HIT

    def test_overwriting_replaces_the_block(self, tier: RunTier) -> None:
        for number in (1, 2, 3):
            tier.forget(SlotIndex(5))
            store(tier, self.layout, make_key(number), 5)
            assert load(tier, self.layout, make_key(number), 5).outcome is Outcome.HIT
            assert load(tier, self.layout, make_key(number - 1), 5).outcome is Outcome.MISS

    def test_overwriting_without_forgetting_replaces_it_too(self, tier: RunTier) -> None:
        store(tier, self.layout, make_key(1), 5)
        store(tier, self.layout, make_key(2), 5)
        assert load(tier, self.layout, make_key(1), 5).outcome is Outcome.MISS
        assert load(tier, self.layout, make_key(2), 5).outcome is Outcome.HIT

    def test_a_forgotten_block_is_a_miss(self, tier: RunTier) -> None:
        store(tier, self.layout, make_key(1), 2)
        tier.forget(SlotIndex(2))
        assert tier.drain(DEADLINE_S)
        assert load(tier, self.layout, make_key(1), 2).outcome is Outcome.MISS
        tier.forget(SlotIndex(2))  # forgetting nothing is no error
        assert tier.fault == ""

    def test_many_at_once_complete_exactly_once(self, tier: RunTier) -> None:
        store(tier, self.layout, make_key(0), 0)
        targets = [RunMemory(self.layout) for _ in range(tier.pending_limit)]
        accepted = [
            job
            for job, target in enumerate(targets)
            if tier.submit_load(job, [make_key(0)], SlotIndex(0), target.views) is Outcome.PENDING
        ]
        assert accepted
        found = collect(tier, len(accepted))
        assert sorted(found) == accepted
        for job in accepted:
            assert found[job].outcome is Outcome.HIT
            assert targets[job].holds(make_key(0))
        assert tier.poll() == []

    def test_beyond_the_limit_it_refuses_and_does_nothing(self, tier: RunTier) -> None:
        """Without a poll in between nothing makes room: completions that nobody took are bounded too."""
        sources = RunMemory.of([make_key(1)], self.layout)
        answers = [
            tier.submit_store(slot, BLOCK, SlotIndex(slot), sources.views) for slot in range(self.slot_count)
        ]
        accepted = answers.count(Outcome.PENDING)
        assert 0 < accepted <= tier.pending_limit < self.slot_count
        assert answers == [Outcome.PENDING] * accepted + [Outcome.THROTTLED] * (self.slot_count - accepted)
        assert sorted(collect(tier, accepted)) == list(range(accepted))
        for slot in range(self.slot_count):
            expected = Outcome.HIT if slot < accepted else Outcome.MISS
            assert load(tier, self.layout, make_key(1), slot).outcome is expected

    def test_the_descriptor_is_readable_when_there_is_something(self, tier: RunTier) -> None:
        assert not wait_readable(tier, 0.0)
        assert tier.poll() == []
        sources = RunMemory.of([make_key(1)], self.layout)
        assert tier.submit_store(7, BLOCK, SlotIndex(0), sources.views) is Outcome.PENDING
        assert tier.drain(DEADLINE_S)
        assert wait_readable(tier, 0.0)
        assert [completion.job_id for completion in tier.poll()] == [7]
        assert not wait_readable(tier, 0.0)

    def test_drain_with_nothing_pending_is_done_at_once(self, tier: RunTier) -> None:
        assert tier.drain(DEADLINE_S)  # what its opening began
        assert tier.drain(0.0)

    def test_healing_what_is_well_changes_nothing(self, tier: RunTier) -> None:
        store(tier, self.layout, make_key(1), 0)
        assert tier.heal() is Outcome.HIT
        assert load(tier, self.layout, make_key(1), 0).outcome is Outcome.HIT

    def test_a_new_tier_recovers_nothing(self, tier: RunTier) -> None:
        assert list(tier.recovered()) == []

    def test_closing_completes_what_is_pending(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        sources = RunMemory.of([make_key(1)], self.layout)
        accepted = [
            job
            for job in range(tier.pending_limit)
            if tier.submit_store(job, BLOCK, SlotIndex(job), sources.views) is Outcome.PENDING
        ]
        tier.close(keep=False)
        assert sorted(completion.job_id for completion in tier.poll()) == accepted
        assert tier.poll() == []

    def test_a_closed_tier_takes_nothing(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        tier.close(keep=False)
        buffers = RunMemory(self.layout)
        assert tier.submit_load(0, [make_key(1)], SlotIndex(0), buffers.views) is Outcome.RETRY
        assert tier.submit_store(1, BLOCK, SlotIndex(0), buffers.views) is Outcome.RETRY
        tier.close(keep=False)  # closing twice is no error
        assert tier.poll() == []

    # ---- runs

    @staticmethod
    def run_length(tier: RunTier) -> int:
        return min(RUN_LENGTH, tier.run_blocks_max)

    def test_says_how_long_a_run_may_be_and_how_many_there_may_be(self, tier: RunTier) -> None:
        assert tier.run_blocks_max >= 1
        assert 0 < tier.store_room <= tier.pending_limit
        assert 0 < tier.load_room <= tier.pending_limit

    def test_a_stored_run_comes_back_bit_for_bit(self, tier: RunTier) -> None:
        numbers = range(1, 1 + self.run_length(tier))
        size = len(numbers) * self.layout.block_bytes
        stored = store_run(tier, self.layout, numbers, 2)
        assert (stored.outcome, stored.bytes_moved) == (Outcome.HIT, size)
        assert stored.blocks and set(outcomes(stored)) == {Outcome.HIT}
        loaded = load_run(tier, self.layout, numbers, 2)
        assert (loaded.outcome, loaded.bytes_moved, loaded.error) == (Outcome.HIT, size, "")
        assert list(loaded.blocks) == [
            BlockEnd(Outcome.HIT, False, head.engine_hash, head.group) for head in heads(numbers)
        ]

    def test_blocks_and_runs_are_the_same_blocks(self, tier: RunTier) -> None:
        numbers = range(1, 1 + self.run_length(tier))
        store_run(tier, self.layout, numbers, 3)
        for place, number in enumerate(numbers):
            assert load(tier, self.layout, make_key(number), 3 + place).outcome is Outcome.HIT
        for place, number in enumerate(numbers):
            store(tier, self.layout, make_key(10 + number), 3 + place)
        assert set(outcomes(load_run(tier, self.layout, numbers, 3))) == {Outcome.MISS}
        others = [10 + number for number in numbers]
        assert set(outcomes(load_run(tier, self.layout, others, 3))) == {Outcome.HIT}

    def test_each_block_of_a_run_ends_for_itself(self, tier: RunTier) -> None:
        numbers = list(range(1, 1 + self.run_length(tier)))
        store_run(tier, self.layout, numbers, 0)
        for place in range(len(numbers)):
            wanted = [*numbers]
            wanted[place] = 99
            loaded = load_run(tier, self.layout, wanted, 0)
            expected = [Outcome.HIT] * len(numbers)
            expected[place] = Outcome.MISS
            assert outcomes(loaded) == expected
            assert (loaded.outcome, loaded.corrupt) == (Outcome.MISS, False)
            assert loaded.bytes_moved == (len(numbers) - 1) * self.layout.block_bytes
        for place in range(len(numbers)):
            tier.forget(SlotIndex(place))
            assert tier.drain(DEADLINE_S)
            expected = [Outcome.MISS] * (place + 1) + [Outcome.HIT] * (len(numbers) - place - 1)
            assert outcomes(load_run(tier, self.layout, numbers, 0)) == expected
        assert tier.fault == ""

    def test_a_forgotten_run_is_a_miss_and_its_neighbours_stay(self, tier: RunTier) -> None:
        for slot in range(self.slot_count):
            store(tier, self.layout, make_key(slot), slot)
        tier.forget(SlotIndex(2), 4)
        tier.forget(SlotIndex(2), 1)  # forgetting nothing is no error
        assert tier.drain(DEADLINE_S)
        for slot in range(self.slot_count):
            expected = Outcome.MISS if 2 <= slot < 6 else Outcome.HIT
            assert load(tier, self.layout, make_key(slot), slot).outcome is expected

    def test_it_takes_what_it_has_room_for(self, tier: RunTier) -> None:
        """Room is an upper bound: where there is none, a run is refused, and then there is none."""
        block = heads([1])
        memory = RunMemory.of([block[0].key], self.layout)
        accepted = 0
        while (room := tier.store_room) and accepted <= PENDING_LIMIT:
            if tier.submit_store(accepted, block, SlotIndex(accepted), memory.views) is not Outcome.PENDING:
                break
            accepted += 1
            assert tier.store_room < room
        assert 0 < accepted <= tier.pending_limit
        assert tier.submit_store(99, block, SlotIndex(0), memory.views) is Outcome.THROTTLED
        collect(tier, accepted)
        assert tier.load_room > 0 and tier.store_room > 0

    def test_closing_completes_pending_runs(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        blocks = heads(range(self.run_length(tier)))
        memory = RunMemory.of([block.key for block in blocks], self.layout)
        assert tier.submit_store(7, blocks, SlotIndex(0), memory.views) is Outcome.PENDING
        tier.close(keep=False)
        (completion,) = tier.poll()
        assert (completion.job_id, len(completion.blocks)) == (7, len(blocks))
        assert tier.poll() == []
        keys = [block.key for block in blocks]
        assert tier.submit_load(8, keys, SlotIndex(0), memory.views) is Outcome.RETRY
        assert tier.submit_store(9, blocks, SlotIndex(0), memory.views) is Outcome.RETRY


class PersistentTierContract(TierContract):
    """The further duties of a tier that finds its blocks again after a restart."""

    def reopen(self, tier: RunTier, tmp_path: Path) -> RunTier:
        """An orderly restart."""
        tier.close(keep=True)
        return self.make(tmp_path)

    def test_blocks_survive_a_restart(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        for slot in range(self.slot_count):
            parent = make_key(slot - 1) if slot else None
            store(tier, self.layout, make_key(slot), slot, parent)
        tier = self.reopen(tier, tmp_path)
        found = by_slot(tier.recovered())
        assert list(tier.recovered()) == [], "recovered() tells once"
        assert sorted(found) == list(range(self.slot_count))
        for slot in range(self.slot_count):
            assert found[slot].key == make_key(slot)
            assert found[slot].parent == (make_key(slot - 1) if slot else None)
            assert load(tier, self.layout, make_key(slot), slot).outcome is Outcome.HIT
        sequences = [found[slot].sequence for slot in range(self.slot_count)]
        assert sequences == sorted(set(sequences)), "later stores have higher sequences"
        tier.close(keep=False)

    def test_what_the_engine_calls_a_block_survives_a_restart(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        for slot, (engine_hash, group) in enumerate(_NAMES):
            store(tier, self.layout, make_key(slot), slot, None, engine_hash, group)
        tier = self.reopen(tier, tmp_path)
        found = by_slot(tier.recovered())
        for slot, name in enumerate(_NAMES):
            assert (found[slot].engine_hash, found[slot].group) == name
            loaded = load(tier, self.layout, make_key(slot), slot)
            assert list(loaded.blocks) == [BlockEnd(Outcome.HIT, False, *name)]
        tier.close(keep=False)

    def test_sequences_go_on_after_a_restart(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        store(tier, self.layout, make_key(1), 1)
        tier = self.reopen(tier, tmp_path)
        store(tier, self.layout, make_key(2), 0)
        tier = self.reopen(tier, tmp_path)
        found = by_slot(tier.recovered())
        assert found[1].sequence < found[0].sequence
        tier.close(keep=False)

    def test_forgotten_and_overwritten_blocks_stay_away(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        for slot in range(3):
            store(tier, self.layout, make_key(slot), slot)
        tier.forget(SlotIndex(0))
        tier.forget(SlotIndex(1))
        store(tier, self.layout, make_key(11), 1)
        tier = self.reopen(tier, tmp_path)
        assert {slot: block.key for slot, block in by_slot(tier.recovered()).items()} == {
            1: make_key(11),
            2: make_key(2),
        }
        tier.close(keep=False)

    def test_of_two_blocks_with_one_key_the_newer_is_found(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        store(tier, self.layout, make_key(1), 4)
        store(tier, self.layout, make_key(1), 2)
        for _ in range(2):
            tier = self.reopen(tier, tmp_path)
            assert sorted(by_slot(tier.recovered())) == [2]
        tier.forget(SlotIndex(2))
        tier = self.reopen(tier, tmp_path)
        assert list(tier.recovered()) == [], "the older one must not come back when the newer is forgotten"
        tier.close(keep=False)

    def test_another_namespace_finds_nothing(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        store(tier, self.layout, make_key(1), 0)
        tier.close(keep=True)
        other = self.make(tmp_path, OTHER_NAMESPACE)
        assert list(other.recovered()) == []
        assert load(other, self.layout, make_key(1), 0).outcome is Outcome.MISS
        other.close(keep=False)

    def test_closing_without_keeping_leaves_nothing(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        store(tier, self.layout, make_key(1), 0)
        tier.close(keep=False)
        assert os.listdir(tmp_path) == []
        tier = self.make(tmp_path)
        assert list(tier.recovered()) == []
        tier.close(keep=False)

    def test_runs_survive_a_restart(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        length = self.run_length(tier)
        store_run(tier, self.layout, range(length), 1)
        store(tier, self.layout, make_key(50), 0)
        tier.close(keep=True)
        tier = self.make(tmp_path)
        found = by_slot(tier.recovered())
        assert sorted(found) == list(range(length + 1))
        for slot, head in enumerate(heads(range(length)), 1):
            block = found[slot]
            assert BlockHead(block.key, block.parent, block.engine_hash, block.group) == head
        sequences = [found[slot].sequence for slot in (*range(1, length + 1), 0)]
        assert sequences == sorted(set(sequences)), "later blocks have higher sequences"
        assert set(outcomes(load_run(tier, self.layout, range(length), 1))) == {Outcome.HIT}
        tier.close(keep=False)

"""The contract of a storage tier as tests. Subclass `TierContract`, say how to make your tier, and run pytest::

    class TestMyTier(TierContract):
        def make_tier(self, tmp_path, slot_count, layout, namespace, pending_limit):
            return MyTier(tmp_path, slot_count, layout, namespace, pending_limit)

A tier that finds its blocks again after a restart mixes in `PersistentTierContract` too. The tests wait on `fileno`
with deadlines and never sleep.
"""

from __future__ import annotations

import abc
import hashlib
import mmap
import os
import select
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kvbm.block import GROUP_MAX, BlockKey, Outcome, SlotIndex
from kvbm.layout import BlockLayout, Namespace
from kvbm.tiers.contract import Completion, RecoveredBlock, SlotTier

DEADLINE_S = 30.0
PENDING_LIMIT = 8
SLOT_COUNT = 12
LAYOUT = BlockLayout(block_tokens=16, shard_bytes=9000, shard_count=2)
_NAMES = ((b"", 0), (bytes(range(32)), 0), (b"", 3), (b"\xff" * 32, GROUP_MAX))
"""Engine's hash and group of a few blocks."""

NAMESPACE = Namespace(model="contract/model", fields=(("weights", "0123"), ("dtype", "bfloat16")))
OTHER_NAMESPACE = Namespace(model="contract/model", fields=(("weights", "4567"), ("dtype", "bfloat16")))


def make_key(number: int) -> BlockKey:
    """The key of test block `number`."""
    return BlockKey(hashlib.sha256(b"test block %d" % number).digest())


class BlockBuffers:
    """Page-aligned memory for one block, one view per shard."""

    def __init__(self, layout: BlockLayout) -> None:
        self._memory = memoryview(mmap.mmap(-1, layout.block_bytes))
        size = layout.slot_bytes
        self.views = [self._memory[i * size : (i + 1) * size] for i in range(layout.shard_count)]

    @classmethod
    def of(cls, key: BlockKey, layout: BlockLayout) -> BlockBuffers:
        """Filled with the bytes that belong to the key in all tests: a stream that no other key has."""
        buffers = cls(layout)
        buffers._memory[:] = hashlib.shake_128(key).digest(layout.block_bytes)
        return buffers

    def hold(self, key: BlockKey) -> bool:
        """True when every byte is the key's."""
        return self._memory == hashlib.shake_128(key).digest(len(self._memory))


def wait_readable(tier: SlotTier, deadline_s: float = DEADLINE_S) -> bool:
    """Wait for the tier's descriptor."""
    return bool(select.select([tier.fileno()], [], [], deadline_s)[0])


def collect(tier: SlotTier, count: int, deadline_s: float = DEADLINE_S) -> dict[int, Completion]:
    """Poll until `count` completions came; fails when one comes twice or the deadline passes."""
    found: dict[int, Completion] = {}
    end_s = time.monotonic() + deadline_s
    while len(found) < count:
        assert wait_readable(tier, end_s - time.monotonic()), f"{len(found)} of {count} completions came"
        for completion in tier.poll():
            assert completion.job_id not in found, "completed twice"
            found[completion.job_id] = completion
    return found


def store(
    tier: SlotTier,
    layout: BlockLayout,
    key: BlockKey,
    slot: int,
    parent: BlockKey | None = None,
    engine_hash: bytes = b"",
    group: int = 0,
) -> Completion:
    """Store the key's own bytes and wait."""
    views = BlockBuffers.of(key, layout).views
    accepted = tier.submit_store(slot, key, parent, SlotIndex(slot), views, engine_hash, group)
    assert accepted is Outcome.PENDING
    return collect(tier, 1)[slot]


def load(tier: SlotTier, layout: BlockLayout, key: BlockKey, slot: int) -> Completion:
    """Load, wait, and fail when a HIT has brought any other bytes than the key's own."""
    buffers = BlockBuffers(layout)
    outcome = tier.submit_load(slot, key, SlotIndex(slot), buffers.views)
    if outcome is not Outcome.PENDING:
        return Completion(job_id=slot, outcome=outcome)
    completion = collect(tier, 1)[slot]
    if completion.outcome is Outcome.HIT:
        assert buffers.hold(key), "a HIT brought wrong bytes"
    return completion


class TierContract(abc.ABC):
    """The duties of every tier. Override `make_tier`; `layout` and `slot_count` may be overridden too."""

    layout: BlockLayout = LAYOUT
    slot_count: int = SLOT_COUNT

    @abc.abstractmethod
    def make_tier(
        self, tmp_path: Path, slot_count: int, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> SlotTier:
        """A new tier with exactly `slot_count` slots whose data, if it has any on disk, lives under `tmp_path`.

        Called again with the same path after a `close(keep=True)`, it is what comes after a restart.
        """

    def make(self, tmp_path: Path, namespace: Namespace = NAMESPACE) -> SlotTier:
        return self.make_tier(tmp_path, self.slot_count, self.layout, namespace, PENDING_LIMIT)

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[SlotTier]:
        tier = self.make(tmp_path)
        yield tier
        tier.close(keep=False)

    def test_says_what_it_is(self, tier: SlotTier) -> None:
        assert tier.name
        assert tier.slot_count == self.slot_count
        assert 0 < tier.pending_limit <= PENDING_LIMIT
        assert tier.fault == ""

    def test_a_stored_block_comes_back_bit_for_bit(self, tier: SlotTier) -> None:
        stored = store(tier, self.layout, make_key(1), 3)
        assert stored.outcome is Outcome.HIT
        assert stored.bytes_moved == self.layout.block_bytes
        loaded = load(tier, self.layout, make_key(1), 3)
        assert loaded.outcome is Outcome.HIT
        assert loaded.bytes_moved == self.layout.block_bytes
        assert loaded.seconds >= 0.0
        assert not loaded.error

    def test_every_slot_keeps_its_own_block(self, tier: SlotTier) -> None:
        for slot in range(self.slot_count):
            assert store(tier, self.layout, make_key(slot), slot).outcome is Outcome.HIT
        for slot in reversed(range(self.slot_count)):
            assert load(tier, self.layout, make_key(slot), slot).outcome is Outcome.HIT

    def test_what_the_engine_calls_a_block_comes_back_with_it(self, tier: SlotTier) -> None:
        for slot, (engine_hash, group) in enumerate(_NAMES):
            store(tier, self.layout, make_key(slot), slot, None, engine_hash, group)
        for slot, name in enumerate(_NAMES):
            loaded = load(tier, self.layout, make_key(slot), slot)
            assert (loaded.outcome, loaded.engine_hash, loaded.group) == (Outcome.HIT, *name)

    def test_an_empty_slot_is_a_miss(self, tier: SlotTier) -> None:
        missed = load(tier, self.layout, make_key(1), 0)
        assert missed.outcome is Outcome.MISS
        assert not missed.corrupt

    def test_another_key_is_a_miss_and_no_corruption(self, tier: SlotTier) -> None:
        store(tier, self.layout, make_key(1), 0)
        missed = load(tier, self.layout, make_key(2), 0)
        assert missed.outcome is Outcome.MISS
        assert not missed.corrupt
        assert load(tier, self.layout, make_key(1), 0).outcome is Outcome.HIT

    def test_overwriting_replaces_the_block(self, tier: SlotTier) -> None:
        for number in (1, 2, 3):
            tier.forget(SlotIndex(5))
            store(tier, self.layout, make_key(number), 5)
            assert load(tier, self.layout, make_key(number), 5).outcome is Outcome.HIT
            assert load(tier, self.layout, make_key(number - 1), 5).outcome is Outcome.MISS

    def test_overwriting_without_forgetting_replaces_it_too(self, tier: SlotTier) -> None:
        store(tier, self.layout, make_key(1), 5)
        store(tier, self.layout, make_key(2), 5)
        assert load(tier, self.layout, make_key(1), 5).outcome is Outcome.MISS
        assert load(tier, self.layout, make_key(2), 5).outcome is Outcome.HIT

    def test_a_forgotten_block_is_a_miss(self, tier: SlotTier) -> None:
        store(tier, self.layout, make_key(1), 2)
        tier.forget(SlotIndex(2))
        assert load(tier, self.layout, make_key(1), 2).outcome is Outcome.MISS
        tier.forget(SlotIndex(2))  # forgetting nothing is no error
        assert tier.fault == ""

    def test_many_at_once_complete_exactly_once(self, tier: SlotTier) -> None:
        store(tier, self.layout, make_key(0), 0)
        targets = [BlockBuffers(self.layout) for _ in range(tier.pending_limit)]
        accepted = [
            job
            for job, target in enumerate(targets)
            if tier.submit_load(job, make_key(0), SlotIndex(0), target.views) is Outcome.PENDING
        ]
        assert accepted
        found = collect(tier, len(accepted))
        assert sorted(found) == accepted
        for job in accepted:
            assert found[job].outcome is Outcome.HIT
            assert targets[job].hold(make_key(0))
        assert tier.poll() == []

    def test_beyond_the_limit_it_refuses_and_does_nothing(self, tier: SlotTier) -> None:
        """Without a poll in between nothing makes room: completions that nobody took are bounded too."""
        sources = BlockBuffers.of(make_key(1), self.layout)
        outcomes = [
            tier.submit_store(slot, make_key(1), None, SlotIndex(slot), sources.views)
            for slot in range(self.slot_count)
        ]
        accepted = outcomes.count(Outcome.PENDING)
        assert 0 < accepted <= tier.pending_limit < self.slot_count
        assert outcomes == [Outcome.PENDING] * accepted + [Outcome.THROTTLED] * (self.slot_count - accepted)
        assert sorted(collect(tier, accepted)) == list(range(accepted))
        for slot in range(self.slot_count):
            expected = Outcome.HIT if slot < accepted else Outcome.MISS
            assert load(tier, self.layout, make_key(1), slot).outcome is expected

    def test_the_descriptor_is_readable_when_there_is_something(self, tier: SlotTier) -> None:
        assert not wait_readable(tier, 0.0)
        assert tier.poll() == []
        sources = BlockBuffers.of(make_key(1), self.layout)
        assert tier.submit_store(7, make_key(1), None, SlotIndex(0), sources.views) is Outcome.PENDING
        assert tier.drain(DEADLINE_S)
        assert wait_readable(tier, 0.0)
        assert [completion.job_id for completion in tier.poll()] == [7]
        assert not wait_readable(tier, 0.0)

    def test_drain_with_nothing_pending_is_done_at_once(self, tier: SlotTier) -> None:
        assert tier.drain(0.0)

    def test_healing_what_is_well_changes_nothing(self, tier: SlotTier) -> None:
        store(tier, self.layout, make_key(1), 0)
        assert tier.heal()
        assert load(tier, self.layout, make_key(1), 0).outcome is Outcome.HIT

    def test_a_new_tier_recovers_nothing(self, tier: SlotTier) -> None:
        assert list(tier.recovered()) == []

    def test_closing_completes_what_is_pending(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        sources = BlockBuffers.of(make_key(1), self.layout)
        accepted = [
            job
            for job in range(tier.pending_limit)
            if tier.submit_store(job, make_key(1), None, SlotIndex(job), sources.views) is Outcome.PENDING
        ]
        tier.close(keep=False)
        assert sorted(completion.job_id for completion in tier.poll()) == accepted
        assert tier.poll() == []

    def test_a_closed_tier_takes_nothing(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        tier.close(keep=False)
        buffers = BlockBuffers(self.layout)
        assert tier.submit_load(0, make_key(1), SlotIndex(0), buffers.views) is Outcome.RETRY
        assert tier.submit_store(1, make_key(1), None, SlotIndex(0), buffers.views) is Outcome.RETRY
        tier.close(keep=False)  # closing twice is no error
        assert tier.poll() == []


class PersistentTierContract(TierContract):
    """The further duties of a tier that finds its blocks again after a restart."""

    def reopen(self, tier: SlotTier, tmp_path: Path) -> SlotTier:
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
            assert (loaded.outcome, loaded.engine_hash, loaded.group) == (Outcome.HIT, *name)
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


def by_slot(blocks: Iterable[RecoveredBlock]) -> dict[int, RecoveredBlock]:
    """The recovered blocks by slot; fails when a slot or a key comes twice."""
    found = list(blocks)
    slots = {int(block.slot): block for block in found}
    assert len(slots) == len(found) == len({block.key for block in found})
    return slots

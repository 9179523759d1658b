"""The contract of a remote tier as tests. Subclass `RemoteContract`, say how to make a node of yours, and run pytest::

    class TestMyRemote(RemoteContract):
        def make_remote(self, tmp_path, layout, namespace, pending_limit):
            return MyRemote(tmp_path, layout, namespace, pending_limit)

Each call makes another node on the same store. The tests wait on `fileno` with deadlines, and for what nodes learn of
one another they `tick` until it is there.
"""

from __future__ import annotations

import abc
import hashlib
import mmap
import select
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvbm.block import GROUP_MAX, BlockKey, Outcome
from kvbm.layout import BlockLayout, Namespace
from kvbm.testing.stored_runs import LAYOUT, NAMESPACE, OTHER_NAMESPACE, make_key
from kvbm.tiers.contract import BlockEnd, BlockHead, Completion
from kvbm.tiers.remote.contract import NOWHERE, Buffers, RemoteTier

DEADLINE_S = 30.0
PENDING_LIMIT = 8
LENGTH = 5
_ENGINE_HASH = bytes(range(32))


class RemoteBuffers:
    """Page-aligned memory for blocks, one view per shard of each."""

    def __init__(self, layout: BlockLayout, count: int) -> None:
        self.layout = layout
        size = layout.slot_bytes
        self._memory = memoryview(mmap.mmap(-1, layout.block_bytes * count))
        parts = [self._memory[start : start + size] for start in range(0, len(self._memory), size)]
        shards = layout.shard_count
        self.views: list[Buffers] = [parts[block * shards : (block + 1) * shards] for block in range(count)]

    @classmethod
    def of(cls, keys: Sequence[BlockKey], layout: BlockLayout) -> RemoteBuffers:
        """Filled with the bytes that belong to the keys in all tests."""
        buffers = cls(layout, len(keys))
        buffers._memory[:] = b"".join(content(key, layout) for key in keys)
        return buffers

    def holds(self, number: int, key: BlockKey) -> bool:
        """True when every byte of this block is the key's."""
        return b"".join(self.views[number]) == content(key, self.layout)

    def fill(self, byte: int) -> None:
        """Write this byte everywhere."""
        self._memory[:] = bytes((byte,)) * len(self._memory)


def content(key: BlockKey, layout: BlockLayout) -> bytes:
    """The bytes that belong to the key in all tests: a stream that no other key has."""
    return hashlib.shake_128(key).digest(layout.block_bytes)


def chain(first: int, count: int) -> list[BlockHead]:
    """Test blocks of a chain, from block `first` on; each knows the one before it."""
    numbers = range(first, first + count)
    return [
        BlockHead(
            make_key(number),
            make_key(number - 1) if number else None,
            _ENGINE_HASH,
            number % 4,
            b"f%d" % number,
        )
        for number in numbers
    ]


def keys_of(blocks: Sequence[BlockHead]) -> list[BlockKey]:
    """Their keys."""
    return [block.key for block in blocks]


def collect(tier: RemoteTier, count: int, deadline_s: float = DEADLINE_S) -> dict[int, Completion]:
    """Poll until `count` completions came; fails when one comes twice or the deadline passes."""
    found: dict[int, Completion] = {}
    end_s = time.monotonic() + deadline_s
    while len(found) < count:
        left_s = end_s - time.monotonic()
        assert left_s > 0 and select.select([tier.fileno()], [], [], left_s)[0], (
            f"{len(found)} of {count} came"
        )
        for completion in tier.poll():
            assert completion.job_id not in found, "completed twice"
            found[completion.job_id] = completion
    return found


def eventually(tier: RemoteTier, true: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
    """Tick and poll until it is true; nothing may be pending."""
    end_s = time.monotonic() + deadline_s
    while not true():
        if time.monotonic() > end_s:
            return False
        tier.tick()
        select.select([tier.fileno()], [], [], 0.02)
        assert tier.poll() == [], "a completion of nothing"
    return True


def store(
    tier: RemoteTier,
    layout: BlockLayout,
    blocks: Sequence[BlockHead],
    tenant: str | None = None,
    tail: bool = False,
    job_id: int = 1,
) -> Completion:
    """Store the keys' own bytes and wait; the sources are overwritten then, as their slots may be."""
    sources = RemoteBuffers.of(keys_of(blocks), layout)
    assert tier.submit_store(job_id, blocks, sources.views, tenant, tail) is Outcome.PENDING
    completion = collect(tier, 1)[job_id]
    sources.fill(0x55)
    return completion


def load(
    tier: RemoteTier,
    layout: BlockLayout,
    keys: Sequence[BlockKey],
    place: int,
    tenant: str | None = None,
    job_id: int = 2,
) -> Completion:
    """Load, wait, and fail when a HIT has brought any other bytes than the key's own."""
    targets = RemoteBuffers(layout, len(keys))
    outcome = tier.submit_load(job_id, keys, place, targets.views, tenant)
    if outcome is not Outcome.PENDING:
        return Completion.of(job_id, [BlockEnd(outcome)] * len(keys), layout.block_bytes)
    completion = collect(tier, 1)[job_id]
    assert len(completion.blocks) == len(keys)
    for number, (key, end) in enumerate(zip(keys, completion.blocks, strict=True)):
        assert end.outcome is not Outcome.HIT or targets.holds(number, key), "a HIT brought wrong bytes"
    return completion


def load_each(
    tier: RemoteTier, layout: BlockLayout, keys: Sequence[BlockKey], tenant: str | None = None
) -> list[Outcome]:
    """Load blocks from where they are believed to lie, as many at once as the tier takes; how each ended."""
    places, outcomes = tier.places(keys), list[Outcome]()
    while (done := len(outcomes)) < len(keys):
        count = 1
        while (
            count < min(tier.load_blocks_max, len(keys) - done)
            and places[done + count] == places[done] + count
        ):
            count += 1
        if places[done] == NOWHERE:
            outcomes.append(Outcome.MISS)
            continue
        loaded = load(tier, layout, keys[done : done + count], places[done], tenant)
        outcomes += [end.outcome for end in loaded.blocks] or [loaded.outcome] * count
    return outcomes


class RemoteContract(abc.ABC):
    """The duties of every remote tier. Override `make_remote`; `layout` may be overridden too."""

    layout: BlockLayout = LAYOUT

    @abc.abstractmethod
    def make_remote(
        self, tmp_path: Path, layout: BlockLayout, namespace: Namespace, pending_limit: int
    ) -> RemoteTier:
        """A new node whose store, if it is on disk, lives under `tmp_path`. It looks for news at least each second."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Callable[..., RemoteTier]]:
        nodes: list[RemoteTier] = []

        def make(namespace: Namespace = NAMESPACE) -> RemoteTier:
            nodes.append(self.make_remote(tmp_path, self.layout, namespace, PENDING_LIMIT))
            return nodes[-1]

        yield make
        for node in nodes:
            node.close()

    @pytest.fixture
    def tier(self, make: Callable[..., RemoteTier]) -> RemoteTier:
        return make()

    def test_says_what_it_is(self, tier: RemoteTier) -> None:
        assert tier.name.isidentifier()
        assert 0 < tier.pending_limit <= PENDING_LIMIT
        assert tier.load_blocks_max > 0 and tier.store_blocks_max > 0
        assert 0 < tier.load_room <= tier.pending_limit and 0 < tier.store_room <= tier.pending_limit
        assert tier.fault == "" and tier.store_fault == "" and tier.expected_s(1 << 20) >= 0.0
        assert tier.describe()["place"]

    def test_what_is_stored_together_comes_back_bit_for_bit(self, tier: RemoteTier) -> None:
        blocks = chain(0, min(LENGTH, tier.store_blocks_max, tier.load_blocks_max))
        stored = store(tier, self.layout, blocks)
        assert (stored.outcome, stored.error) == (Outcome.HIT, "")
        assert stored.bytes_moved == len(blocks) * self.layout.block_bytes
        places = tier.places(keys_of(blocks))
        assert places == list(range(places[0], places[0] + len(blocks))) and places[0] >= 0
        loaded = load(tier, self.layout, keys_of(blocks), places[0])
        assert loaded.outcome is Outcome.HIT and loaded.seconds >= 0.0
        assert loaded.bytes_moved == len(blocks) * self.layout.block_bytes
        named = [(end.engine_hash, end.group) for end in loaded.blocks]
        assert named == [(block.engine_hash, block.group) for block in blocks]
        assert all(end.facts in (b"", block.facts) for end, block in zip(loaded.blocks, blocks, strict=True))

    def test_a_part_can_be_loaded(self, tier: RemoteTier) -> None:
        blocks = chain(0, 3)
        store(tier, self.layout, blocks)
        place = tier.places([blocks[1].key])[0]
        assert load(tier, self.layout, [blocks[1].key], place).outcome is Outcome.HIT

    def test_names_of_all_kinds_come_back(self, tier: RemoteTier) -> None:
        head = BlockHead(make_key(9), None, b"\xff" * 32, GROUP_MAX)
        store(tier, self.layout, [head])
        (end,) = load(tier, self.layout, [head.key], tier.places([head.key])[0]).blocks
        assert (end.engine_hash, end.group) == (b"\xff" * 32, GROUP_MAX)

    def test_what_was_never_stored_is_nowhere(self, tier: RemoteTier) -> None:
        assert tier.places([make_key(1), make_key(2)]) == [NOWHERE, NOWHERE]
        assert tier.places([]) == []
        store(tier, self.layout, chain(0, 2))
        assert tier.places([make_key(2)]) == [NOWHERE]

    def test_a_load_under_another_key_is_a_miss(self, tier: RemoteTier) -> None:
        store(tier, self.layout, chain(0, 2))
        place = tier.places([make_key(0)])[0]
        assert load(tier, self.layout, [make_key(7)], place).outcome is Outcome.MISS

    def test_tails_are_told_apart(self, tier: RemoteTier) -> None:
        store(tier, self.layout, chain(0, 2))
        store(tier, self.layout, chain(10, 2), tail=True)
        plain, tail = tier.places([make_key(0), make_key(11)])
        assert not tier.tail(plain) and tier.tail(tail)

    def test_storing_again_is_no_error(self, tier: RemoteTier) -> None:
        for _ in range(2):
            assert store(tier, self.layout, chain(0, 2)).outcome is Outcome.HIT
        assert load(tier, self.layout, [make_key(1)], tier.places([make_key(1)])[0]).outcome is Outcome.HIT

    def test_news_names_each_block_once(self, tier: RemoteTier) -> None:
        assert tier.news() == ([], []) or tier.news() == ((), ())
        store(tier, self.layout, chain(0, 2))
        came, gone = tier.news()
        assert (sorted(came), list(gone)) == (sorted(keys_of(chain(0, 2))), [])
        load(tier, self.layout, [make_key(0)], tier.places([make_key(0)])[0])
        came, gone = tier.news()
        assert not came and not gone

    def test_what_is_said_to_be_in_use_costs_nothing_that_is_not_allowed(self, tier: RemoteTier) -> None:
        blocks = chain(0, LENGTH)
        store(tier, self.layout, blocks)
        asked = list[bool]()

        def may_not() -> bool:
            asked.append(True)
            return False

        for keys in (keys_of(blocks), keys_of(chain(100, 3)), keys_of(blocks)[::-1]):
            tier.used(keys, may_not)
        tier.tick()
        assert len(asked) <= 2 * LENGTH
        assert load_each(tier, self.layout, keys_of(blocks)) == [Outcome.HIT] * LENGTH

    def test_another_node_finds_what_this_one_stored(self, make: Callable[..., RemoteTier]) -> None:
        here, there = make(), make()
        before, after = chain(0, 2), chain(10, 2)
        store(here, self.layout, before)
        for blocks in (before, after):
            if blocks is after:
                store(here, self.layout, after, tail=True)
            assert here.drain(DEADLINE_S)
            keys = keys_of(blocks)
            assert eventually(there, partial(_known, there, keys))
            assert there.tail(there.places(keys)[0]) is (blocks is after)
            assert set(load_each(there, self.layout, keys)) == {Outcome.HIT}
        assert sorted(there.news().came) == sorted(keys_of(before) + keys_of(after))

    def test_what_was_stored_outlives_the_node(self, make: Callable[..., RemoteTier]) -> None:
        first = make()
        store(first, self.layout, chain(0, 2))
        first.close()
        second = make()
        keys = keys_of(chain(0, 2))
        assert eventually(second, lambda: NOWHERE not in second.places(keys))
        assert set(load_each(second, self.layout, keys)) == {Outcome.HIT}

    def test_another_namespace_finds_nothing(self, make: Callable[..., RemoteTier]) -> None:
        here, other = make(), make(OTHER_NAMESPACE)
        store(here, self.layout, chain(0, 2))
        assert here.drain(DEADLINE_S)
        store(other, self.layout, chain(10, 2))
        third = make(OTHER_NAMESPACE)
        assert other.drain(DEADLINE_S)
        assert eventually(third, lambda: third.places([make_key(10)]) != [NOWHERE])
        assert third.places([make_key(0)]) == [NOWHERE]

    def test_it_is_bounded_and_every_submission_ends_once(self, tier: RemoteTier) -> None:
        sources = [RemoteBuffers.of([make_key(job)], self.layout) for job in range(PENDING_LIMIT + 2)]
        outcomes = [
            tier.submit_store(job, chain(job, 1), sources[job].views, None)
            for job in range(PENDING_LIMIT + 2)
        ]
        accepted = [job for job, outcome in enumerate(outcomes) if outcome is Outcome.PENDING]
        assert 0 < len(accepted) <= tier.pending_limit
        assert {outcomes[job] for job in range(len(outcomes)) if job not in accepted} == {Outcome.THROTTLED}
        assert sorted(collect(tier, len(accepted))) == accepted
        for job in accepted:
            place = tier.places([make_key(job)])[0]
            assert load(tier, self.layout, [make_key(job)], place).outcome is Outcome.HIT

    def test_the_descriptor_is_readable_when_there_is_something(self, tier: RemoteTier) -> None:
        sources = RemoteBuffers.of([make_key(1)], self.layout)
        assert tier.submit_store(7, chain(1, 1), sources.views, None) is Outcome.PENDING
        assert tier.drain(DEADLINE_S)
        assert select.select([tier.fileno()], [], [], 0.0)[0]
        assert [completion.job_id for completion in tier.poll()] == [7]
        assert tier.poll() == []

    def test_drain_with_nothing_pending_is_done_at_once(self, tier: RemoteTier) -> None:
        assert tier.drain(0.0)

    def test_closing_completes_what_is_pending(self, make: Callable[..., RemoteTier]) -> None:
        tier = make()
        sources = [RemoteBuffers.of([make_key(job)], self.layout) for job in range(tier.store_room)]
        for job, buffers in enumerate(sources):
            assert tier.submit_store(job, chain(job, 1), buffers.views, None) is Outcome.PENDING
        tier.close()
        assert sorted(completion.job_id for completion in tier.poll()) == list(range(len(sources)))
        assert tier.poll() == []

    def test_a_closed_tier_takes_nothing(self, make: Callable[..., RemoteTier]) -> None:
        tier = make()
        store(tier, self.layout, chain(0, 1))
        place = tier.places([make_key(0)])[0]
        tier.close()
        buffers = RemoteBuffers(self.layout, 1)
        assert tier.submit_load(1, [make_key(0)], place, buffers.views, None) is Outcome.RETRY
        assert tier.submit_store(2, chain(1, 1), buffers.views, None) is Outcome.RETRY
        tier.close()  # closing twice is no error
        assert tier.poll() == []


def _known(tier: RemoteTier, keys: Sequence[BlockKey]) -> bool:
    return NOWHERE not in tier.places(keys)

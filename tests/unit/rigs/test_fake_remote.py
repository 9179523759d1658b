"""The double of a remote tier does at once whatever a store may do at the worst moment."""

from __future__ import annotations

import hashlib

import pytest

from kvbm.block import BlockKey, Outcome
from kvbm.layout import BlockLayout
from kvbm.tiers.contract import BlockHead
from kvbm.tiers.remote.contract import NOWHERE, Buffers
from rigs.fake_remote import FakeRemote, FakeStore

LAYOUT = BlockLayout(block_tokens=16, shard_bytes=4096, shard_count=2)


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


def content(number: int) -> Buffers:
    return [memoryview(bytearray([number, shard] * 2048)) for shard in range(2)]


def empty() -> Buffers:
    return [memoryview(bytearray(4096)) for _ in range(2)]


def heads(numbers: range) -> list[BlockHead]:
    return [BlockHead(key(number), None) for number in numbers]


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(LAYOUT)


def stored(remote: FakeRemote, numbers: range, tail: bool = False) -> None:
    sources = [content(number) for number in numbers]
    assert remote.submit_store(1, heads(numbers), sources, None, tail) is Outcome.PENDING
    remote.release()
    assert [completion.outcome for completion in remote.poll()] == [Outcome.HIT]


def test_a_load_scribbles_at_once_and_brings_the_bytes_when_released(store: FakeStore) -> None:
    remote = FakeRemote(store)
    stored(remote, range(3))
    first = remote.places([key(0)])[0]
    assert remote.places([key(0), key(1), key(2), key(3)]) == [first, first + 1, first + 2, NOWHERE]
    targets = [empty(), empty()]
    assert remote.submit_load(7, [key(1), key(2)], first + 1, targets, None) is Outcome.PENDING
    assert all(set(shard) == {0xA5} for shards in targets for shard in shards)
    assert remote.poll() == []
    assert remote.release() == 1
    (completion,) = remote.poll()
    assert (completion.outcome, completion.bytes_moved) == (Outcome.HIT, 2 * LAYOUT.block_bytes)
    assert targets == [content(1), content(2)]
    assert (remote.loads, remote.stores) == ([(first + 1, 2)], [3])


def test_sources_that_change_fail_the_test(store: FakeStore) -> None:
    remote = FakeRemote(store)
    sources = [content(0)]
    assert remote.submit_store(1, heads(range(1)), sources, None) is Outcome.PENDING
    sources[0][1][5] ^= 1
    with pytest.raises(AssertionError, match="sources"):
        remote.release()


def test_another_node_knows_what_it_is_told_true_or_not(store: FakeStore) -> None:
    stored(FakeRemote(store), range(2), tail=True)
    other = FakeRemote(store, by_hand=False)
    assert other.places([key(0)]) == [NOWHERE]
    other.learn([key(0), key(1), key(2)])
    places = other.places([key(0), key(1), key(2)])
    assert places == list(range(places[0], places[0] + 3)) and other.tail(places[0])
    assert other.news() == ([], []), "only what was loaded is told"
    assert other.submit_load(1, [key(0), key(1), key(2)], places[0], [empty()] * 3, None) is Outcome.PENDING
    (completion,) = other.poll()
    assert [end.outcome for end in completion.blocks] == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
    assert other.places([key(2)]) == [NOWHERE]
    assert other.news() == ([key(0), key(1)], [])


def test_corrupt_and_lost_blocks_are_misses_and_forgotten(store: FakeStore) -> None:
    remote = FakeRemote(store, by_hand=False)
    stored(remote, range(2))
    remote.news()
    place = remote.places([key(0)])[0]
    store.lose([key(0)])
    remote.corrupt(key(1), 9)
    assert remote.submit_load(1, [key(0), key(1)], place, [empty(), empty()], None) is Outcome.PENDING
    (completion,) = remote.poll()
    assert [(end.outcome, end.corrupt) for end in completion.blocks] == [
        (Outcome.MISS, False),
        (Outcome.MISS, True),
    ]
    assert remote.places([key(0), key(1)]) == [NOWHERE, NOWHERE]
    assert remote.news() == ([], [key(0), key(1)])


def test_a_break_down_ends_what_is_pending_and_lasts_until_mended(store: FakeStore) -> None:
    remote = FakeRemote(store)
    assert remote.submit_store(1, heads(range(1)), [content(0)], None) is Outcome.PENDING
    remote.break_down("gone")
    assert [completion.outcome for completion in remote.poll()] == [Outcome.RETRY]
    assert remote.submit_store(2, heads(range(1)), [content(0)], None) is Outcome.RETRY
    remote.tick()
    assert remote.fault == "gone"
    remote.mend()
    remote.tick()
    assert remote.fault == ""
    stored(remote, range(1))


def test_sealed_blocks_open_for_their_tenant_alone(store: FakeStore) -> None:
    remote = FakeRemote(store, by_hand=False, sealed=True)
    assert remote.submit_store(1, heads(range(1)), [content(0)], "ours") is Outcome.PENDING
    place = remote.places([key(0)])[0]
    for tenant, outcome in (("theirs", Outcome.MISS), (None, Outcome.MISS), ("ours", Outcome.HIT)):
        remote.poll()
        assert remote.submit_load(2, [key(0)], place, [empty()], tenant) is Outcome.PENDING
        assert remote.poll()[0].outcome is outcome


def test_room_is_bounded(store: FakeStore) -> None:
    remote = FakeRemote(store, pending_limit=2)
    for job in range(3):
        expected = Outcome.PENDING if job < 2 else Outcome.THROTTLED
        assert remote.submit_store(job, heads(range(job, job + 1)), [content(job)], None) is expected
    assert (remote.load_room, remote.store_room) == (0, 0)
    remote.close()
    assert len(remote.poll()) == 2

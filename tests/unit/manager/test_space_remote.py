"""`Space` and a store that other nodes share: what one computes, another one hits; what the store loses is a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvbm.block import Tier
from kvbm.manager.write_behind import RemoteRules
from kvbm.policy import make_admission
from rigs.fake_remote import FakeStore
from rigs.remote import RemoteBench
from rigs.space import KEYS, LAYOUT, ME, OTHER


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(LAYOUT)


@pytest.fixture
def node(store: FakeStore) -> Iterator[Callable[..., RemoteBench]]:
    made: list[RemoteBench] = []

    def make(**options: object) -> RemoteBench:
        made.append(RemoteBench(store, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for bench in made:
        bench.space.check()
        bench.close()


def skipped(bench: RemoteBench) -> dict[str, float]:
    return {
        key[1]: value
        for key, value in bench.metrics.snapshot().items()
        if key[0] == "kvbm_remote_skipped_blocks_total" and value
    }


def test_another_node_hits_what_one_computed(node: Callable[..., RemoteBench]) -> None:
    a, b = node(), node()
    a.shares(KEYS[:6])
    b.remote.learn(KEYS[:6])
    lease = b.look(1, KEYS[:8])
    assert lease is not None
    assert (lease.ready, lease.final, bytes(lease.sources)) == (0, False, bytes((Tier.REMOTE,)) * 6)
    b.settle()
    assert (lease.ready, lease.final) == (6, True)
    assert b.right(lease)
    assert b.metrics.value("kvbm_hit_blocks_total", tier="remote") == 6
    assert (
        b.metrics.value("kvbm_transfer_bytes_total", source="remote", target="host") == 6 * LAYOUT.block_bytes
    )
    assert b.remote.loads == [(0, 4), (4, 2)], "one request for blocks that lie together"


def test_blocks_wait_for_the_next_ones_of_their_chain(node: Callable[..., RemoteBench]) -> None:
    a = node()
    for i in range(0, 6, 2):
        a.compute(KEYS[i : i + 2], KEYS[i - 1] if i else None)
        a.settle(3.0)
    assert a.remote.stores == []
    a.settle(5.0)
    assert a.remote.stores == [6]
    a.shares(KEYS[:6])
    assert a.remote.stores == [6], "what is there is not written again"


def test_a_full_pack_does_not_wait(node: Callable[..., RemoteBench]) -> None:
    a = node(host_slots=32)
    a.compute(KEYS[:20])
    a.settle()
    assert a.remote.stores == [8, 8]
    a.settle(10.0)
    assert a.remote.stores == [8, 8, 4]


def test_a_branch_begins_a_pack_of_its_own(node: Callable[..., RemoteBench]) -> None:
    a = node(host_slots=32)
    a.compute(KEYS[:3])
    a.compute(OTHER[:2], KEYS[1])
    a.settle(10.0)
    assert a.remote.stores == [3, 2]


def test_what_host_memory_evicts_first_is_not_written(node: Callable[..., RemoteBench]) -> None:
    a = node(host_slots=4)
    a.compute(KEYS[:4])
    a.compute(OTHER[:4])
    a.settle(10.0)
    assert skipped(a) == {"evicted": 4}
    assert a.metrics.value("kvbm_offload_blocks_d2o") == 4


def test_a_block_that_is_written_is_pinned_until_it_is_there(node: Callable[..., RemoteBench]) -> None:
    a = node(host_slots=4)
    a.compute(KEYS[:1])
    a.clock.advance(10.0)
    a.space.pump()
    assert a.space.host_pool.counts().leased == 1
    a.compute(OTHER[:4])
    assert a.space.host_pool.find(KEYS[0]) is not None
    a.settle()
    assert a.space.host_pool.counts().leased == 0


def test_what_the_store_lost_is_a_miss_from_there_on(
    node: Callable[..., RemoteBench], store: FakeStore
) -> None:
    a, b = node(), node()
    a.shares(KEYS[:6])
    b.remote.learn(KEYS[:6])
    store.lose(KEYS[3:4])
    lease = b.look(1, KEYS[:6])
    assert lease is not None
    b.settle()
    assert (lease.ready, lease.final, len(lease.slots)) == (3, True, 3)
    assert b.right(lease)
    assert b.metrics.value("kvbm_object_read_failures") == 1
    b.space.release(ME, 1)
    again = b.look(2, KEYS[:6])
    assert again is not None and len(again.slots) == 3, "it is known to be gone"


def test_a_flipped_bit_is_a_counted_miss(node: Callable[..., RemoteBench], store: FakeStore) -> None:
    a, b = node(), node()
    a.shares(KEYS[:4])
    b.remote.learn(KEYS[:4])
    store.corrupt(KEYS[0], 17)
    lease = b.look(1, KEYS[:4])
    assert lease is not None
    b.settle()
    assert (lease.ready, lease.final) == (0, True)
    assert b.metrics.value("kvbm_failures_total", tier="remote", kind="corrupt") == 1
    assert b.space.host_pool.counts().filling == 0


def test_a_store_that_is_off_costs_its_hits_and_nothing_else(node: Callable[..., RemoteBench]) -> None:
    a, b = node(), node()
    a.shares(KEYS[:4])
    b.remote.learn(KEYS[:4])
    lease = b.look(1, KEYS[:4])
    assert lease is not None
    b.remote.break_down()
    b.space.pump()
    assert (lease.ready, lease.final) == (0, True)
    assert b.space.tiers() == {"host": 32}
    assert b.look(2, KEYS[:4]) is None
    b.compute(OTHER[:2])
    b.settle(10.0)
    assert skipped(b) == {"tier_off": 2}
    assert b.space.lookup(ME, 3, OTHER[:2], 0) is not None
    b.remote.mend()
    b.settle()
    assert "remote" in b.space.tiers()
    lease = b.look(4, KEYS[:4])
    assert lease is not None
    b.settle()
    assert lease.ready == 4


def test_blocks_of_all_tiers_make_one_run(node: Callable[..., RemoteBench]) -> None:
    a, b = node(host_slots=16), node(disk_slots=16)
    a.shares(KEYS[:8])
    b.compute(KEYS[:2])
    b.settle()
    b.space.clear("host")
    b.compute(KEYS[2:4], KEYS[1])
    b.remote.learn(KEYS[4:8])
    lease = b.look(1, KEYS[:9])
    assert lease is not None
    assert bytes(lease.sources) == bytes((Tier.DISK,) * 2 + (Tier.HOST,) * 2 + (Tier.REMOTE,) * 4)
    b.settle()
    assert (lease.ready, b.right(lease)) == (8, True)


def test_two_requests_wait_for_one_read(node: Callable[..., RemoteBench]) -> None:
    a, b = node(), node()
    a.shares(KEYS[:4])
    b.remote.learn(KEYS[:4])
    one, two = b.look(1, KEYS[:4]), b.look(2, KEYS[1:4])
    assert one is not None
    assert two is not None
    b.settle()
    assert (one.ready, two.ready, b.remote.loads) == (4, 3, [(0, 4)])


def test_a_slow_store_delays_no_read_from_disk(node: Callable[..., RemoteBench]) -> None:
    a, b = node(), node(disk_slots=16, host_slots=16)
    a.shares(KEYS[:4])
    b.compute(OTHER[:4])
    b.settle(10.0)
    b.space.clear("host")
    b.remote.learn(KEYS[:4])
    slow, quick = b.look(1, KEYS[:4]), b.look(2, OTHER[:4])
    assert slow is not None
    assert quick is not None
    assert b.disk is not None
    while b.disk.release():
        b.space.pump()
    assert (slow.ready, quick.ready) == (0, 4)


def test_what_is_expected_to_arrive_late_is_said(node: Callable[..., RemoteBench]) -> None:
    a, b = node(), node()
    a.shares(KEYS[:4])
    b.remote.learn(KEYS[:4])
    b.remote.seconds = 3.0
    lease = b.look(1, KEYS[:4])
    assert lease is not None
    assert b.space.arrival_s(lease) == 3.0


def test_writes_keep_to_the_hours_budget(node: Callable[..., RemoteBench]) -> None:
    options = RemoteRules(linger_s=1.0, requests_per_hour=24)
    a = node(host_slots=32, options=options)
    for i in range(4):
        a.compute(KEYS[8 * i : 8 * i + 1])
    a.settle(1.0)
    assert (a.remote.stores, skipped(a)) == ([1, 1], {"budget": 2})
    a.clock.advance(3600.0)
    a.compute(OTHER[:1])
    a.settle(1.0)
    assert a.remote.stores == [1, 1, 1]


def test_admission_chooses_what_is_shared(node: Callable[..., RemoteBench]) -> None:
    a = node(admission=make_admission("filter", 8, 100.0))
    a.compute(KEYS[:2])
    assert skipped(a) == {"filter": 2}
    a.space.lookup(ME, 1, KEYS[:2], 0)
    a.settle()
    a.settle(10.0)
    assert a.remote.stores == [2], "what is asked for again is written"


def test_blocks_are_sealed_for_their_tenant(node: Callable[..., RemoteBench], store: FakeStore) -> None:
    a = node(sealed=True)
    a.shares(KEYS[:2], tenant="ann")
    assert {block.tenant for block in store.blocks.values()} == {"ann"}


def test_what_waits_is_written_at_the_end(store: FakeStore) -> None:
    a = RemoteBench(store)
    a.compute(KEYS[:3])
    a.close()
    assert len(store.blocks) == 3


def test_a_store_that_got_slower_is_not_waited_for(node: Callable[..., RemoteBench]) -> None:
    """The first read is under way and never ends; those behind it are given up when they are long overdue."""
    a, b = node(host_slots=32), node(host_slots=32)
    a.shares(KEYS[:16])
    b.remote.learn(KEYS[:16])
    b.remote.seconds = 1.0
    b.remote.pending_limit = 1
    lease = b.look(1, KEYS[:16])
    assert lease is not None
    b.clock.advance(3.9)
    b.space.pump()
    assert not lease.final
    b.clock.advance(0.2)
    b.remote.release()
    b.space.pump()
    assert (lease.ready, lease.final, len(b.remote.loads)) == (4, True, 1)


def test_a_chain_with_a_block_twice_costs_nobody_anything(node: Callable[..., RemoteBench]) -> None:
    """No engine's chain has one, a hostile client's may."""
    a = node(options=RemoteRules(linger_s=10.0), admission=make_admission("filter", 32, 100.0))
    a.compute(KEYS[:3])
    a.space.lookup(ME, 1, [KEYS[0], KEYS[1], KEYS[0], KEYS[2], KEYS[1]], 0)
    a.settle()
    a.settle(10.0)
    assert sorted(a.store.blocks) == sorted(KEYS[:3])


def test_writes_pin_a_share_of_host_memory_at_most(node: Callable[..., RemoteBench]) -> None:
    a = node(host_slots=16)
    a.compute(KEYS[:16])
    a.clock.advance(10.0)
    a.space.pump()
    assert a.space.host_pool.counts().leased == 4
    a.settle()
    assert len(a.store.blocks) == 16

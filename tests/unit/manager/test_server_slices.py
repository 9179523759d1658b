"""Long messages in slices: others have their turns between them, and what happens meanwhile counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm.hashing import chain_keys, join_keys
from kvbm.manager import requests as requests_module
from kvbm.manager.leases import Lease
from kvbm.manager.requests import RESERVED_AT_ONCE
from kvbm.protocol import Commit, FromManager, Lookup, LookupReply, Release
from kvbm.slices import SLICE_BLOCKS
from rigs.hurried import LONG, HurriedClock, Recorder, arrived, hurry, lookups
from rigs.manager import KEYS, LAYOUT, ManagerBench, store


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ManagerBench]:
    bench = ManagerBench(tmp_path, clock=HurriedClock(50.0), host_blocks=4 * RESERVED_AT_ONCE + 200)
    yield bench
    bench.check()
    bench.close()


def test_a_long_store_is_committed_in_slices(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    other, _ = manager.engine("other")
    leader.reserve(7, LONG)
    hurry(manager)
    pool = manager.space().host_pool
    leader.channel.send(Commit(store=7, failed=(0, SLICE_BLOCKS + 1)))
    lookups(other, 1, KEYS[:4])
    answered, filling = 0, pool.counts().filling
    assert filling == len(LONG)
    while filling:
        manager.server.step(0.0)
        counts = pool.counts()
        assert 0 <= filling - counts.filling <= SLICE_BLOCKS
        filling = counts.filling
        answered += len([m for m in arrived(other) if isinstance(m, LookupReply) and filling])
    assert answered == 1, "another one is answered meanwhile"
    assert pool.counts().resident == len(LONG) - 2
    assert pool.find(LONG[0]) is None and pool.find(LONG[SLICE_BLOCKS + 1]) is None
    assert not len(manager.space().reservations)


def test_a_reset_meanwhile_takes_the_rest_of_a_long_store_with_it(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    leader.reserve(7, LONG)
    hurry(manager)
    pool = manager.space().host_pool
    leader.channel.send(Commit(store=7))
    manager.server.step(0.0)
    assert 0 < pool.counts().resident < len(LONG)
    manager.space().begin_clear()
    while not manager.server.idle:
        manager.server.step(0.0)
    assert pool.counts().resident == pool.counts().filling == 0, "none of it can be found"


def test_an_engine_that_goes_meanwhile_keeps_what_was_committed(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    leader.reserve(7, LONG)
    hurry(manager)
    pool = manager.space().host_pool
    leader.channel.send(Commit(store=7))
    manager.server.step(0.0)
    kept = pool.counts().resident
    assert 0 < kept < len(LONG)
    session = next(each for each in manager.server.sessions.values() if each.work is not None)
    session.fail()
    worker.close()
    while not manager.server.idle or manager.server.engine_count:
        manager.server.step(0.0)
    assert (pool.counts().resident, pool.counts().filling) == (kept, 0)


def test_a_long_hit_is_gathered_in_slices_and_released_in_slices(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    other, _ = manager.engine("other")
    store(leader, worker, 1, LONG)
    space = manager.space()
    pool = space.host_pool
    space.lookups.found_at_once = pool.found_at_once = pool.offered_at_once = 256
    hurry(manager)
    leader.channel.send(Lookup(lookup=1, keys=join_keys(LONG)))
    lookups(other, 1, LONG[:4])
    leased, answers, others = 0, list[FromManager](), list[FromManager]()
    while not answers:
        manager.server.step(0.0)
        assert pool.counts().leased - leased <= 256
        leased = pool.counts().leased
        answers = arrived(leader)
        others += [m for m in arrived(other) if not answers]
    (answer,) = answers
    assert isinstance(answer, LookupReply)
    assert len(answer.slots) == len(answer.generations) == answer.ready == len(LONG) == leased
    assert len(others) == 1, "another one is answered meanwhile"
    pool.policy = recorder = Recorder(pool.policy)
    leader.channel.send(Release(lookup=1))
    manager.server.step(0.0)
    while not manager.server.idle:
        manager.server.step(0.0)
    assert max(recorder.offered) <= 256
    assert sum(recorder.offered) == len(LONG) - 4, "the other one holds the rest"
    assert recorder.requests == 1, "the policy is told of the request once"


def test_leases_that_ended_just_now_make_room_although_the_policy_was_not_told(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, LONG)
    pool = manager.space().host_pool
    pool.offered_at_once = 16
    leader.lookup(1, LONG)
    others = chain_keys(bytes(31) + b"N", range(len(LONG) * LAYOUT.block_tokens), LAYOUT.block_tokens)
    reserved = pool.reserve_chain(others, None, manager.clock(), insist=True)
    assert len(reserved) == pool.slot_count - len(LONG), "and the policy has looked at all that is leased"
    pool.abort_all(reserved[::-1])
    manager.space().release(next(iter(manager.space().leases)).owner, 1)
    reserved = pool.reserve_chain(others, None, manager.clock(), insist=True)
    assert len(reserved) == len(others)
    pool.abort_all(reserved[::-1])


def test_workers_are_told_of_many_leases_that_ended_in_slices(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_module, "DROPPED_AT_ONCE", 2)
    _, worker = manager.engine()
    session = next(
        each for each in manager.server.sessions.values() if each.hello and each.hello.role == "worker"
    )
    leases = [Lease(1, number, [], [], bytearray(), bytearray(), 0.0) for number in range(7)]
    requests = manager.server._requests
    requests._watchers |= {(1, number): {session.number} for number in range(6)}
    requests.dropped(leases)
    told = [len(arrived(worker))]
    while not manager.server.idle or len(told) < 2:
        manager.server.step(0.0)
        told.append(len(arrived(worker)))
    assert told[:3] == [2, 2, 2], "and of the lease that nobody watched, nothing"
    assert sum(told) == 6
    assert requests.watched_count == 0

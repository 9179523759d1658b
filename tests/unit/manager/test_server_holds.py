"""Leases, reservations and fences over real sockets: whose slots are whose when somebody dies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbm.block import BlockState
from kvbm.layout import BlockLayout
from kvbm.manager.leases import LeaseState
from kvbm.manager.lookups import LEASE_S
from kvbm.manager.storing import RESERVATION_S
from kvbm.protocol import (
    PROTOCOL_VERSION,
    REFUSED,
    Commit,
    Fence,
    FenceDone,
    Hello,
    Progress,
    Ready,
    Release,
    Reserve,
    Reset,
    ResetReply,
    Status,
    StatusQuery,
    Watch,
)
from kvbm.testing.oracle import block_bytes
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS, Client, ManagerBench, store

MakeBench = Callable[..., ManagerBench]


# ---- leases, reservations and who dies


def test_a_killed_leader_gives_back_its_leases_at_once(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:3])
    leader.lookup(2, KEYS[:3])
    assert manager.space().host_pool.counts().leased == 3
    leader.close()
    manager.until(lambda: manager.space().host_pool.counts().leased == 0)
    again = manager.leader()
    assert again.expect(Ready).ready
    assert again.lookup(1, KEYS[:3]).ready == 3, "the cache stays"


def test_a_killed_leaders_slots_wait_for_its_workers(manager: ManagerBench) -> None:
    """A late writer can write as long as it has not answered: nobody else may have the slot until then."""
    leader, worker = manager.engine()
    slots = leader.reserve(1, KEYS[:2])
    leader.close()
    fence = worker.expect(Fence)
    assert fence.stores == (1,)
    assert manager.space().host_pool.counts().filling == 2
    again = manager.leader()
    again.expect(Ready)
    others = KEYS[100:120]
    answer = again.reserve(1, others)
    taken = [slot for slot in answer if slot >= 0]
    assert len(taken) == 14
    assert not set(taken) & set(slots)
    for key, slot in zip(others, taken, strict=False):
        worker.write(slot, key)
    for slot in slots:
        worker.write(slot, KEYS[500])  # late, and into what is still its own
    again.send(Commit(store=1))
    again.send(Commit(store=1, failed=()))
    assert again.lookup(2, KEYS[:2]).slots == (), "what was condemned is never found"
    worker.send(FenceDone(fence=fence.fence))
    assert manager.space().host_pool.counts().filling == 0
    assert manager.space().host_pool.counts().free == 2
    for key, slot in zip(others, taken, strict=False):
        assert worker.read(slot) == block_bytes(key, 0, 4096)


def test_of_two_workers_both_must_answer_or_go(manager: ManagerBench) -> None:
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
    leader = manager.leader()
    workers = [manager.worker(rank=i, rank_count=2, shard=i, layout=layout) for i in range(2)]
    assert [m.ready for m in leader.take() if isinstance(m, Ready)][-1]
    slots = leader.reserve(1, KEYS[:2])
    leader.close()
    fences = [worker.expect(Fence) for worker in workers]
    workers[0].send(FenceDone(fence=fences[0].fence))
    workers[0].send(FenceDone(fence=fences[0].fence))
    assert all(manager.space().host_pool.state_of(slot) is BlockState.FILLING for slot in slots)
    workers[1].close()
    manager.until(lambda: manager.space().host_pool.counts().filling == 0)


def test_a_fence_answered_by_somebody_else_does_not_count(manager: ManagerBench) -> None:
    leader, worker = manager.engine("a")
    other_leader, other_worker = manager.engine("b")
    leader.reserve(1, KEYS[:2])
    leader.close()
    fence = worker.expect(Fence)
    for stranger in (other_leader, other_worker):
        stranger.send(FenceDone(fence=fence.fence))
    assert manager.space().host_pool.counts().filling == 2
    worker.send(FenceDone(fence=fence.fence))
    assert manager.space().host_pool.counts().filling == 0


def test_a_worker_that_comes_back_is_fenced_too(manager: ManagerBench) -> None:
    """It lost its session and lives: a store of before may still be in its queue."""
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
    leader = manager.leader()
    steady = manager.worker(rank=0, rank_count=2, shard=0, layout=layout)
    flaky = manager.worker(rank=1, rank_count=2, shard=1, layout=layout)
    leader.take()
    slots = leader.reserve(1, KEYS[:2])
    flaky.close()
    manager.step()
    leader.close()
    first = steady.expect(Fence)
    flaky = manager.worker(rank=1, rank_count=2, shard=1, layout=layout)
    again = flaky.expect(Fence)
    assert again.stores == first.stores == (1,)
    steady.send(FenceDone(fence=first.fence))
    assert all(manager.space().host_pool.state_of(slot) is BlockState.FILLING for slot in slots)
    flaky.send(FenceDone(fence=again.fence))
    assert manager.space().host_pool.counts().filling == 0


def test_a_slot_that_was_given_back_has_another_generation(manager: ManagerBench) -> None:
    """So a worker with a store plan from before notices, whatever fences it missed."""
    leader, worker = manager.engine()
    leader.send(Reserve(store=1, parent=b"", keys=KEYS[0]))
    (reply,) = leader.take()
    slot, generation = reply.slots[0], reply.generations[0]  # type: ignore[union-attr]
    assert manager.space().arena.generation(slot) == generation
    leader.send(Commit(store=1, failed=(0,)))
    assert manager.space().arena.generation(slot) > generation
    assert worker.take() == []


def test_reservations_past_their_deadline_are_fenced(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    slots = leader.reserve(1, KEYS[:2])
    manager.tick(RESERVATION_S + 1.0)
    fence = worker.expect(Fence)
    leader.send(Commit(store=1))
    assert leader.lookup(2, KEYS[:2]).slots == ()
    manager.tick(RESERVATION_S + 1.0)
    assert worker.take() == [], "fenced once"
    worker.send(FenceDone(fence=fence.fence))
    assert manager.space().host_pool.counts().filling == 0
    assert set(leader.reserve(2, KEYS[:2])) == set(slots)


def test_leases_past_their_deadline_end(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(2, KEYS[:2])
    manager.tick(LEASE_S + 1.0)
    assert manager.space().host_pool.counts().leased == 0
    assert manager.metrics.value("kvbm_leases_expired_total") == 1


def test_a_killed_worker_makes_its_engine_unready_until_it_is_back(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:2])
    worker.close()
    assert not leader.expect(Ready).ready
    assert leader.lookup(2, KEYS[:2]).slots == ()
    assert leader.reserve(3, KEYS[2:3]) == (REFUSED,)
    manager.worker()
    assert leader.expect(Ready).ready
    assert leader.lookup(4, KEYS[:2]).ready == 2


def test_a_leader_that_is_replaced_in_the_same_turn_leaves_nothing(manager: ManagerBench) -> None:
    """The old one's end and the new one's hello arrive together."""
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(2, KEYS[:2])
    leader.reserve(3, KEYS[2:4])
    new = manager.client()
    leader.channel.close()
    new.channel.send(Hello(version=PROTOCOL_VERSION, role="leader", engine="e"))
    manager.step()
    new.take()
    fence = worker.expect(Fence)
    worker.send(FenceDone(fence=fence.fence))
    assert manager.space().host_pool.counts().leased == 0
    assert manager.space().host_pool.counts().filling == 0


def test_an_engine_that_is_gone_leaves_nothing_but_its_blocks(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(2, KEYS[:2])
    leader.reserve(3, KEYS[2:4])
    worker.close()
    leader.close()
    manager.until(lambda: manager.server.engine_count == 0)
    counts = manager.space().host_pool.counts()
    assert (counts.leased, counts.filling, counts.resident) == (0, 0, 2)
    assert len(manager.server.membership.fences) == 0
    manager.tick()
    assert manager.metrics.value("kvbm_engines") == 0


# ---- blocks that come up


def onboarding(make_manager: MakeBench, below: FakeTier, blocks: int) -> tuple[ManagerBench, Client, Client]:
    """An engine whose blocks are on disk only."""
    manager = make_manager(disk_blocks=32, disk_offload_filter=False)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:blocks])
    manager.until(lambda: below.release() + len(below.medium.entries) == blocks)
    manager.step()
    leader.send(Reset(tier="host"))
    assert leader.expect(ResetReply).dropped == blocks
    return manager, leader, worker


def test_progress_goes_to_the_leader_and_to_who_watches(make_manager: MakeBench, below: FakeTier) -> None:
    manager, leader, worker = onboarding(make_manager, below, 3)
    found = leader.lookup(2, KEYS[:3])
    assert (len(found.slots), found.ready) == (3, 0)
    worker.send(Watch(lookup=2))
    assert worker.expect(Progress) == Progress(lookup=2, ready=0, final=False)
    below.release(2)
    manager.step()
    expected = [Progress(lookup=2, ready=1, final=False), Progress(lookup=2, ready=2, final=False)]
    assert worker.take() == expected
    assert leader.take() == expected
    below.release()
    manager.step()
    last = Progress(lookup=2, ready=3, final=True, at_s=manager.clock())
    assert (worker.take(), leader.take()) == ([last], [last])
    assert [worker.read(slot) for slot in found.slots] == [block_bytes(key, 0, 4096) for key in KEYS[:3]]
    worker.send(Watch(lookup=2))
    ended = Progress(lookup=2, ready=3, final=True)
    assert worker.take() == [ended], "who watches too late hears how it ended, not when"


def test_who_watches_a_lease_of_a_dead_leader_hears_the_end(make_manager: MakeBench, below: FakeTier) -> None:
    manager, leader, worker = onboarding(make_manager, below, 2)
    leader.lookup(2, KEYS[:2])
    worker.send(Watch(lookup=2))
    worker.take()
    leader.close()
    manager.until(lambda: manager.server.membership.of(manager.server.sessions[_number(manager)]) is not None)
    assert worker.take() == [Progress(lookup=2, ready=0, final=True)]
    below.release()
    manager.step()
    assert manager.space().host_pool.counts().filling == 0


def test_who_watches_a_lease_that_runs_out_hears_the_end(make_manager: MakeBench, below: FakeTier) -> None:
    manager, leader, worker = onboarding(make_manager, below, 2)
    leader.lookup(2, KEYS[:2])
    worker.send(Watch(lookup=2))
    worker.take()
    manager.clock.advance(LEASE_S + 1.0)
    manager.tick()
    assert worker.take() == [Progress(lookup=2, ready=0, final=True)]
    worker.send(Watch(lookup=2))
    assert worker.take() == [Progress(lookup=2, ready=0, final=True)], "who comes after that, too"


@pytest.mark.parametrize("end", ["deadline", "release", "leader", "worker", "engine"])
def test_no_watcher_outlives_the_lease(make_manager: MakeBench, below: FakeTier, end: str) -> None:
    manager, leader, worker = onboarding(make_manager, below, 2)
    leader.lookup(2, KEYS[:2])
    worker.send(Watch(lookup=2))
    worker.take()
    assert manager.server._requests.watched_count == 1
    if end == "release":
        leader.send(Release(lookup=2))
    if end in ("leader", "engine"):
        leader.close()
    if end in ("worker", "engine"):
        worker.close()
    manager.step()
    if end in ("deadline", "worker"):
        manager.clock.advance(LEASE_S + 1.0)
    manager.tick()
    assert manager.server._requests.watched_count == len(manager.space().leases) == 0


def _number(manager: ManagerBench) -> int:
    return next(iter(manager.server.sessions))


def status(client: Client) -> dict[str, object]:
    """What the manager says of its only namespace."""
    client.send(StatusQuery())
    (space,) = client.expect(Status).spaces
    return space


def test_a_broken_tier_ends_the_run_and_says_so_in_status_and_metrics(
    make_manager: MakeBench, below: FakeTier
) -> None:
    manager, leader, worker = onboarding(make_manager, below, 2)
    leader.lookup(2, KEYS[:2])
    assert status(leader)["queued"] == 2
    below.break_down("disk tier is off: it burns")
    manager.step()
    assert leader.take() == [Progress(lookup=2, ready=0, final=True)]
    assert (status(leader)["queued"], status(leader)["fault"]) == (0, "disk tier is off: it burns")
    manager.tick()
    assert manager.metrics.value("kvbm_tier_up", tier="disk") == 0
    assert worker.take() == []


def test_a_lease_whose_deadline_has_passed_is_watched_no_more(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a few turns left: leases end in slices."""
    monkeypatch.setattr("kvbm.manager.space.RELEASED_AT_ONCE", 1)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    for number in (1, 2, 3):
        leader.lookup(number, KEYS[:4])
    *_, lease = manager.space().leases
    lease.states[-1] = LeaseState.ONBOARDING  # it is on its way
    lease.advance()
    manager.clock.advance(LEASE_S)
    manager.server.membership.expire()
    assert lease.expired and manager.space().leases.lasts(lease)
    worker.channel.send(Watch(lookup=lease.number))
    assert worker.expect(Progress) == Progress(lookup=lease.number, ready=0, final=True)
    assert manager.server._requests.watched_count == 0

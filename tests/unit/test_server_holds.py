"""Leases, reservations and fences over real sockets: whose slots are whose when somebody dies."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbm.block import BlockState
from kvbm.channel import Channel
from kvbm.errors import ManagerRefused
from kvbm.hashing import join_keys
from kvbm.layout import BlockLayout, Namespace
from kvbm.manager import session as session_module
from kvbm.manager.server import SESSIONS_MAX
from kvbm.manager.session import Session
from kvbm.manager.space import LEASE_S, RESERVATION_S
from kvbm.protocol import (
    HELD,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    REFUSED,
    Commit,
    Fence,
    FenceDone,
    Hello,
    Lookup,
    LookupReply,
    Progress,
    Ready,
    Refused,
    Release,
    Reserve,
    Reset,
    ResetReply,
    Status,
    StatusQuery,
    Watch,
    Welcome,
    encode,
)
from kvbm.testing.fake_tier import FakeMedium, FakeTier
from kvbm.testing.oracle import block_bytes
from unit.manager_bench import KEYS, LAYOUT, NAMESPACE, OTHER, Client, ManagerBench, store

MakeBench = Callable[..., ManagerBench]


# ---- leases, reservations and who dies


def test_a_killed_leader_gives_back_its_leases_at_once(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:3])
    leader.lookup(2, KEYS[:3])
    assert bench.space().host.counts().leased == 3
    leader.close()
    bench.until(lambda: bench.space().host.counts().leased == 0)
    again = bench.leader()
    assert again.expect(Ready).ready
    assert again.lookup(1, KEYS[:3]).ready == 3, "the cache stays"


def test_a_killed_leaders_slots_wait_for_its_workers(bench: ManagerBench) -> None:
    """A late writer can write as long as it has not answered: nobody else may have the slot until then."""
    leader, worker = bench.engine()
    slots = leader.reserve(1, KEYS[:2])
    leader.close()
    fence = worker.expect(Fence)
    assert fence.stores == (1,)
    assert bench.space().host.counts().filling == 2
    again = bench.leader()
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
    assert bench.space().host.counts().filling == 0
    assert bench.space().host.counts().free == 2
    for key, slot in zip(others, taken, strict=False):
        assert worker.read(slot) == block_bytes(key, 0, 4096)


def test_of_two_workers_both_must_answer_or_go(bench: ManagerBench) -> None:
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
    leader = bench.leader()
    workers = [bench.worker(rank=i, rank_count=2, shard=i, layout=layout) for i in range(2)]
    assert [m.ready for m in leader.take() if isinstance(m, Ready)][-1]
    slots = leader.reserve(1, KEYS[:2])
    leader.close()
    fences = [worker.expect(Fence) for worker in workers]
    workers[0].send(FenceDone(fence=fences[0].fence))
    workers[0].send(FenceDone(fence=fences[0].fence))
    assert all(bench.space().host.state_of(slot) is BlockState.FILLING for slot in slots)
    workers[1].close()
    bench.until(lambda: bench.space().host.counts().filling == 0)


def test_a_fence_answered_by_somebody_else_does_not_count(bench: ManagerBench) -> None:
    leader, worker = bench.engine("a")
    other_leader, other_worker = bench.engine("b")
    leader.reserve(1, KEYS[:2])
    leader.close()
    fence = worker.expect(Fence)
    for stranger in (other_leader, other_worker):
        stranger.send(FenceDone(fence=fence.fence))
    assert bench.space().host.counts().filling == 2
    worker.send(FenceDone(fence=fence.fence))
    assert bench.space().host.counts().filling == 0


def test_a_worker_that_comes_back_is_fenced_too(bench: ManagerBench) -> None:
    """It lost its session and lives: a store of before may still be in its queue."""
    layout = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
    leader = bench.leader()
    steady = bench.worker(rank=0, rank_count=2, shard=0, layout=layout)
    flaky = bench.worker(rank=1, rank_count=2, shard=1, layout=layout)
    leader.take()
    slots = leader.reserve(1, KEYS[:2])
    flaky.close()
    bench.step()
    leader.close()
    first = steady.expect(Fence)
    flaky = bench.worker(rank=1, rank_count=2, shard=1, layout=layout)
    again = flaky.expect(Fence)
    assert again.stores == first.stores == (1,)
    steady.send(FenceDone(fence=first.fence))
    assert all(bench.space().host.state_of(slot) is BlockState.FILLING for slot in slots)
    flaky.send(FenceDone(fence=again.fence))
    assert bench.space().host.counts().filling == 0


def test_a_slot_that_was_given_back_has_another_generation(bench: ManagerBench) -> None:
    """So a worker with a store plan from before notices, whatever fences it missed."""
    leader, worker = bench.engine()
    leader.send(Reserve(store=1, parent=b"", keys=KEYS[0]))
    (reply,) = leader.take()
    slot, generation = reply.slots[0], reply.generations[0]  # type: ignore[union-attr]
    assert bench.space().arena.generation(slot) == generation
    leader.send(Commit(store=1, failed=(0,)))
    assert bench.space().arena.generation(slot) > generation
    assert worker.take() == []


def test_reservations_past_their_deadline_are_fenced(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    slots = leader.reserve(1, KEYS[:2])
    bench.tick(RESERVATION_S + 1.0)
    fence = worker.expect(Fence)
    leader.send(Commit(store=1))
    assert leader.lookup(2, KEYS[:2]).slots == ()
    bench.tick(RESERVATION_S + 1.0)
    assert worker.take() == [], "fenced once"
    worker.send(FenceDone(fence=fence.fence))
    assert bench.space().host.counts().filling == 0
    assert set(leader.reserve(2, KEYS[:2])) == set(slots)


def test_leases_past_their_deadline_end(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(2, KEYS[:2])
    bench.tick(LEASE_S + 1.0)
    assert bench.space().host.counts().leased == 0
    assert bench.metrics.value("kvbm_leases_expired_total") == 1


def test_a_killed_worker_makes_its_engine_unready_until_it_is_back(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    worker.close()
    assert not leader.expect(Ready).ready
    assert leader.lookup(2, KEYS[:2]).slots == ()
    assert leader.reserve(3, KEYS[2:3]) == (REFUSED,)
    bench.worker()
    assert leader.expect(Ready).ready
    assert leader.lookup(4, KEYS[:2]).ready == 2


def test_a_leader_that_is_replaced_in_the_same_turn_leaves_nothing(bench: ManagerBench) -> None:
    """The old one's end and the new one's hello arrive together."""
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(2, KEYS[:2])
    leader.reserve(3, KEYS[2:4])
    new = bench.client()
    leader.channel.close()
    new.channel.send(Hello(version=PROTOCOL_VERSION, role="leader", engine="e"))
    bench.step()
    new.take()
    fence = worker.expect(Fence)
    worker.send(FenceDone(fence=fence.fence))
    assert bench.space().host.counts().leased == 0
    assert bench.space().host.counts().filling == 0


def test_an_engine_that_is_gone_leaves_nothing_but_its_blocks(bench: ManagerBench) -> None:
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:2])
    leader.lookup(2, KEYS[:2])
    leader.reserve(3, KEYS[2:4])
    worker.close()
    leader.close()
    bench.until(lambda: bench.server.engine_count == 0)
    counts = bench.space().host.counts()
    assert (counts.leased, counts.filling, counts.resident) == (0, 0, 2)
    assert len(bench.server._membership.fences) == 0
    bench.tick()
    assert bench.metrics.value("kvbm_engines") == 0


# ---- blocks that come up


def onboarding(make: MakeBench, fake_disk: FakeTier, blocks: int) -> tuple[ManagerBench, Client, Client]:
    """An engine whose blocks are on disk only."""
    bench = make(disk_blocks=32, disk_offload_filter=False)
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:blocks])
    bench.until(lambda: fake_disk.release() + len(fake_disk.medium.entries) == blocks)
    bench.step()
    leader.send(Reset(tier="host"))
    assert leader.expect(ResetReply).dropped == blocks
    return bench, leader, worker


def test_progress_goes_to_the_leader_and_to_who_watches(make: MakeBench, fake_disk: FakeTier) -> None:
    bench, leader, worker = onboarding(make, fake_disk, 3)
    found = leader.lookup(2, KEYS[:3])
    assert (len(found.slots), found.ready) == (3, 0)
    worker.send(Watch(lookup=2))
    assert worker.expect(Progress) == Progress(lookup=2, ready=0, final=False)
    fake_disk.release(2)
    bench.step()
    expected = [Progress(lookup=2, ready=1, final=False), Progress(lookup=2, ready=2, final=False)]
    assert worker.take() == expected
    assert leader.take() == expected
    fake_disk.release()
    bench.step()
    last = Progress(lookup=2, ready=3, final=True)
    assert (worker.take(), leader.take()) == ([last], [last])
    assert [worker.read(slot) for slot in found.slots] == [block_bytes(key, 0, 4096) for key in KEYS[:3]]
    worker.send(Watch(lookup=2))
    assert worker.take() == [last], "who watches too late hears how it ended"


def test_who_watches_a_lease_of_a_dead_leader_hears_the_end(make: MakeBench, fake_disk: FakeTier) -> None:
    bench, leader, worker = onboarding(make, fake_disk, 2)
    leader.lookup(2, KEYS[:2])
    worker.send(Watch(lookup=2))
    worker.take()
    leader.close()
    bench.until(lambda: bench.server._membership.of(bench.server._sessions[_number(bench)]) is not None)
    assert worker.take() == [Progress(lookup=2, ready=0, final=True)]
    fake_disk.release()
    bench.step()
    assert bench.space().host.counts().filling == 0


def _number(bench: ManagerBench) -> int:
    return next(iter(bench.server._sessions))


def test_a_broken_tier_ends_the_run_and_says_so_in_the_status(make: MakeBench, fake_disk: FakeTier) -> None:
    bench, leader, worker = onboarding(make, fake_disk, 2)
    leader.lookup(2, KEYS[:2])
    fake_disk.break_down("disk tier is off: it burns")
    bench.step()
    assert leader.take() == [Progress(lookup=2, ready=0, final=True)]
    leader.send(StatusQuery())
    (space,) = leader.expect(Status).spaces
    assert space["fault"] == "disk tier is off: it burns"
    bench.tick()
    assert bench.metrics.value("kvbm_tier_up", tier="disk") == 0
    assert worker.take() == []

"""Turns of the manager's loop: bounded, fair between sessions, and answers before what policies learn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

from kvbm.hashing import chain_keys, join_keys
from kvbm.manager import disk_health, recovery
from kvbm.manager import space as space_module
from kvbm.manager.requests import RESERVED_AT_ONCE
from kvbm.manager.server import ANSWERS_FIRST
from kvbm.protocol import (
    REFUSED,
    FromManager,
    Lookup,
    LookupReply,
    Ready,
    Reserve,
    ReserveReply,
    Reset,
    ResetReply,
)
from kvbm.slices import SLICE_BLOCKS
from rigs.hurried import LONG, HurriedClock, Recorder, arrived, hurry, lookups
from rigs.manager import KEYS, LAYOUT, ManagerBench, connect_operator, store


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ManagerBench]:
    bench = ManagerBench(tmp_path, clock=HurriedClock(50.0), host_blocks=4 * RESERVED_AT_ONCE + 200)
    yield bench
    bench.check()
    bench.close()


def test_one_session_asks_much_and_the_other_is_answered_at_its_turn(manager: ManagerBench) -> None:
    crowd, crowd_worker = manager.engine("crowd")
    other, _ = manager.engine("other")
    store(crowd, crowd_worker, 1, KEYS[:4])
    lookups(crowd, 50, KEYS[:4])
    lookups(other, 1, KEYS[:4])
    hurry(manager)
    for _ in range(4):
        manager.server.step(0.0)
    (answer,) = arrived(other)
    assert isinstance(answer, LookupReply)
    assert len(answer.slots) == 4
    assert 0 < len(arrived(crowd)) <= 4, "a turn ends when its time is over"
    for _ in range(80):
        manager.server.step(0.0)
    assert [m.lookup for m in arrived(crowd) if isinstance(m, LookupReply)][-1] == 50, "none is lost"


def test_messages_sent_before_the_end_of_a_session_are_handled(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    manager.engine("other")
    hurry(manager)
    lookups(leader, 20, KEYS[:4])
    leader.close()
    for _ in range(60):
        manager.server.step(0.0)
    assert manager.metrics.value("kvbm_lookups_total", outcome="hit") == 20
    assert manager.space().host_pool.counts().leased == 0, "and then its leases end"


def test_policies_learn_of_requests_when_nobody_asks(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    manager.step()
    pool = manager.space().host_pool
    pool.policy = recorder = Recorder(pool.policy)
    hurry(manager)
    lookups(leader, 3, KEYS[:4])
    for _ in range(3):
        manager.server.step(0.0)
    assert len(arrived(leader)) == 3
    assert recorder.requests == 0
    assert not manager.server.idle, "the next turn does not wait"
    for _ in range(60):
        manager.server.step(0.0)
    assert recorder.requests == 3
    assert manager.server.idle


def test_policies_learn_of_requests_although_clients_never_stop(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    manager.step()
    pool = manager.space().host_pool
    pool.policy = recorder = Recorder(pool.policy)
    hurry(manager)
    lookups(leader, 4 * ANSWERS_FIRST, KEYS[:4])
    for _ in range(3 * ANSWERS_FIRST):
        manager.server.step(0.0)
    assert len(arrived(leader)) < 4 * ANSWERS_FIRST, "questions are left"
    assert recorder.requests >= 2


def test_room_for_a_long_chain_is_made_in_slices(manager: ManagerBench) -> None:
    leader, _ = manager.engine()
    other, other_worker = manager.engine("other")
    store(other, other_worker, 1, KEYS[:4])
    hurry(manager)
    leader.channel.send(Reserve(store=7, parent=b"", keys=join_keys(LONG)))
    lookups(other, 1, KEYS[:4])
    turns = 0
    while not (answers := arrived(leader)):
        manager.server.step(0.0)
        turns += 1
        if others := arrived(other):
            assert isinstance(others[0], LookupReply)
            assert turns < 4, "it does not wait for the whole chain"
    assert turns > 3
    (answer,) = answers
    assert isinstance(answer, ReserveReply)
    assert len(set(answer.slots)) == len(LONG) == len(answer.generations)
    held = manager.space().reservations.of(next(iter(manager.server.sessions.values())).number)
    assert [len(reservation.slots) for reservation in held] == [len(LONG)], (
        "one reservation, to be committed once"
    )
    assert held[0].parents == [None, *LONG[:-1]]


def test_a_long_chain_without_room_is_refused_from_one_block_on(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    kept = store(leader, worker, 1, KEYS[:200])
    assert leader.lookup(1, KEYS[:200]).ready == len(kept)
    other = chain_keys(bytes(31) + b"M", range(len(LONG) * LAYOUT.block_tokens), LAYOUT.block_tokens)
    assert min(leader.reserve(2, LONG)) >= REFUSED
    slots = leader.reserve(3, other)
    first = slots.index(REFUSED)
    assert set(slots[first:]) == {REFUSED}
    assert manager.metrics.value("kvbm_skipped_offloads_total", reason="full") >= len(other) - first


def test_a_rank_that_goes_meanwhile_takes_the_room_with_it(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    hurry(manager)
    leader.channel.send(Reserve(store=7, parent=b"", keys=join_keys(LONG)))
    manager.server.step(0.0)
    assert manager.space().host_pool.counts().filling == RESERVED_AT_ONCE
    worker.close()
    answers: list[FromManager] = []
    for _ in range(20):
        manager.server.step(0.0)
        answers += arrived(leader)
    (answer,) = [message for message in answers if isinstance(message, ReserveReply)]
    assert set(answer.slots) == {REFUSED}
    leader.close()
    for _ in range(200):
        manager.server.step(0.0)
    assert manager.space().host_pool.counts().filling == 0


def without_ready(messages: list[FromManager]) -> list[FromManager]:
    """What does not come by the clock: an engine's share of host memory is told again when another engine has come."""
    return [message for message in messages if not isinstance(message, Ready)]


def test_a_long_hit_from_disk_leaves_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its leader hears nothing of the blocks that come before the answer: that says how far they are."""
    monkeypatch.setattr(disk_health, "SLOW_S", inf)  # each look at this clock takes time
    long = LONG[:1400]
    bench = ManagerBench(
        tmp_path,
        clock=HurriedClock(50.0),
        host_blocks=1500,
        disk_blocks=1600,
        disk_dir=str(tmp_path / "disk"),
        disk_offload_filter=False,
    )
    leader, worker = bench.engine("crowd")
    store(leader, worker, 1, long)
    other, _ = bench.engine("other")
    bench.until(lambda: not bench.space().busy, "all on disk")
    bench.space().clear("host")
    hurry(bench)
    leader.channel.send(Lookup(lookup=1, keys=join_keys(long)))
    bench.server.step(0.0)
    assert without_ready(arrived(leader)) == [], "it is not through in one turn"
    answered = []
    for number in range(2, 5):
        other.channel.send(Lookup(lookup=number, keys=join_keys(LONG[:1])))
        for _ in range(2):
            bench.server.step(0.0)
        answered += [m.lookup for m in arrived(other) if isinstance(m, LookupReply)]
    assert answered == [2, 3, 4], "each at its turn"
    heard: list[FromManager] = []
    bench.until(lambda: heard.extend(without_ready(arrived(leader))) or heard, "no answer came")
    answer = heard[0]
    assert isinstance(answer, LookupReply)
    assert len(answer.slots) == 1400
    lease = next(lease for lease in bench.space().leases if lease.number == 1)
    bench.until(lambda: lease.ready == 1400, "a block did not come")
    bench.check()
    bench.close()


def test_a_reset_drops_everything_at_once_and_gives_the_slots_back_in_slices(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    other, _ = manager.engine("other")
    store(leader, worker, 1, LONG)
    pool = manager.space().host_pool
    hurry(manager)
    admin = connect_operator(manager)
    admin.send(Reset())
    admin.expect(ResetReply)
    assert pool.counts().resident == 0
    assert pool.counts().free == pool.slot_count
    assert pool.cleared_count > len(LONG) // 2, "their slots come back later"
    lookups(other, 1, LONG[:4])
    manager.step(6)
    (answer,) = [m for m in arrived(other) if isinstance(m, LookupReply)]
    assert not answer.slots
    assert pool.cleared_count > 0, "and others are answered meanwhile"
    before = pool.cleared_count
    while not manager.server.idle:
        manager.server.step(0.0)
        assert before - pool.cleared_count <= SLICE_BLOCKS
        before = pool.cleared_count
    assert pool.cleared_count == 0


def test_the_leases_and_slots_of_an_engine_that_goes_end_in_slices(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "RELEASED_AT_ONCE", 4)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    lookups(leader, 10, KEYS[:4])
    leader.send(Reserve(store=2, parent=b"", keys=join_keys(LONG)))
    manager.step(10)
    pool, leases = manager.space().host_pool, manager.space().leases
    hurry(manager)
    leader.close()
    worker.close()
    filling, held = pool.counts().filling, len(leases)
    assert (filling, held) == (len(LONG), 10)
    while not manager.server.idle or manager.server.engine_count:
        manager.server.step(0.0)
        counts = pool.counts()
        assert filling - counts.filling <= SLICE_BLOCKS
        assert held - len(leases) <= 1
        filling, held = counts.filling, len(leases)
    assert pool.counts().filling == pool.counts().leased == 0


def test_a_disk_full_of_blocks_is_indexed_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "FOUND_TO_RANKED", 1)  # the blocks are more than a few slices

    def start() -> ManagerBench:
        return ManagerBench(
            tmp_path,
            clock=HurriedClock(50.0),
            host_blocks=len(LONG) + 8,
            disk_blocks=len(LONG) + 8,
            disk_dir=str(tmp_path / "disk"),
            disk_offload_filter=False,
        )

    manager = start()
    leader, worker = manager.engine()
    store(leader, worker, 1, LONG)
    manager.until(lambda: manager.space().disk.pool.counts().resident == len(LONG))  # type: ignore[union-attr]
    manager.server.close(keep=True)
    manager.open = False
    manager.close()
    (tmp_path / "m.sock").unlink(missing_ok=True)
    manager = start()
    hurry(manager)
    slices = list[tuple[int, int]]()
    step = manager.server.step

    def watched_step(timeout_s: float = 0.0) -> None:
        step(timeout_s)
        if list(manager.server.spaces):
            pool = manager.space().disk.pool  # type: ignore[union-attr]  # there is one
            slices.append((pool.unindexed_count, manager.server.engine_count))

    monkeypatch.setattr(manager.server, "step", watched_step)
    manager.engine()
    while not manager.server.idle:
        manager.server.step(0.0)
    known = [count for count, _ in slices if count <= len(LONG)]
    assert all(before - after <= SLICE_BLOCKS for before, after in pairwise(known)) and known
    assert slices[0][0] > 0 and slices[0][1] == 1, "an engine is let in before all is indexed"
    disk = manager.space().disk
    assert disk is not None
    assert disk.pool.unindexed_count == 0
    assert sum(disk.pool.held(LONG)) == len(LONG)
    manager.check()
    manager.close()

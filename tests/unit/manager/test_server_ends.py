"""Sessions that end in awkward orders, or that the manager ends itself, and a manager that runs out of descriptors."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable

import pytest

from kvbm.client.channel import Channel
from kvbm.manager.disk_health import HEAL_S_MAX
from kvbm.manager.leases import Lease
from kvbm.manager.session import Session
from kvbm.manager.storing import RESERVATION_S
from kvbm.protocol import CopiesHang, Fence, FenceDone, Lookup, Ready, Reset, Watch, Welcome
from kvbm.testing.oracle import block_bytes
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS, Client, ManagerBench, refusal, store

MakeBench = Callable[..., ManagerBench]


def filling(manager: ManagerBench) -> int:
    return manager.space().host_pool.counts().filling


# ---- an engine that is killed at once


@pytest.mark.parametrize("leader_first", [True, False])
def test_the_fences_of_a_worker_that_died_before_its_end_is_read_are_released(
    manager: ManagerBench, monkeypatch: pytest.MonkeyPatch, leader_first: bool
) -> None:
    """The leader's end is dealt with first, so the fence is sent into a socket that nobody reads any more."""
    if leader_first:
        leader, worker = manager.engine()
    else:
        worker, leader = manager.worker(), manager.leader()
        assert leader.expect(Ready).ready
    leader.reserve(1, KEYS[:3])
    gone = manager.server.membership.gone

    def killed_meanwhile(session: Session) -> list[Lease]:
        worker.close()
        return gone(session)

    monkeypatch.setattr(manager.server.membership, "gone", killed_meanwhile)
    leader.close()
    manager.server.step(0.0)
    assert not manager.server.idle
    manager.server.step(0.0)
    assert filling(manager) == 0
    assert len(manager.server.membership.fences) == manager.server.engine_count == 0
    again, _ = manager.engine("another")
    assert len(set(again.reserve(1, KEYS[:3]))) == 3, "the keys can be stored again"


# ---- a worker whose session the manager ends


def _nonsense(worker: Client) -> None:
    worker.send(Lookup(lookup=1, keys=b"x" * 33))
    assert "33 bytes" in refusal(worker)


def _overrun(worker: Client) -> None:
    with pytest.MonkeyPatch.context() as patch:
        worker.channel.send(Watch(lookup=4))
        patch.setattr("kvbm.framing.OUTGOING_BYTES_MAX", 0)
        worker.bench.step()
    worker.expect_end()


def _hangs(worker: Client) -> None:
    worker.send(CopiesHang())
    worker.expect_end()


END = pytest.mark.parametrize("end", [_nonsense, _overrun, _hangs])


@END
def test_a_worker_that_we_dropped_still_counts_for_later_fences(
    manager: ManagerBench, end: Callable[[Client], None]
) -> None:
    leader, worker = manager.engine()
    slots = leader.reserve(1, KEYS[:2])
    end(worker)
    leader.close()
    manager.step()
    assert filling(manager) == 2, "its process may be copying into them"
    other, writer = manager.engine("other")
    taken = [slot for slot in other.reserve(1, KEYS[100:120]) if slot >= 0]
    assert not set(taken) & set(slots)
    for key, slot in zip(KEYS[100:120], taken, strict=False):
        writer.write(slot, key)
    for slot in slots:
        worker.write(slot, KEYS[500])
    for key, slot in zip(KEYS[100:120], taken, strict=False):
        assert writer.read(slot) == block_bytes(key, 0, 4096)
    assert manager.server.engine_count == 2
    worker.close()
    manager.step()
    assert filling(manager) == len(taken)
    assert manager.server.engine_count == 1


def test_a_worker_whose_copies_hang_is_not_refused(
    manager: ManagerBench, caplog: pytest.LogCaptureFixture
) -> None:
    _, worker = manager.engine()
    _hangs(worker)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "ends: copies of this rank hang" in line
    assert manager.server.refused_count == 0


@END
def test_a_worker_that_we_dropped_counts_for_what_is_overdue(
    manager: ManagerBench, end: Callable[[Client], None]
) -> None:
    leader, worker = manager.engine()
    leader.reserve(1, KEYS[:2])
    end(worker)
    manager.tick(RESERVATION_S + 1.0)
    assert filling(manager) == 2
    worker.close()
    manager.step()
    assert filling(manager) == 0


def test_a_worker_that_we_dropped_and_that_joins_again_counts_twice_until_it_closes(
    manager: ManagerBench,
) -> None:
    leader, worker = manager.engine()
    leader.reserve(1, KEYS[:2])
    _nonsense(worker)
    again = manager.worker()
    leader.close()
    fence = again.expect(Fence)
    worker.send(FenceDone(fence=fence.fence))
    again.send(FenceDone(fence=fence.fence))
    assert filling(manager) == 2, "what comes through a session that we ended is not heard"
    worker.close()
    manager.step()
    assert filling(manager) == 0


def test_a_session_that_we_ended_is_not_served(manager: ManagerBench) -> None:
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:2])
    _nonsense(worker)
    worker.send(Reset())
    assert manager.space().host_pool.counts().resident == 2
    worker.close()
    manager.step()
    assert len(manager.server.sessions) == 1
    assert not leader.expect(Ready).ready


def test_sessions_that_may_not_write_are_closed_at_once(manager: ManagerBench) -> None:
    leader = manager.leader()
    leader.send(Lookup(lookup=1, keys=b"x" * 33))
    assert "33 bytes" in refusal(leader)
    assert len(manager.server.sessions) == 0


# ---- a tier that goes off


def test_a_leader_hears_of_a_tier_that_goes_off_and_comes_back(
    make_manager: MakeBench, below: FakeTier
) -> None:
    manager = make_manager(disk_blocks=40)
    leader = manager.leader()
    worker = manager.worker()
    assert leader.expect(Ready).tiers == worker.welcome.tiers == {"host": 16, "disk": 40}
    below.break_down()
    manager.tick()
    assert [(m.ready, m.tiers) for m in leader.take() if isinstance(m, Ready)] == [(True, {"host": 16})]
    manager.tick()
    assert leader.take() == [], "told once"
    late = manager.worker("late")
    assert late.welcome.tiers == {"host": 16}
    below.mend()
    manager.tick(HEAL_S_MAX)
    manager.tick()
    assert leader.expect(Ready).tiers == {"host": 16, "disk": 40}
    assert worker.take() == []


# ---- no descriptors left


def test_a_manager_without_descriptors_does_not_spin(
    manager: ManagerBench, caplog: pytest.LogCaptureFixture
) -> None:
    leader, worker = manager.engine()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level(logging.WARNING, logger="kvbm.manager"):
        waiting = Client(manager, Channel.connect(manager.path))
        manager.clients.append(waiting)
        free = os.dup(waiting.channel.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            for _ in range(3):
                manager.tick()
                manager.server.step(0.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert manager.server._selector.select(0) == [], "nothing to do until the next tick"
        store(leader, worker, 1, KEYS[:1])
        assert leader.lookup(2, KEYS[:1]).ready == 1, "the others are served"
    assert len([r for r in caplog.records if "cannot be accepted" in r.getMessage()]) == 1
    manager.tick()
    waiting.send(manager.worker_hello("late"))
    waiting.expect(Welcome)

"""A failure inside one space ends that space, in one line, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm.errors import TierError
from kvbm.hashing import join_keys
from kvbm.manager.below import Below
from kvbm.protocol import (
    REFUSED,
    Commit,
    Finished,
    Lookup,
    LookupReply,
    Progress,
    Ready,
    Refused,
    Release,
    Reserve,
    ReserveReply,
    Watch,
)
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS, NAMESPACE, OTHER, ManagerBench, store
from rigs.space import ME
from rigs.space import Bench as SpaceBench

MakeBench = Callable[..., ManagerBench]


class Broken:
    """A policy one of whose methods raises."""

    def __init__(self, inner: Any, method: str, error: Exception) -> None:
        self.inner = inner
        self.method = method
        self.error = error

    def __getattr__(self, name: str) -> Any:
        if name == self.method:
            return self._raise
        return getattr(self.inner, name)

    def _raise(self, *args: Any) -> None:
        raise self.error


def break_policy(manager: ManagerBench, number: int, method: str, error: Exception) -> None:
    pool = manager.space(number).host_pool
    pool.policy = Broken(pool.policy, method, error)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.swallows("the tree is torn|a policy of theirs|with our errors")
@pytest.mark.parametrize(
    "error",
    [
        AssertionError("the tree is torn"),
        ZeroDivisionError("a policy of theirs"),
        TierError("with our errors"),
    ],
)
@pytest.mark.parametrize("method", ["requested", "victims", "inserted", "evictable", "finished"])
def test_a_policy_that_raises_ends_its_namespace_alone(
    make_manager: MakeBench, caplog: pytest.LogCaptureFixture, method: str, error: Exception
) -> None:
    manager = make_manager(namespaces=2, host_blocks=32)
    bad_leader, bad_worker = manager.engine("bad")
    good_leader, good_worker = manager.engine("good", namespace=OTHER)
    for leader, worker in ((bad_leader, bad_worker), (good_leader, good_worker)):
        store(leader, worker, 1, KEYS[:4])
    held = bad_leader.lookup(1, KEYS[:4])
    assert held.ready == 4
    before = [bad_worker.read(slot) for slot in held.slots]
    break_policy(manager, 0, method, error)

    bad_leader.send(Lookup(lookup=2, keys=join_keys(KEYS[:3])))
    bad_leader.send(Reserve(store=3, parent=b"", keys=join_keys(KEYS[10:40])))
    bad_leader.send(Commit(store=3))
    bad_leader.send(Release(lookup=1))
    bad_leader.send(Finished(key=KEYS[3], output_tokens=10))
    manager.tick()

    (line,) = lines(caplog)
    assert NAMESPACE.short in line and str(error) in line and "\n" not in line
    messages = bad_leader.take()
    assert [type(m) for m in messages if not isinstance(m, Ready)] == [LookupReply, ReserveReply], (
        "none is left out"
    )
    said = [message for message in messages if isinstance(message, Ready)]
    assert said and not said[-1].ready and not said[-1].tiers, "its engine goes on without a cache"
    assert bad_leader.lookup(5, KEYS[:4]).slots == ()
    assert set(bad_leader.reserve(6, KEYS[20:22])) == {REFUSED}
    assert [bad_worker.read(slot) for slot in held.slots] == before, "what is being copied stays as it is"

    assert manager.metrics.value("kvbm_tier_up", tier="host") == 0
    assert good_leader.lookup(2, KEYS[:4]).ready == 4
    assert min(good_leader.reserve(3, KEYS[10:12])) >= 0
    assert len(lines(caplog)) == 1


@pytest.mark.swallows("^RuntimeError: once$")
def test_the_next_engine_of_a_failed_namespace_gets_a_new_space(
    make_manager: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(host_blocks=16)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    break_policy(manager, 0, "requested", RuntimeError("once"))
    leader.lookup(1, KEYS[:4])
    manager.step()
    failed = manager.space()
    assert failed.failure
    late = manager.leader("late")
    manager.worker("late")
    assert not late.expect(Ready).ready, "as long as others of its engines are there"
    for client in (leader, worker, *manager.clients):
        client.close()
    manager.until(lambda: not manager.server.engine_count)
    leader, worker = manager.engine("after")
    assert manager.space() is not failed
    store(leader, worker, 1, KEYS[:4])
    assert leader.lookup(1, KEYS[:4]).ready == 4
    assert len(lines(caplog)) == 1


@pytest.mark.swallows("^ZeroDivisionError: a policy")
def test_a_policy_that_raises_while_a_namespace_opens_costs_its_engine_one_line(
    make_manager: MakeBench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(namespaces=2, host_blocks=32)
    good_leader, good_worker = manager.engine("good", namespace=OTHER)
    store(good_leader, good_worker, 1, KEYS[:4])

    def broken(name: str, slot_count: int) -> None:
        raise ZeroDivisionError("a policy\nof theirs")

    with monkeypatch.context() as patched:
        patched.setattr("kvbm.manager.host_side.make_policy", broken)
        client = manager.client()
        client.send(manager.worker_hello("bad"))
        refused = client.expect(Refused)
    assert refused.reason.startswith(
        f"namespace {NAMESPACE.short} cannot be opened: ZeroDivisionError: a policy of theirs ("
    )
    assert all("\n" not in record.getMessage() and not record.exc_info for record in caplog.records)
    assert good_leader.lookup(2, KEYS[:4]).ready == 4
    leader, worker = manager.engine("mended")
    store(leader, worker, 1, KEYS[:4])
    assert leader.lookup(1, KEYS[:4]).ready == 4


@pytest.mark.swallows("^(RuntimeError|TierError): as a block arrives$")
@pytest.mark.parametrize("error", [RuntimeError("as a block arrives"), TierError("as a block arrives")])
def test_those_that_wait_for_blocks_of_a_failed_space_are_told(
    make_manager: MakeBench, below: FakeTier, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    manager = make_manager(host_blocks=16, disk_blocks=32, disk_admission="all")
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    while below.release():
        manager.step()
    manager.space().clear("host")
    found = leader.lookup(1, KEYS[:4])
    assert (len(found.slots), found.ready) == (4, 0)
    worker.send(Watch(lookup=1))
    assert not worker.expect(Progress).final
    break_policy(manager, 0, "evictable", error)
    assert below.release()
    manager.until(lambda: manager.space().failure)
    assert worker.expect(Progress).final
    manager.step()
    assert "as a block arrives" in lines(caplog)[0]
    assert len(lines(caplog)) == 1
    for _ in range(5):  # blocks that are still on their way end there
        below.release()
        manager.step()


def test_a_lookup_that_fails_half_way_gives_its_pins_back(
    make: Callable[..., SpaceBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(host_slots=8, disk_slots=16)
    bench.store(KEYS[:4])
    bench.finish_all()

    def fails(*args: object) -> None:
        raise RuntimeError("half-way")

    with monkeypatch.context() as patched:
        patched.setattr(Below, "bring_up", fails)
        with pytest.raises(RuntimeError):
            bench.space.lookup(ME, 50, KEYS[:4], 0)
    assert bench.space.host_pool.counts().leased == 0
    assert bench.space.leases.get(ME, 50) is None
    assert bench.space.lookup(ME, 50, KEYS[:4], 0) is not None


def test_a_client_that_breaks_the_protocol_ends_no_space(make_manager: MakeBench, tmp_path: Path) -> None:
    manager = make_manager(host_blocks=16)
    leader, worker = manager.engine()
    store(leader, worker, 1, KEYS[:4])
    leader.reserve(9, KEYS[8:9])
    leader.send(Commit(store=9, failed=(99,)))
    assert not manager.space().failure
    assert not [message for message in leader.take() if isinstance(message, Refused)]

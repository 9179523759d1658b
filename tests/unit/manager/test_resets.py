"""A reset is answered when its blocks cannot come back after a crash, or with the reason why they may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvbm.hashing import join_keys
from kvbm.manager.guarded_space import GuardedSpace
from kvbm.manager.resets import WAIT_S_MAX, WAITING_MAX
from kvbm.manager.space import Space
from kvbm.protocol import Lookup, LookupReply, Reset, ResetReply
from rigs.fake_tier import FakeTier
from rigs.manager import KEYS, OTHER, ManagerBench, connect_operator, store

MakeBench = Callable[..., ManagerBench]


@pytest.fixture
def bench(make_manager: MakeBench, below: FakeTier) -> ManagerBench:
    """A manager with four blocks on disk."""
    bench = make_manager(disk_blocks=8, disk_admission="all")
    leader, worker = bench.engine()
    store(leader, worker, 1, KEYS[:4])
    while below.pending_count:
        below.release()
        bench.step()
    return bench


def test_a_reset_waits_until_the_disk_has_noted_it(bench: ManagerBench, below: FakeTier) -> None:
    admin = connect_operator(bench)
    below.holds_sync = True
    admin.send(Reset(tier="disk"))
    assert admin.take() == []
    admin.send(Reset(tier="host"))
    assert admin.expect(ResetReply) == ResetReply(dropped=4, in_use=0), "no disk is meant"
    below.synced = below._sync_wanted
    assert admin.expect(ResetReply) == ResetReply(dropped=4, in_use=0)
    assert sorted(below.forgotten) == [0, 1, 2, 3]


def test_nobody_waits_for_a_reset_that_waits(bench: ManagerBench, below: FakeTier) -> None:
    """Not even the engine that asked for it."""
    leader = bench.clients[0]
    leader.take()
    below.holds_sync = True
    leader.send(Reset(tier="disk"))
    leader.send(Lookup(lookup=7, keys=join_keys(KEYS[:4]), skip=0))
    assert len(leader.expect(LookupReply).slots) == 4


def test_a_disk_that_is_off_is_not_waited_for_long(bench: ManagerBench, below: FakeTier) -> None:
    admin = connect_operator(bench)
    below.break_down("the device is gone")
    below.holds_sync = True
    admin.send(Reset())
    bench.tick(WAIT_S_MAX / 2)
    assert admin.take() == []
    bench.tick(WAIT_S_MAX / 2)
    reply = admin.expect(ResetReply)
    assert (reply.dropped, reply.undone) == (8, "the device is gone")


def test_resets_that_wait_are_bounded(bench: ManagerBench, below: FakeTier) -> None:
    admin = connect_operator(bench)
    below.holds_sync = True
    for _ in range(WAITING_MAX + 2):
        admin.send(Reset(tier="disk"))
    replies = admin.take()
    assert [reply.undone for reply in replies if isinstance(reply, ResetReply)] == [
        "the disk has not answered yet"
    ] * 2


def test_a_space_that_goes_while_a_reset_has_its_turns_is_left_out(
    make_manager: MakeBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = make_manager(namespaces=2, disk_blocks=8, disk_dir=str(tmp_path / "disk"))
    bench.engine()
    passing = bench.engine("passing", namespace=msgspec.structs.replace(OTHER, ephemeral=True))
    admin = connect_operator(bench)
    with monkeypatch.context() as patch:
        patch.setattr(Space, "indexing", True)
        patch.setattr(GuardedSpace, "catch_up", lambda space: True)
        work = bench.server._reset(list(bench.server.sessions.values())[-1], Reset())
        next(work)
    for client in passing:
        client.close()
    bench.until(lambda: len(list(bench.server.spaces)) == 1)
    for _ in work:
        bench.step()
    assert admin.expect(ResetReply) == ResetReply(dropped=0, in_use=0)

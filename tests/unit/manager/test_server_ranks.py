"""Ranks that never attach: named after a bounded time, here and to their leader, who goes on without them."""

from __future__ import annotations

import logging

import pytest

from kvbm.layout import BlockLayout
from kvbm.manager.membership import ATTACH_S, RANKS_MAX
from kvbm.present.numbers import name_ranks
from kvbm.protocol import PROTOCOL_VERSION, Hello, Ready
from rigs.leader import Bench
from rigs.manager import KEYS, Client, ManagerBench, refusal, store

LAYOUT = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=4)


def rank(manager: ManagerBench, number: int, engine: str = "e") -> Client:
    return manager.worker(engine, rank=number, rank_count=4, shard=number, layout=LAYOUT)


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The manager's log lines about the ranks."""
    lines = [record.getMessage() for record in caplog.records if "did not attach" in record.getMessage()]
    return [line.partition("ranks, ")[2].partition(" did not")[0] for line in lines]


def test_ranks_for_people() -> None:
    assert name_ranks((3,)) == "rank 3"
    assert name_ranks((1, 2)) == "ranks 1-2"
    assert name_ranks((0, 2, 3, 4, 7)) == "ranks 0, 2-4, 7"


def test_ranks_that_do_not_come_are_named_once_and_used_when_they_do(
    manager: ManagerBench, caplog: pytest.LogCaptureFixture
) -> None:
    leader = manager.leader("e", rank_count=4)
    for number in (0, 2):
        rank(manager, number)
        assert leader.expect(Ready).missing == ()
    manager.tick(ATTACH_S - 1.0)
    assert (leader.take(), named(caplog)) == ([], [])
    manager.tick(1.0)
    told = leader.expect(Ready)
    assert (told.ready, told.missing) == (False, (1, 3))
    manager.tick(10 * ATTACH_S)
    assert leader.take() == []
    assert named(caplog) == ["ranks 1, 3"]
    assert leader.lookup(1, KEYS[:2]).slots == (), "it runs without"

    rank(manager, 1)
    assert leader.expect(Ready).missing == (3,)
    manager.tick()
    assert leader.expect(Ready).missing == (3,)
    last = rank(manager, 3)
    ready = leader.expect(Ready)
    assert (ready.ready, ready.missing) == (True, ())
    assert named(caplog) == ["ranks 1, 3", "rank 3"]
    store(leader, last, 2, KEYS[:2])
    assert leader.lookup(3, KEYS[:2]).ready == 2


def test_a_rank_that_goes_and_does_not_come_back_is_named_as_long_after(
    manager: ManagerBench, caplog: pytest.LogCaptureFixture
) -> None:
    leader = manager.leader("e", rank_count=4)
    workers = [rank(manager, number) for number in range(4)]
    manager.tick(5 * ATTACH_S)
    leader.take()
    workers[2].close()
    manager.step()
    assert leader.expect(Ready).missing == ()
    manager.tick(ATTACH_S - 1.0)
    assert leader.take() == []
    manager.tick(1.0)
    assert leader.expect(Ready).missing == (2,)
    rank(manager, 2)
    assert leader.expect(Ready).ready
    workers[1].close()
    manager.step()
    assert leader.expect(Ready).missing == (), "the time begins anew"
    assert named(caplog) == ["rank 2"]


def test_a_leader_that_no_rank_comes_to_is_told_so(
    manager: ManagerBench, caplog: pytest.LogCaptureFixture
) -> None:
    """All its ranks run on another node: the manager knows their number from the leader alone."""
    leader = manager.leader("e", rank_count=4)
    other = manager.leader("gone", rank_count=2)
    other.close()
    manager.tick(ATTACH_S)
    told = leader.expect(Ready)
    assert (told.ready, told.missing) == (False, (0, 1, 2, 3))
    manager.tick(ATTACH_S)
    assert leader.take() == []
    assert named(caplog) == ["ranks 0-3"]
    rank(manager, 0)
    assert leader.expect(Ready).missing == ()
    manager.tick(ATTACH_S)
    assert leader.expect(Ready).missing == (1, 2, 3)


def test_a_leader_that_waits_keeps_its_manager(manager: ManagerBench) -> None:
    """A private one would end for want of an engine, be started again by that leader, and say it all anew."""
    leader = manager.leader("e", rank_count=4)
    manager.tick(500.0)
    assert manager.server.last_busy_s == manager.clock()
    leader.close()
    manager.step()
    busy_s = manager.clock()
    manager.tick(500.0)
    assert manager.server.last_busy_s == busy_s


def test_ranks_without_their_leader_are_named_where_they_are(
    manager: ManagerBench, caplog: pytest.LogCaptureFixture
) -> None:
    """The private manager of the other node: it tells its own log, and a leader that comes later."""
    rank(manager, 2)
    rank(manager, 3)
    manager.tick(ATTACH_S)
    assert named(caplog) == ["ranks 0-1"]
    leader = manager.leader("e", rank_count=4)
    assert leader.expect(Ready).missing == (0, 1)


@pytest.mark.parametrize("count", [0, -1, RANKS_MAX + 1, 10**9])
def test_a_leader_of_no_number_of_ranks_is_refused(manager: ManagerBench, count: int) -> None:
    client = manager.client()
    client.send(Hello(version=PROTOCOL_VERSION, role="leader", engine="e", rank_count=count))
    assert f"rank_count={count} cannot be served: 1 to {RANKS_MAX}" in refusal(client)


# ---- the leader


def test_the_leader_says_who_is_missing_once_and_that_it_is_on_when_they_came(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(rank_count=4)
    for missing in ((), (1, 2), (1, 2), ()):
        bench.manager.send(Ready(ready=False, epoch=7, missing=missing))
        bench.step()
        assert not bench.leader.ready
    bench.manager.ready()
    bench.step()
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if "did not attach" in line]
    assert line.startswith("serving without a KV cache: of 4 ranks, ranks 1-2 did not attach")
    assert lines.count("KV cache is on: host 100 blocks") == 2
    bench.leader.close()
    bench.manager.close()

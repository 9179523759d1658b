"""An engine over several nodes, at the manager of one: it has the parts of blocks of its own ranks, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from kvbm.layout import BlockLayout, Namespace
from kvbm.manager.membership import ATTACH_S
from kvbm.protocol import Ready, Shorten
from kvbm.slices import at_once
from rigs.manager import KEYS, NAMESPACE, OTHER, Client, ManagerBench, refusal, store
from rigs.space import ME, PEER, Bench

LAYOUT = BlockLayout(block_tokens=4, shard_bytes=4096, shard_count=2)
PART = NAMESPACE.part("2 3 of 4")


def hello(number: int, **said: Any) -> dict[str, Any]:
    """Ranks 2 and 3 of four, which are the second of two parts."""
    fields = {
        "rank": number,
        "rank_count": 4,
        "ranks": (2, 3),
        "part": 1,
        "part_count": 2,
        "shard": number - 2,
    }
    return {**fields, "layout": LAYOUT, "namespace": PART, **said}


def test_ready_are_the_ranks_of_this_node(manager: ManagerBench) -> None:
    leader = manager.leader("e", rank_count=4)
    manager.worker("e", **hello(2))
    assert not leader.expect(Ready).ready
    manager.tick(ATTACH_S)
    assert leader.expect(Ready).missing == (3,)
    worker = manager.worker("e", **hello(3))
    ready = leader.expect(Ready)
    assert (ready.ready, ready.part, ready.part_count) == (True, 1, 2)
    assert ready.fingerprint == NAMESPACE.fingerprint, "by it the leader names blocks at all nodes"
    assert ready.block_bytes == 2 * 4096
    store(leader, worker, 1, KEYS[:2])
    assert leader.lookup(2, KEYS[:2]).ready == 2


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("ranks=(2, 3) cannot be served", {"rank": 1, "shard": 0}),
        ("ranks=(3, 2) cannot be served", {"ranks": (3, 2)}),
        ("ranks=(2, 4) cannot be served", {"ranks": (2, 4)}),
        ("ranks=(-1, 2) cannot be served", {"ranks": (-1, 2)}),
        ("part=2 of 2 cannot be served", {"part": 2}),
        ("part=0 of 5 cannot be served", {"part": 0, "part_count": 5}),
        ("shard_count=2 cannot be served", {"ranks": (2,)}),
    ],
)
def test_ranks_that_cannot_be_are_refused(manager: ManagerBench, word: str, said: dict[str, Any]) -> None:
    client = manager.client()
    client.send(manager.worker_hello("e", **hello(2, **said)))
    assert word in refusal(client)


@pytest.mark.parametrize("said", [{"ranks": (1, 3)}, {"part": 0}, {"part_count": 3}], ids=str)
def test_a_rank_that_counts_its_peers_otherwise_is_refused(
    manager: ManagerBench, said: dict[str, Any]
) -> None:
    manager.worker("e", **hello(2))
    client = manager.client()
    client.send(manager.worker_hello("e", **hello(3, **said)))
    assert "find this manager, its peers ranks 2-3" in refusal(client)


def test_parts_of_one_engine_are_namespaces_of_their_own() -> None:
    first = NAMESPACE.part("0 1 of 4")
    prints = {each.fingerprint for each in (NAMESPACE, first, PART, first.part("2 of 4"))}
    assert len(prints) == 4, "their bytes are not the same, on disk and in a store neither"
    assert first.whole == PART.whole == NAMESPACE
    assert first.part("2 3 of 4") == PART
    assert OTHER.part("0 1 of 4").whole.fingerprint != NAMESPACE.fingerprint
    assert NAMESPACE.whole is NAMESPACE
    assert isinstance(PART, Namespace)


# ---- leases of which the other nodes have less


@pytest.fixture
def engine(manager: ManagerBench) -> tuple[Client, Client]:
    leader, worker = manager.engine("e")
    store(leader, worker, 1, KEYS[:6])
    return leader, worker


def leased(manager: ManagerBench) -> int:
    return manager.space().host_pool.counts().leased


def test_a_lease_is_shortened(manager: ManagerBench, engine: tuple[Client, Client]) -> None:
    leader, _ = engine
    assert leader.lookup(2, KEYS[:6]).ready == 6
    assert leased(manager) == 6
    leader.send(Shorten(lookup=2, blocks=4))
    assert leased(manager) == 4
    leader.send(Shorten(lookup=2, blocks=5))
    assert leased(manager) == 4, "it does not grow again"
    leader.send(Shorten(lookup=2, blocks=0))
    assert leased(manager) == 0
    manager.check()
    assert leader.lookup(3, KEYS[:6]).ready == 6


@pytest.mark.parametrize("message", [Shorten(lookup=9, blocks=1), Shorten(lookup=2, blocks=-1)], ids=str)
def test_nonsense_shortens_nothing(
    manager: ManagerBench, engine: tuple[Client, Client], message: Shorten
) -> None:
    leader, worker = engine
    assert leader.lookup(2, KEYS[:6]).ready == 6
    leader.send(message)
    worker.send(Shorten(lookup=2, blocks=0))
    assert leased(manager) == 6
    manager.check()


def test_reads_that_nobody_needs_any_more_are_given_up() -> None:
    """What is on its way for the rest of a lease is not its any more; what others want still comes."""
    bench = Bench(host_slots=8, pending_limit=2)
    try:
        bench.only_on_disk(KEYS[:6])
        lease = at_once(bench.space.looking_up(ME, 1, KEYS[:6], 0)).lease
        other = at_once(bench.space.looking_up(PEER, 2, KEYS[:3], 0)).lease
        assert lease is not None and other is not None
        bench.space.shorten(ME, 1, 2)
        assert (lease.ready, len(lease.slots), lease.final) == (0, 2, False)
        bench.finish_all()
        assert (lease.ready, lease.final, other.ready) == (2, True, 3)
        assert bench.space.host_pool.counts().leased == 3
        assert bench.space.host_pool.find(KEYS[5]) is None, "it was queued behind the others"
        bench.space.check()
    finally:
        bench.close()

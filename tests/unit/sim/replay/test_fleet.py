"""A trace through several nodes: by hand, against the replay of one tier, and against real managers."""

from __future__ import annotations

import pytest
from benchmarks import fleet as benchmark

from kvbm.policy import make_policy
from kvbm.sim.replay.fleet import ROUTES, fleet_replay, routed
from kvbm.sim.replay.replay import replay
from kvbm.sim.serving.store import StoreRules
from kvbm.sim.traces.conversations import NO_REQUEST, predecessors
from kvbm.sim.traces.synthetic import ChatShape, chats
from rigs.serving import make_trace

RULES = StoreRules(block_bytes=1000, pack_blocks=4, load_blocks=4, linger_s=1.0, known_after_s=1.0)
TRACE = chats(ChatShape(conversations=30))


def test_what_one_node_stored_another_reads() -> None:
    trace = make_trace((0.0, "abc"), (10.0, "abcd"), (20.0, "abcd"))
    found = fleet_replay(trace, [0, 1, 0], 2, 10, "lru", RULES)
    # The second node reads abc; the first has them, and reads d.
    assert found.hits_by_request == [(0, 0), (0, 3), (3, 1)]
    assert (found.host_hits, found.store_hits, found.store_blocks) == (3, 4, 4)
    assert found.use is not None
    assert (found.use.written_blocks, found.use.read_blocks, found.use.again) == (4, 4, 0)
    alone = fleet_replay(trace, [0, 1, 0], 2, 10, "lru")
    assert alone.hits_by_request == [(0, 0), (0, 0), (3, 0)]


def test_who_asks_too_soon_computes() -> None:
    trace = make_trace((0.0, "abc"), (1.5, "abc"))
    found = fleet_replay(trace, [0, 1], 2, 10, "lru", RULES)
    assert found.hits_by_request == [(0, 0), (0, 0)]


def test_a_request_longer_than_host_memory_reads_as_much_as_there_is_room_for() -> None:
    trace = make_trace((0.0, "abcd"), (10.0, "abcdef"), (20.0, "abcdef"))
    found = fleet_replay(trace, [0, 1, 2], 3, 4, "lru", RULES)
    assert found.hits_by_request == [(0, 0), (0, 4), (0, 4)]


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_one_node_without_a_store_is_one_tier(policy: str) -> None:
    found = fleet_replay(TRACE, [0] * len(TRACE.requests), 1, 200, policy)
    expected = replay(TRACE, 200, make_policy(policy, 200))
    assert tuple(hits for hits, _ in found.hits_by_request) == expected.hits_by_request


@pytest.mark.parametrize("route", ROUTES)
def test_an_endless_store_that_all_know_at_once_hits_all_that_returns(route: str) -> None:
    rules = StoreRules(block_bytes=1000, pack_blocks=1, load_blocks=4, known_after_s=0.0)
    everything = TRACE.unique_blocks
    found = fleet_replay(TRACE, routed(TRACE, 3, route), 3, everything, "lru", rules)
    assert found.host_hits + found.store_hits == TRACE.accesses - everything
    assert found.store_blocks == everything


def test_routes() -> None:
    count = len(TRACE.requests)
    assert routed(TRACE, 3, "round-robin")[:4] == [0, 1, 2, 0]
    by_chance = routed(TRACE, 3, "random", seed=5)
    assert by_chance == routed(TRACE, 3, "random", seed=5) != routed(TRACE, 3, "random", seed=6)
    assert all(by_chance.count(node) > count / 5 for node in range(3))
    sessions = routed(TRACE, 3, "session")
    before = predecessors(TRACE)
    followed = [number for number in range(count) if before[number] != NO_REQUEST]
    assert followed and all(sessions[number] == sessions[before[number]] for number in followed)
    assert set(sessions) == {0, 1, 2}


@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_three_managers_over_a_store_hit_what_the_simulator_says(policy: str) -> None:
    trace = chats(ChatShape(), limit=250)
    options = benchmark.parser().parse_args(["--host", "10"])
    row = benchmark.row(trace, options, policy, "round-robin")
    assert 0.1 < row["real"]["host"] and 0.1 < row["real"]["store"], "rates that say something"
    assert max(map(abs, row["points"].values())) <= benchmark.POINTS_MAX, row
    assert row["simulator"]["packs"] == pytest.approx(row["managers"]["packs"], rel=0.1)

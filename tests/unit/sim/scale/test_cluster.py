"""Simulated clusters: the index, the routers, small clusters by hand, and what must always hold."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.errors import SettingsError
from kvbm.policy import make_policy
from kvbm.present.tables import save_json
from kvbm.sim.replay.replay import replay
from kvbm.sim.scale import picture
from kvbm.sim.scale.cluster import Cluster, ClusterRun, ClusterShape, Remote
from kvbm.sim.scale.picture import draw
from kvbm.sim.scale.report import render
from kvbm.sim.scale.routing import ROUTERS, KvAware, Loads, PrefixIndex, SessionAffine
from kvbm.sim.scale.study import ScaleStudy, run
from kvbm.sim.scale.traffic import ClusterTraffic, trace_load
from kvbm.sim.serving.machine import Machine
from kvbm.sim.serving.tier import SimulatedTier
from kvbm.sim.traces.synthetic import ChatShape, chats
from kvbm.sim.traces.trace import Trace, TraceBuilder
from rigs.property_tests import scale_examples

BLOCK_TOKENS = 10
# A token takes a second, a block no time to load: sums can be done in the head.
SLOW = Machine(1, 1.0, 1e18, host_bytes_per_s=1e18)
FAST = Machine(1, 1e12, 1e18, host_bytes_per_s=1e18)


def small_trace(conversations: int = 60, seed: int = 0) -> Trace:
    return chats(ChatShape(conversations=conversations, block_tokens=64), seed)


def cluster(
    nodes: int,
    router: str = "random",
    machine: Machine = FAST,
    host: int = 100,
    remote: Remote = Remote.NONE,
    below: int = 0,
    block_tokens: int = 64,
    network: float = 1e18,
    policy: str = "lru",
) -> Cluster:
    shape = ClusterShape(
        nodes=nodes,
        machine=machine,
        block_tokens=block_tokens,
        host_blocks=host,
        remote=remote,
        remote_blocks=below,
        network_bytes_per_s=network,
        policy=policy,
    )
    loads = Loads(nodes)
    return Cluster(shape, ROUTERS[router](nodes, loads, 7), loads)


def trace_of(*rows: tuple[float, str, float]) -> Trace:
    """Rows of (arrival, a letter for each block, seconds of output); a name is the whole prefix."""
    builder = TraceBuilder("hand", BLOCK_TOKENS)
    for arrived_s, letters, seconds in rows:
        blocks = [letters[: i + 1] for i in range(len(letters))]
        builder.add(arrived_s, blocks, BLOCK_TOKENS * len(letters), 1, seconds)
    return builder.build()


def whole(trace: Trace, closed_loop: bool = False) -> ClusterTraffic:
    """The trace as it is."""
    return ClusterTraffic(trace, 1.0, 1e9, 0, closed_loop, trunk_share=1.0)


# ---- the index


@settings(max_examples=scale_examples(150), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 9), max_size=6)), max_size=25), st.data()
)
def test_the_index_equals_asking_every_node(news: list[tuple[int, list[int]]], data: st.DataObject) -> None:
    index = PrefixIndex(5)
    held: list[set[int]] = [set() for _ in range(5)]
    for node, blocks in news:
        chosen = set(blocks)
        if data.draw(st.booleans()):
            index.stored(node, sorted(chosen - held[node]))
            held[node] |= chosen
        else:
            index.removed(node, sorted(chosen & held[node]))
            held[node] -= chosen
    assert len(index) == len(set().union(*held))
    chain = data.draw(st.lists(st.integers(0, 9), max_size=10, unique=True))
    found = index.stretches(chain)
    for node in range(5):
        overlap = next((i for i, block in enumerate(chain) if block not in held[node]), len(chain))
        assert overlap == sum(length for nodes, length in found if nodes >> node & 1)


def test_the_index_refuses_to_forget_what_a_node_never_held() -> None:
    index = PrefixIndex(2)
    index.stored(0, [1])
    with pytest.raises(AssertionError, match="held"):
        index.removed(1, [1])


@settings(max_examples=scale_examples(100), deadline=None)
@given(st.integers(1, 70), st.integers(0, 10_000))
def test_the_kv_router_takes_the_least_cost(nodes: int, seed: int) -> None:
    chance = random.Random(seed)
    loads = Loads(nodes)
    loads.active += [chance.randrange(6) for _ in range(nodes)]
    loads.waiting += [chance.randrange(6) for _ in range(nodes)]
    router = KvAware(nodes, loads, seed)
    chain = list(range(8))
    overlaps = [chance.randrange(9) for _ in range(nodes)]
    for node, overlap in enumerate(overlaps):
        router.stored(node, chain[:overlap])
    costs = [loads.waiting[i] + 8 - overlaps[i] + loads.active[i] for i in range(nodes)]
    node, overlap = router.choose(0, chain)
    assert costs[node] == min(costs)
    assert overlap == overlaps[node]


def test_a_conversation_stays_on_its_node_and_all_nodes_get_some() -> None:
    router = SessionAffine(10, 0)
    nodes = [router.choose(number, [])[0] for number in range(2000)]
    assert nodes == [router.choose(number, [])[0] for number in range(2000)]
    assert {nodes.count(node) > 100 for node in range(10)} == {True}


# ---- small clusters by hand


def test_two_nodes_in_turn_by_hand() -> None:
    trace = trace_of((0.0, "ab", 1.0), (100.0, "abc", 1.0), (200.0, "abc", 1.0), (300.0, "abcd", 1.0))
    found = cluster(2, "round-robin", SLOW, block_tokens=BLOCK_TOKENS).run(whole(trace))
    # Node 0: ab, then abc with 2 hits. Node 1: abc, then abcd with 3 hits.
    assert (found.host_hits, found.blocks) == (5, 12)
    assert list(found.ttft_s) == [20.0, 30.0, 10.0, 10.0]
    assert found.computing_s == [30.0, 40.0]
    assert found.requests == [2, 2]
    assert found.imbalance == 40.0 / 35.0


def test_a_request_waits_for_the_one_before_it() -> None:
    trace = trace_of((0.0, "ab", 1.0), (5.0, "cd", 1.0), (6.0, "ab", 1.0))
    found = cluster(1, machine=SLOW, block_tokens=BLOCK_TOKENS).run(whole(trace))
    # The third is looked up when the engine gets to it: both blocks are there, and one token has to be computed.
    assert list(found.ttft_s) == [20.0, 35.0, 35.0]
    assert found.host_hits == 2


def test_the_kv_router_follows_the_blocks_by_hand() -> None:
    rows = [(100.0 * turn, "abcdefgh"[: turn + 2], 1.0) for turn in range(6)]
    found = cluster(4, "kv", SLOW, block_tokens=BLOCK_TOKENS).run(whole(trace_of(*rows)))
    assert found.host_hits == sum(range(2, 7))
    assert sorted(found.requests) == [0, 0, 0, 6]


def test_a_shared_remote_tier_helps_other_nodes_and_a_private_one_does_not() -> None:
    trace = trace_of((0.0, "ab", 1.0), (100.0, "ab", 1.0))
    for remote, hits in ((Remote.SHARED, 2), (Remote.PRIVATE, 0)):
        nodes = cluster(2, "round-robin", SLOW, remote=remote, below=50, block_tokens=BLOCK_TOKENS)
        found = nodes.run(whole(trace))
        assert (found.host_hits, found.remote_hits) == (0, hits)
        assert found.remote_writes == 4 - hits


def test_what_takes_longer_to_load_than_to_compute_is_computed() -> None:
    trace = trace_of((0.0, "ab", 1.0), (100.0, "ab", 1.0))
    for block_s, loaded in ((11.0, 0), (9.0, 2)):
        nodes = cluster(
            2, "round-robin", SLOW, remote=Remote.SHARED, below=9, block_tokens=10, network=1 / block_s
        )
        found = nodes.run(whole(trace))
        assert (found.remote_hits, found.declined_blocks) == (loaded, 2 - loaded)


def test_an_answer_that_is_late_makes_the_next_question_late() -> None:
    trace = trace_of((0.0, "ab", 1.0), (1.5, "xyz", 1.0), (10.0, "abc", 1.0))
    found = cluster(1, machine=SLOW, block_tokens=BLOCK_TOKENS).run(whole(trace, closed_loop=True))
    # Through at 21 s; the next question comes 9 s later as in the trace, when xyz has the engine until 50 s.
    assert list(found.ttft_s) == [20.0, 48.5], "30 s is after the end of this trace"
    longer = trace_of((0.0, "ab", 1.0), (1.5, "xyz", 1.0), (10.0, "abc", 1.0), (500.0, "q", 1.0))
    found = cluster(1, machine=SLOW, block_tokens=BLOCK_TOKENS).run(whole(longer, closed_loop=True))
    assert list(found.ttft_s) == [20.0, 48.5, 30.0, 10.0]


# ---- what must always hold


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("capacity", [40, 300, 5000])
def test_one_node_equals_the_replay_of_a_single_tier(router: str, capacity: int) -> None:
    trace = small_trace()
    expected = replay(trace, capacity, make_policy("lru", capacity))
    found = cluster(1, router, host=capacity).run(whole(trace))
    assert (found.blocks, found.host_hits) == (expected.accesses, expected.hits)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("remote", Remote)
def test_the_same_seed_gives_the_same_run_and_nothing_is_lost(router: str, remote: Remote) -> None:
    trace = small_trace()
    machine = Machine(1, 3000.0, 1e4, host_bytes_per_s=1e4)
    traffic = ClusterTraffic(trace, 3.5, 900.0, 5)

    def once() -> tuple[ClusterRun, Cluster]:
        nodes = cluster(5, router, machine, host=60, remote=remote, below=120, network=2e3)
        return nodes.run(traffic, 200.0), nodes

    (first, nodes), (second, _) = once(), once()
    assert first == second
    assert 0 < first.host_hits + first.remote_hits + first.declined_blocks <= first.blocks
    assert (first.remote_hits > 0) == (remote is not Remote.NONE)
    assert sum(first.requests) == len(first.ttft_s) > 0
    assert min(first.ttft_s) > 0.0
    assert 0.0 < first.load <= first.offered_load
    limits = {Remote.NONE: 0, Remote.PRIVATE: 120, Remote.SHARED: 5 * 120}
    for node in nodes.nodes:
        assert node.host.counts().resident <= 60
        assert (node.remote.counts().resident if node.remote else 0) <= limits[remote]
    assert not nodes._loads.active.any() and not nodes._loads.waiting.any()


def blocks_of(tier: SimulatedTier) -> set[int]:
    return {block for _, block in tier.resident()}


@pytest.mark.parametrize("remote", Remote)
def test_the_router_knows_exactly_what_the_nodes_hold(remote: Remote) -> None:
    loads = Loads(3)
    router = KvAware(3, loads, 0)
    shape = ClusterShape(
        nodes=3, machine=FAST, block_tokens=64, host_blocks=50, remote=remote, remote_blocks=90
    )
    nodes = Cluster(shape, router, loads)
    nodes.run(ClusterTraffic(small_trace(), 2.0, 1200.0, 1))
    held = [blocks_of(node.host) for node in nodes.nodes]
    if remote is Remote.PRIVATE:
        held = [
            mine | blocks_of(node.remote) for mine, node in zip(held, nodes.nodes, strict=True) if node.remote
        ]
    for block in set().union(*held):
        ((bits, _),) = router.index.stretches([block])
        assert bits == sum(1 << node for node in range(3) if block in held[node])
    assert len(router.index) == len(set().union(*held))


def test_a_learning_policy_runs_in_every_tier() -> None:
    nodes = cluster(2, "kv", host=60, remote=Remote.SHARED, below=100, policy="gittins")
    assert nodes.run(ClusterTraffic(small_trace(20), 2.0, 600.0, 0)).hit_rate > 0.0


# ---- traffic


def test_copies_share_the_trunk_alone() -> None:
    trace = small_trace()
    traffic = ClusterTraffic(trace, 2.0, 1e9, 0, closed_loop=False, trunk_share=0.2)
    asked = numpy.bincount(trace.flat)
    trunk = set(numpy.flatnonzero(asked > 0.2 * len(trace.requests)).tolist())
    assert traffic.copies == 2 and trunk
    blocks: dict[int, set[int]] = {0: set(), 1: set()}
    for arrival in traffic:
        blocks[arrival.copy].update(arrival.blocks)
    assert blocks[0] & blocks[1] == trunk
    assert len(blocks[0]) == len(blocks[1]) == trace.unique_blocks


def test_a_share_of_a_copy_keeps_whole_conversations() -> None:
    trace = small_trace()
    everything = {a.conversation: [] for a in ClusterTraffic(trace, 1.0, 1e9, 0, closed_loop=False)}
    for arrival in ClusterTraffic(trace, 1.0, 1e9, 0, closed_loop=False):
        everything[arrival.conversation].append(arrival.number)
    kept: dict[int, list[int]] = {}
    for arrival in ClusterTraffic(trace, 0.5, 1e9, 0, closed_loop=False):
        kept.setdefault(arrival.conversation, []).append(arrival.number)
    assert 0 < len(kept) < len(everything)
    assert all(numbers == everything[conversation] for conversation, numbers in kept.items())


def test_a_closed_loop_asks_for_the_same_when_nothing_is_late() -> None:
    trace = small_trace()
    open_loop = cluster(1, host=300).run(whole(trace))
    closed = cluster(1, host=300).run(whole(trace, closed_loop=True))
    # Computing takes next to nothing, but the very last request is late by that much.
    assert 0 <= open_loop.blocks - closed.blocks <= len(trace.requests[-1].blocks)
    assert 0 <= open_loop.host_hits - closed.host_hits <= len(trace.requests[-1].blocks)


def test_the_load_of_a_trace_by_hand() -> None:
    # 60 tokens at 1 a second, and a gap of 10 s after each of three requests.
    trace = trace_of((0.0, "ab", 1.0), (10.0, "cd", 1.0), (20.0, "ef", 1.0))
    assert trace_load(trace, SLOW) == pytest.approx(2.0)


# ---- the study and the command


def study(**changes: object) -> ScaleStudy:
    fields: dict[str, object] = {
        "trace": "synthetic", "nodes": [1, 3], "routers": ["random", "kv"], "remotes": ["private", "shared"],
        "loads": [0.3], "total_load": None, "host": "4GB", "remote_size": "20GB", "bytes_per_token": 131072,
        "chunk_tokens": None, "minutes": 4.0, "warm_up_minutes": 4.0, "seeds": [0, 1], "policy": "lru",
        "closed_loop": True, "prefill_tokens_per_s": 5000.0,
        "network_bytes_per_s": 1e10, "store_bytes_per_s": 2e10,
    }  # fmt: skip
    return ScaleStudy(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_study_has_a_row_for_everything_and_can_be_shown(tmp_path: Path) -> None:
    wanted = study()
    rows = run(wanted, lambda what, total: lambda done: None)
    assert [(row.nodes, row.router, row.remote) for row in rows] == [
        (nodes, router, remote)
        for nodes in (1, 3)
        for remote in ("private", "shared")
        for router in ("random", "kv")
    ]
    assert all(row.seeds == 2 and 0.0 <= row.host_hit_rate <= row.hit_rate <= 1.0 for row in rows)
    alone = {(row.hit_rate, row.ttft_mean_s) for row in rows if row.nodes == 1 and row.remote == "private"}
    assert len(alone) == 1, "one node is one node, whoever routes"
    assert render(wanted, rows)
    save_json({"settings": wanted, "rows": rows}, tmp_path / "rows.json")
    assert (tmp_path / "rows.json").stat().st_size > 1000
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib; it is not installed")
    assert draw(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_goes_by_nodes_or_by_load(tmp_path: Path) -> None:
    for nodes, loads, count in (([1, 3], [0.3], 2), ([1], [0.1, 0.3], 2), ([1, 3], [0.1, 0.3], 4)):
        rows = run(study(nodes=nodes, loads=loads, seeds=[0], remotes=["none"]), lambda *_: lambda done: None)
        lines = picture.lines(rows)
        assert len(lines) == count
        for points in lines.values():
            # Every line goes from left to right, over each place once.
            places = [place for place, _ in points]
            assert places == sorted(set(places)) and len(places) == 2
    pytest.importorskip("matplotlib", reason="the picture is drawn with matplotlib; it is not installed")
    assert draw(rows, tmp_path / "rows.png")


def test_a_total_load_is_shared_by_all() -> None:
    rows = run(
        study(total_load=0.6, seeds=[0], routers=["random"], remotes=["none"]), lambda *_: lambda done: None
    )
    assert rows[0].offered_load == pytest.approx(3 * rows[1].offered_load, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"routers": ["best"]}, "--router"),
        ({"remotes": ["far"]}, "--remote"),
        ({"policy": "best"}, "--policy"),
        ({"warm_up_minutes": -1.0}, "--warm-up"),
        ({"trace": "missing"}, "TRACE"),
        ({"host": "1GB,2GB"}, "--host"),
        ({"remote_size": "1XB"}, "--remote-size"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        study(**changes).check()

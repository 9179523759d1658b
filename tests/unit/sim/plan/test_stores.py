"""`kvbm plan --remote`: a bill by hand, the answer against all sizes, and what a user meets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbm.cli import main as entry
from kvbm.settings.parse import GB
from kvbm.sim.plan.cheapest import Bounds, Prices, Target, sizes_between
from kvbm.sim.plan.planning import HOST_SPAN, STAGING_BYTES, Question
from kvbm.sim.plan.store_prices import MONTH_S, StorePrices, month_of
from kvbm.sim.plan.stores import DISK, HOST, STORE, StoreAnswer, StoreQuestion, Way, answer_stores
from kvbm.sim.replay.fleet import fleet_replay, routed
from kvbm.sim.serving.store import POLL_S, SWEEP_S, StoreRules, StoreUse
from kvbm.sim.traces.synthetic import ChatShape, chats

pytestmark = pytest.mark.slow

LIMIT = 300
BYTES_PER_TOKEN = 131_072
TRACE = chats(ChatShape(), limit=LIMIT)
BLOCK_BYTES = BYTES_PER_TOKEN * TRACE.block_tokens
CALL = ["plan", "synthetic", "--bytes-per-token", "128KiB", "--policy", "lru", "--limit", str(LIMIT)]


def quiet(what: str, total: int) -> Callable[[int], None]:
    return lambda done: None


def ask(least: float, nodes: int = 3, **changes: object) -> StoreAnswer:
    of_store = {name: changes.pop(name) for name in ("rules", "prices", "route") if name in changes}
    fields = {"policy": "lru", "limit": LIMIT} | changes
    question = Question(
        traces=["synthetic"],
        target=Target(least_hit_rate=least),
        bytes_per_token=BYTES_PER_TOKEN,
        **fields,  # type: ignore[arg-type]
    )
    asked = StoreQuestion(question=question, nodes=nodes, **of_store)  # type: ignore[arg-type]
    asked.check()
    (answer,) = answer_stores(asked, quiet).plans
    return answer


# ---- the bill

USE = StoreUse(
    written_blocks=60,
    read_blocks=30,
    pack_puts=20,
    pack_gets=10,
    again=6,
    touches=1,
    log_puts=5,
    log_gets=10,
    byte_s=7.2e12,
)
"""Of 100 blocks of a GB in an hour: 720 of them are in a month."""


def test_a_month_by_hand() -> None:
    prices = StorePrices(per_gb=0.1, per_1000_puts=2.0, per_1000_gets=1.0, egress_per_gb=0.5)
    month = month_of(USE, StoreRules.of(GB), prices, 2, 3600.0)
    assert month.stored_bytes == 2 * GB
    assert (month.written_bytes, month.read_bytes) == (43_200 * GB, 21_600 * GB)
    assert (month.puts, month.gets) == (14_400, 7_200)
    assert month.told_puts == 720 * 6 + 2 * MONTH_S * (1 / POLL_S + 1 / SWEEP_S)
    assert month.told_gets == 7_200
    assert (month.blocks_a_put, month.blocks_a_get, month.again) == (3.0, 3.0, 0.1)
    assert month.storage_cost == pytest.approx(0.2)
    assert month.put_cost == pytest.approx(2.0 * (14_400 + month.told_puts) / 1000)
    assert month.get_cost == pytest.approx(14.4)
    assert month.egress_cost == pytest.approx(10_800)
    assert month.cost == pytest.approx(0.2 + month.put_cost + 14.4 + 10_800)


def test_no_more_lies_there_than_there_is_room_for() -> None:
    prices = StorePrices(per_gb=0.1)
    assert month_of(USE, StoreRules.of(GB, size_bytes=GB), prices, 1, 3600.0).stored_bytes == GB
    assert month_of(USE, StoreRules.of(GB, size_bytes=3 * GB), prices, 1, 3600.0).stored_bytes == 2 * GB


def test_the_month_of_a_store_that_is_used_all_the_time_is_the_ttl_of_what_is_written() -> None:
    rules = StoreRules.of(BLOCK_BYTES, ttl_s=36_000.0)
    found = fleet_replay(TRACE, routed(TRACE, 2, "round-robin"), 2, 50, "lru", rules)
    assert found.use is not None
    month = month_of(found.use, rules, StorePrices(), 2, TRACE.seconds)
    for_the_ttl = month.written_bytes / MONTH_S * rules.ttl_s
    # And as long as it was used before, which is no longer than the trace.
    assert for_the_ttl < month.stored_bytes < for_the_ttl * (1 + TRACE.seconds / rules.ttl_s)


# ---- the answer


@pytest.mark.parametrize("least", [0.4, 0.7])
def test_the_cheapest_of_all_sizes(least: float) -> None:
    found = ask(least, rules={"ttl_s": 7200.0})
    everything = TRACE.unique_blocks * BLOCK_BYTES
    rules = StoreRules.of(BLOCK_BYTES, ttl_s=7200.0)
    nodes = routed(TRACE, 3, "round-robin")
    costs: dict[str, float] = {}
    for size in sizes_between(everything // (HOST_SPAN * 3), everything, None, BLOCK_BYTES):
        blocks = min(size // BLOCK_BYTES, TRACE.unique_blocks)
        shared = fleet_replay(TRACE, nodes, 3, blocks, "lru", rules)
        assert shared.use is not None
        bill = month_of(shared.use, rules, StorePrices(), 3, TRACE.seconds).cost
        if shared.hit_rate >= least:
            cost = 3 * Prices().cost((size, 0)) + bill
            costs[STORE] = min(costs.get(STORE, cost), cost)
        if fleet_replay(TRACE, nodes, 3, blocks, "lru").hit_rate >= least:
            cost = 3 * Prices().cost((STAGING_BYTES, size))
            costs[DISK] = min(costs.get(DISK, cost), cost)
    assert found.best is not None and found.best.meets
    assert found.best.cost == pytest.approx(costs[STORE])
    if DISK in costs:
        assert found.without is not None and found.without.kind == DISK
        assert found.without.cost == pytest.approx(costs[DISK])
        assert found.pays == (costs[STORE] < costs[DISK])
    else:
        assert found.without is None and found.pays


def test_the_same_money() -> None:
    found = ask(0.7, rules={"ttl_s": 7200.0})
    assert found.best is not None
    host, disk = found.same_money
    each = found.best.cost / 3
    assert (host.kind, disk.kind) == (HOST, DISK)
    assert Prices().cost((host.host_bytes, 0)) == pytest.approx(each)
    assert Prices().cost((STAGING_BYTES, disk.disk_bytes)) == pytest.approx(each)
    blocks = min(host.host_bytes // BLOCK_BYTES, TRACE.unique_blocks)
    without = fleet_replay(TRACE, routed(TRACE, 3, "round-robin"), 3, blocks, "lru")
    assert host.hit_rate == without.hit_rate < found.best.hit_rate


def by_size(ways: list[Way], kind: str) -> dict[int, Way]:
    return {way.host_bytes: way for way in ways if way.kind == kind}


def test_a_store_adds_hits_at_every_size() -> None:
    found = ask(0.7, rules={"ttl_s": 7200.0})
    host, shared = by_size(found.ways, HOST), by_size(found.ways, STORE)
    for size in host.keys() & shared.keys():
        assert shared[size].hit_rate >= host[size].hit_rate
        assert shared[size].cost > host[size].cost


def test_bounds_leave_ways_out() -> None:
    found = ask(0.3, bounds=Bounds(disk_bytes=0))
    assert {way.kind for way in found.ways} == {HOST, STORE}
    found = ask(0.3, bounds=Bounds(host_bytes=0))
    assert {way.kind for way in found.ways} == {DISK} and found.best is None and not found.pays


def test_replays_end() -> None:
    found = ask(0.7, replays=3)
    assert found.replays == 3
    assert found.notes == ["stopped after 3 replays (--replays): cheaper sizes may do"]


def test_the_same_call_gives_the_same_answer() -> None:
    assert ask(0.7, route="random") == ask(0.7, route="random")


# ---- the command


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        entry.main([*CALL, *words])
    assert not ended.value.code
    return capsys.readouterr().out


def test_a_store_that_pays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ["--target-hit-rate", "70%", "--remote", "unbounded", "--remote-ttl", "2", "--nodes", "3"]
    text = run(capsys, *words, "--json", str(file))
    assert "3 nodes (round-robin), a store of any size, 2 h: a hit rate of at least 0.7" in text
    assert "Only the store meets the target." in text
    assert "ASSUMED prices" in text and "--price-remote" in text
    assert "DYN_KVBM_REMOTE=URL DYN_KVBM_REMOTE_TTL_HOURS=2 DYN_KVBM_EVICTION=lru" in text
    (plan,) = json.loads(file.read_text())["plans"]
    assert plan["pays"] is True and plan["without"] is None
    assert plan["best"]["month"]["blocks_a_put"] > 1.0
    assert plan["store_prices"]["assumed"] is True


def test_a_store_that_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target-hit-rate", "40%", "--remote", "1TB", "--price-remote", "1", "--price-put", "0.01"]
    words += ["--price-get", "0.001", "--price-egress", "0.02", "--price-host", "2", "--price-disk", "0.1"]
    text = run(capsys, *words)
    assert "The store does not pay: cheapest with the store" in text
    assert "more for all nodes" in text
    assert "ASSUMED" not in text
    assert "DYN_KVBM_REMOTE_GB=1000" in text
    assert "$1/GB" in text and "$0.01/1,000" in text and "$0.02/GB" in text


def test_no_size_meets_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--target-hit-rate", "99%", "--remote", "unbounded")
    assert "No size meets the target with the store" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--target-hit-rate", "0.5", "--nodes", "2"], "--nodes=2 cannot be used: only with --remote"),
        (
            ["--target-hit-rate", "0.5", "--price-put", "2"],
            "--price-put=2.0 cannot be used: only with --remote",
        ),
        (["--target-ttft", "1s", "--remote", "1GB"], "--target-ttft"),
        (
            ["--target-hit-rate", "0.5", "--remote", "0"],
            "--remote='0' cannot be used: a size above 0, or unbounded",
        ),
        (
            ["--target-hit-rate", "0.5", "--remote", "1GB", "--remote-ttl", "0"],
            "--remote-ttl=0.0 cannot be used",
        ),
        (
            ["--target-hit-rate", "0.5", "--remote", "1GB", "--price-get", "-1"],
            "--price-get=-1.0 cannot be used",
        ),
        (["--target-hit-rate", "0.5", "--remote", "1GB", "--router", "kv"], "--router='kv' cannot be used"),
        (["--target-hit-rate", "0.5", "--remote", "1GB", "--sample", "0.5"], "--sample"),
        (
            ["--target-hit-rate", "0.5", "--remote", "1GB", "--remote-admission", "most"],
            "--remote-admission='most'",
        ),
        (["--target-hit-rate", "0.5", "--remote", "1GB", "--plot", "plan.png"], "--plot='plan.png'"),
        (["--target-hit-rate", "0.5", "--remote", "1GB", "--machine"], "--remote: its cost is in dollars"),
    ],
)
def test_what_cannot_be_asked(capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main([*CALL, *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1

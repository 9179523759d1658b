"""Faults while real engines serve: the answers stay the same, nothing hangs, and what failed is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import reach
from engine.engine_child import KV_CONNECTOR
from engine.launcher import Launcher, differences
from engine.tier_settings import BLOCK_BYTES, HOST_BLOCKS, SMALL_HOST_BLOCKS, disk, host
from engine.workload import again, some, workload
from rigs.manager_probe import flip_bits, private_managers, wait_for

Reference = dict[str, list[int]]
NOTHING = {"requests": 0, "lookups": 0, "stores": 0}
CORRUPT = 'kvbm_failures_total{tier="disk",kind="corrupt"}'


@pytest.mark.quick
def test_wrong_kv_is_noticed(launcher: Launcher, reference: Reference) -> None:
    """The negative control: KV that is wrong behind everybody's back changes answers, and the comparison sees it."""
    engine = launcher.start(host())
    engine.call(reach.scribble_over_slots, timeout_s=20.0)
    assert len(differences(reference, engine.run(workload()))) > some(10)


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
@pytest.mark.parametrize(
    ("tiers", "every"),
    [
        ("host", 1),
        pytest.param("host", 2, marks=pytest.mark.quick),
        ("host", 3),
        ("host and disk", 2),
    ],
)
def test_loads_that_fail(
    launcher: Launcher, reference: Reference, tmp_path: Path, tiers: str, every: int
) -> None:
    engine = launcher.start(host() if tiers == "host" else disk(tmp_path, SMALL_HOST_BLOCKS))
    engine.call(reach.fail_loads, every, timeout_s=20.0)
    answers = engine.run(workload())
    assert differences(reference, answers) == []
    metrics = launcher.metrics()
    assert _failed(metrics) > some(20)
    if every > 1:
        assert _loaded(metrics) > some(20)
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
@pytest.mark.parametrize("rank", [0, 1])
def test_loads_that_fail_in_one_of_two_ranks(
    launcher: Launcher, reference: Reference, tmp_path: Path, rank: int
) -> None:
    """What one rank has and the other has not is computed again by both."""
    engine = launcher.start(disk(tmp_path, SMALL_HOST_BLOCKS), tensor_parallel_size=2)
    engine.call(reach.fail_loads_of_rank, rank, 2, timeout_s=20.0)
    failed = 0.0
    # A starved machine answers lookups late, and then less is loaded: it gets more turns to load as much.
    for turn in ("", "+1", "+2"):
        assert differences(reference, engine.run(again(workload(), turn)), turn) == []
        metrics = launcher.metrics()
        failed = _failed(metrics)
        if failed > some(20) and _loaded(metrics) > some(20):
            break
    assert failed > some(20)
    assert _loaded(metrics) > some(20)
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
def test_loads_that_fail_under_policy_fail(launcher: Launcher, reference: Reference) -> None:
    """The policy of the user's choice: such a request ends early. None gets a wrong token, none hangs."""
    engine = launcher.start(host(), {**KV_CONNECTOR, "kv_load_failure_policy": "fail"})
    requests = [request for request in workload() if not request.parent]
    engine.run(requests)
    engine.call(reach.reset, connector=False, timeout_s=20.0)
    engine.call(reach.fail_loads, 3, timeout_s=20.0)
    answers = engine.run(again(requests, "+"))
    for request in requests:
        if request.abort_after is None:
            right, given = reference[request.name], answers.outputs[request.name + "+"]
            ended = request.name + "+" in answers.failed
            assert given == (right[: len(given)] if ended else right)
    assert 0 < len(answers.failed) < len(answers.outputs)
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


@pytest.mark.parametrize("tiers", ["host", pytest.param("host and disk", marks=pytest.mark.quick)])
def test_manager_killed_while_serving(
    launcher: Launcher, reference: Reference, tmp_path: Path, tiers: str
) -> None:
    """kill -9 of the private manager, again and again: it is started anew, and there are hits again."""
    settings = host() if tiers == "host" else disk(tmp_path, SMALL_HOST_BLOCKS)
    engine = launcher.start(settings)
    killed: list[int] = []
    for turn in range(3):
        requests = again(workload(), f"+{turn}")
        answers, pids = engine.call(reach.run_and_kill, requests, [some(15), some(60)], timeout_s=180.0)
        killed += pids
        assert differences(reference, answers, f"+{turn}") == []
        engine.call(reach.wait_until_ready, timeout_s=40.0)
    assert len(set(killed)) >= 3
    assert len(private_managers(launcher.runtime_dir)) == 1
    before = launcher.metrics()
    assert differences(reference, engine.run(again(workload(), "+end")), "+end") == []
    assert _loaded(launcher.metrics()) - _loaded(before) > some(50)
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


def test_shared_manager_replaced_while_serving(
    launcher: Launcher, reference: Reference, shared_manager: Any, tmp_path: Path
) -> None:
    manager = shared_manager("--host-blocks", str(HOST_BLOCKS))
    engine = launcher.start({"DYN_KVBM_MANAGER": manager.socket_path})
    half_way = tmp_path / "half-way"
    engine.send(reach.run_and_signal, workload(), some(40), str(half_way))
    wait_for(half_way.exists, 60.0, "the engine does not get on")
    assert manager.metrics()["kvbm_offload_blocks_d2h"] > 0
    manager.kill()
    replacement = shared_manager("--host-blocks", str(HOST_BLOCKS), at=manager.socket_path)
    assert differences(reference, engine.receive(100.0)) == []
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    for turn in ("+1", "+2"):
        assert differences(reference, engine.run(again(workload(), turn)), turn) == []
    assert replacement.metrics()["kvbm_onboard_blocks_h2d"] > some(100)
    assert "manager lost" in engine.log()


@pytest.mark.parametrize("policy", [pytest.param("recompute", marks=pytest.mark.quick), "fail"])
def test_corrupt_blocks_after_a_restart(
    launcher: Launcher, reference: Reference, tmp_path: Path, policy: str
) -> None:
    """A flipped bit in half of all blocks on disk: detected, counted, computed again. No request fails for it."""
    transfer = {**KV_CONNECTOR, "kv_load_failure_policy": policy}
    launcher.start(disk(tmp_path, SMALL_HOST_BLOCKS), transfer).run(workload())
    launcher.stop()
    assert flip_bits(tmp_path, stride_bytes=2 * BLOCK_BYTES, offset_bytes=1234) > some(50)
    engine = launcher.start(disk(tmp_path, SMALL_HOST_BLOCKS), transfer)
    assert differences(reference, engine.run(workload())) == []
    metrics = launcher.metrics()
    assert metrics[CORRUPT] > some(10)
    assert metrics["kvbm_onboard_blocks_d2d"] > some(10)
    launcher.assert_nothing_held()


def test_blocks_corrupted_in_place(launcher: Launcher, reference: Reference, tmp_path: Path) -> None:
    """The same under a running engine."""
    engine = launcher.start(disk(tmp_path, SMALL_HOST_BLOCKS))
    engine.run(workload())
    launcher.assert_nothing_held()
    assert flip_bits(tmp_path, stride_bytes=BLOCK_BYTES, offset_bytes=77) > some(100)
    assert differences(reference, engine.run(again(workload(), "+")), "+") == []
    assert launcher.metrics()[CORRUPT] > some(10)
    launcher.assert_nothing_held()


@pytest.mark.parametrize("manager_dies", [False, pytest.param(True, marks=pytest.mark.quick)])
def test_abort_while_loading(launcher: Launcher, reference: Reference, manager_dies: bool) -> None:
    """Requests aborted while their loads are pending: the engine goes on, and gives everything back."""
    # A load beside the forward pass would hold that at the gate.
    engine = launcher.start({**host(), "DYN_KVBM_ONBOARD_MODE": "async"})
    engine.run(workload())
    engine.call(reach.reset, connector=False, timeout_s=20.0)
    engine.call(reach.gate_loads, timeout_s=20.0)
    first_turns = [request for request in again(workload(), "!") if not request.parent][:8]
    loading = engine.call(reach.abort_while_loading, first_turns, manager_dies, timeout_s=60.0)
    assert loading > 0
    engine.call(reach.open_gate, timeout_s=20.0)
    engine.call(reach.step_idle, 20, timeout_s=20.0)
    engine.call(reach.wait_until_ready, timeout_s=40.0)
    assert differences(reference, engine.run(again(workload(), "+")), "+") == []
    assert _loaded(launcher.metrics()) > some(20)
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


def _failed(metrics: dict[str, float]) -> float:
    return sum(metrics[f'kvbm_failures_total{{tier="{tier}",kind="load"}}'] for tier in ("host", "disk"))


def _loaded(metrics: dict[str, float]) -> float:
    return metrics["kvbm_onboard_blocks_h2d"] + metrics["kvbm_onboard_blocks_d2d"]

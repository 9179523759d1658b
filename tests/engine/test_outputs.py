"""The same answers as an engine that never evicts, whichever tiers there are, and proof that the tiers were used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import reach
from engine.engine_child import KV_CONNECTOR, Answers, Child
from engine.engine_process import EngineProcess
from engine.launcher import Launcher, differences
from engine.tier_settings import HOST_BLOCKS, SMALL_HOST_BLOCKS, TINY_HOST_BLOCKS, disk, host
from engine.workload import BLOCK_TOKENS, again, some, workload
from rigs.manager_probe import wait_for

NOTHING = {"requests": 0, "lookups": 0, "stores": 0}

Reference = dict[str, list[int]]


def test_no_cache_evicts_and_preempts(launcher: Launcher, reference: Reference) -> None:
    """vLLM alone on the small device: the premise of all that follows."""
    answers = launcher.start(transfer=None).run(workload())
    assert differences(reference, answers) == []
    assert answers.preempted > 0
    assert answers.aborted == sum(request.abort_after is not None for request in workload())


@pytest.mark.quick
def test_host(launcher: Launcher, reference: Reference) -> None:
    engine = launcher.start(host())
    answers = engine.run(workload())
    assert differences(reference, answers) == []
    assert answers.preempted > 0
    once_more = engine.run(again(workload(), "+"))
    assert differences(reference, once_more, "+") == []
    metrics = launcher.metrics()
    assert metrics["kvbm_onboard_blocks_h2d"] > some(300)
    assert metrics["kvbm_matched_tokens"] == metrics["kvbm_onboard_blocks_h2d"] * BLOCK_TOKENS
    assert metrics["kvbm_offload_blocks_d2h"] > some(150)
    assert metrics['kvbm_failures_total{tier="host",kind="load"}'] == 0
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


def test_host_that_evicts(launcher: Launcher, reference: Reference) -> None:
    answers = launcher.start(host(SMALL_HOST_BLOCKS)).run(workload())
    assert differences(reference, answers) == []
    metrics = launcher.metrics()
    assert metrics["kvbm_onboard_blocks_h2d"] > some(20)
    launcher.assert_nothing_held()
    assert launcher.metrics()['kvbm_evicted_blocks_total{tier="host",reason="capacity"}'] > some(100)


@pytest.mark.parametrize("below", [False, True], ids=["host", "disk"])
def test_host_smaller_than_a_request(
    launcher: Launcher, reference: Reference, tmp_path: Path, below: bool
) -> None:
    """Runs are cut at what fits, many of them at a time, and nobody waits for the rest."""
    settings = disk(tmp_path, TINY_HOST_BLOCKS) if below else host(TINY_HOST_BLOCKS)
    engine = launcher.start(settings)
    for turn in ("", "+"):
        assert differences(reference, engine.run(again(workload(), turn)), turn) == []
    metrics = launcher.metrics()
    assert metrics['kvbm_failures_total{tier="host",kind="load"}'] == 0
    assert metrics['kvbm_failures_total{tier="disk",kind="load"}'] == 0
    if below:
        assert metrics["kvbm_onboard_blocks_d2d"] > 10
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    # How many the crowd loads from ten blocks is chance. A request that is alone and comes back loads what fits.
    longest = max((request for request in workload() if not request.parent), key=lambda one: len(one.tokens))
    # On a busy machine the manager may answer too late for it to wait: then it comes back once more.
    loaded = metrics["kvbm_onboard_blocks_h2d"]
    for turn in range(6):
        engine.run([replace(longest, name=f"alone{turn}", abort_after=None)])
        launcher.assert_nothing_held()
        assert engine.call(reach.reset, connector=False, timeout_s=20.0)
        if launcher.metrics()["kvbm_onboard_blocks_h2d"] > loaded:
            break
    else:
        pytest.fail("it never loaded what fits")
    launcher.assert_nothing_held()


@pytest.mark.quick
def test_host_and_disk(launcher: Launcher, reference: Reference, tmp_path: Path) -> None:
    engine = launcher.start(disk(tmp_path, SMALL_HOST_BLOCKS))
    answers = engine.run(workload())
    assert differences(reference, answers) == []
    once_more = engine.run(again(workload(), "+"))
    assert differences(reference, once_more, "+") == []
    metrics = launcher.metrics()
    assert metrics["kvbm_onboard_blocks_h2d"] > some(50)
    assert metrics["kvbm_onboard_blocks_d2d"] > some(50)
    assert metrics["kvbm_offload_blocks_h2d"] > some(100)
    assert metrics['kvbm_failures_total{tier="disk",kind="corrupt"}'] == 0
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


def test_disk_without_host(launcher: Launcher, reference: Reference, tmp_path: Path) -> None:
    engine = launcher.start(disk(tmp_path))
    answers = engine.run(workload())
    assert differences(reference, answers) == []
    once_more = engine.run(again(workload(), "+"))
    assert differences(reference, once_more, "+") == []
    metrics = launcher.metrics()
    assert metrics["kvbm_onboard_blocks_d2d"] > some(50)
    assert metrics["kvbm_offload_blocks_d2d"] > some(100)
    assert metrics["kvbm_offload_blocks_d2h"] == 0
    launcher.assert_nothing_held()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_disk_survives_a_restart(
    launcher: Launcher, reference: Reference, tmp_path: Path, policy: str
) -> None:
    """With policy "fail" only what lies verified in host memory is promised: that must not cost the hits."""
    transfer = {**KV_CONNECTOR, "kv_load_failure_policy": policy}
    launcher.start(disk(tmp_path, HOST_BLOCKS), transfer).run(workload())
    launcher.stop()
    engine = launcher.start(disk(tmp_path, HOST_BLOCKS), transfer)
    answers = engine.run(workload())
    assert differences(reference, answers) == []
    metrics = launcher.metrics()
    assert metrics["kvbm_onboard_blocks_d2d"] > some(30)
    assert metrics['kvbm_hit_blocks_total{tier="disk"}'] > some(30)
    launcher.assert_nothing_held()


def test_loading_only_what_is_faster(launcher: Launcher, reference: Reference, tmp_path: Path) -> None:
    """The default, which the other tests switch off to see every load: what is measured decides."""
    engine = launcher.start({**disk(tmp_path, SMALL_HOST_BLOCKS), "DYN_KVBM_ONBOARD": "measured"})
    for turn in ("", "+"):
        assert differences(reference, engine.run(again(workload(), turn)), turn) == []
    metrics = launcher.metrics()
    assert metrics['kvbm_lookups_total{outcome="hit"}'] > some(100)
    assert metrics["kvbm_onboard_blocks_h2d"] + metrics["kvbm_onboard_blocks_d2d"] > 0, (
        "nothing was ever tried"
    )
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


@pytest.mark.timeout(300)  # three processes start, on two cores
def test_two_ranks(launcher: Launcher, reference: Reference, tmp_path: Path) -> None:
    """tensor_parallel_size=2: a block is one shard per rank, and only what both have copied is found."""
    engine = launcher.start(disk(tmp_path, SMALL_HOST_BLOCKS), tensor_parallel_size=2)
    two = engine.run(workload(), bound_s=150.0)  # the ranks spin while they wait for each other
    assert differences(reference, two) == []
    metrics = launcher.metrics()
    assert metrics['kvbm_sessions{role="worker"}'] == 2
    assert metrics["kvbm_onboard_blocks_h2d"] + metrics["kvbm_onboard_blocks_d2d"] > some(50)
    assert metrics["kvbm_onboard_blocks_d2d"] > 0
    launcher.assert_nothing_held()


def test_two_engines_share_a_manager(
    launcher: Launcher, second_launcher: Launcher, reference: Reference, shared_manager: Any
) -> None:
    """The second engine hits what the first one computed; then both are busy at once."""
    manager = shared_manager("--host-blocks", str(HOST_BLOCKS))
    settings = {"DYN_KVBM_MANAGER": manager.socket_path}
    first = launcher.start(settings)
    assert differences(reference, first.run(workload())) == []
    before = manager.metrics()
    second = second_launcher.start(settings)
    engines: tuple[EngineProcess, ...] = (first, second)
    answers = second.run(workload())
    assert differences(reference, answers) == []
    after = manager.metrics()
    assert after["kvbm_engines"] == 2
    assert after["kvbm_onboard_blocks_h2d"] - before["kvbm_onboard_blocks_h2d"] > some(200)
    # Little is stored again: the keys of both engines are the same.
    stored = after["kvbm_offload_blocks_d2h"] - before["kvbm_offload_blocks_d2h"]
    assert stored < before["kvbm_offload_blocks_d2h"] / 4
    for engine in engines:
        engine.send(_run_again, "+")
    for engine in engines:
        assert differences(reference, engine.receive(100.0), "+") == []


@pytest.mark.quick
def test_engine_killed_beside_another(
    launcher: Launcher, second_launcher: Launcher, reference: Reference, shared_manager: Any
) -> None:
    """kill -9 of an engine: what it held is given back, what it stored stays for the other one."""
    manager = shared_manager("--host-blocks", str(HOST_BLOCKS))
    settings = {"DYN_KVBM_MANAGER": manager.socket_path}
    victim = second_launcher.start(settings)
    survivor = launcher.start(settings)
    victim.send(_run_again, "+")
    wait_for(lambda: manager.metrics()["kvbm_offload_blocks_d2h"] > some(100), 60.0, "nothing is stored")
    victim.kill()
    assert differences(reference, survivor.run(workload())) == []
    metrics = manager.metrics()
    assert metrics["kvbm_onboard_blocks_h2d"] > some(100)
    wait_for(lambda: manager.metrics()["kvbm_engines"] == 1, 20.0, "the killed engine stays")
    for series in ('kvbm_leased_blocks{tier="host"}', 'kvbm_pool_blocks{tier="host",state="filling"}'):
        wait_for(lambda series=series: manager.metrics()[series] == 0, 20.0, f"{series} stays")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_come_back_as_they_were(launcher: Launcher, tmp_path: Path, dtype: str) -> None:
    """What is loaded into a device block is, bit for bit, what some device block held when it was stored."""
    engine = launcher.start(disk(tmp_path, SMALL_HOST_BLOCKS), dtype=dtype)
    engine.call(reach.audit_copies, timeout_s=20.0)
    engine.run(workload())
    engine.run(again(workload(), "+"))
    compared, different = engine.call(reach.audit_result, timeout_s=20.0)
    assert compared > some(200)
    assert different == 0
    assert launcher.metrics()["kvbm_onboard_blocks_d2d"] > some(20)


def _run_again(child: Child, suffix: str) -> Answers:
    assert child.engine is not None
    return child.engine.run(again(workload(), suffix), timeout_s=180.0)

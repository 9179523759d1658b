"""Models with several KV cache groups: the text of an engine that never evicts, whichever tiers there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import reach
from engine.engine_child import KV_CONNECTOR
from engine.hybrid_models import HYBRID_DEVICE_BLOCKS, HybridModel
from engine.launcher import Launcher, differences
from engine.tier_settings import disk, host
from engine.vllm_versions import VERSION
from engine.workload import again, workload
from rigs.manager_probe import flip_bits

pytestmark = [
    pytest.mark.skipif(VERSION < (0, 32), reason="this vLLM cannot report failed loads of several groups"),
]

HOST_BLOCKS = 1200
SMALL_HOST_BLOCKS = 120
BLOCK_BYTES = 65_536
NOTHING = {"requests": 0, "lookups": 0, "stores": 0}

Start = Callable[..., Any]


@pytest.fixture
def start(launcher: Launcher, hybrid_model: HybridModel, references: Any) -> Start:
    """Starts an engine of one of the models on a device that is too small."""

    def started(kind: str, environment: dict[str, str], **options: Any) -> Any:
        references(kind)  # in the same process, so before
        return launcher.start(
            environment,
            model=str(hybrid_model(kind)),
            num_gpu_blocks_override=options.pop("num_gpu_blocks_override", HYBRID_DEVICE_BLOCKS),
            **options,
        )

    return started


@pytest.mark.parametrize("kind", [pytest.param("windows", marks=pytest.mark.quick), "mostly full"])
def test_host(launcher: Launcher, start: Start, references: Any, kind: str) -> None:
    engine = start(kind, host(HOST_BLOCKS))
    answers = engine.run(workload())
    assert differences(references(kind), answers) == []
    assert answers.preempted > 0
    assert differences(references(kind), engine.run(again(workload(), "+")), "+") == []
    metrics = launcher.metrics()
    assert metrics["kvbm_onboard_blocks_h2d"] > 300
    assert metrics['kvbm_failures_total{tier="host",kind="load"}'] == 0
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


def test_wrong_kv_is_noticed(start: Start, references: Any) -> None:
    """The negative control."""
    engine = start("windows", host(HOST_BLOCKS))
    engine.call(reach.scribble_over_slots, timeout_s=20.0)
    assert len(differences(references("windows"), engine.run(workload()))) > 10


def test_host_that_evicts_and_disk(launcher: Launcher, start: Start, references: Any, tmp_path: Path) -> None:
    """Blocks of all groups pass through a small host tier to disk, survive a restart, and are verified."""
    for turn in ("first", "restarted"):
        engine = start("windows", disk(tmp_path, SMALL_HOST_BLOCKS))
        assert differences(references("windows"), engine.run(workload())) == [], turn
        metrics = launcher.metrics()
        assert metrics['kvbm_failures_total{tier="disk",kind="corrupt"}'] == 0
        assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
        launcher.assert_nothing_held()
        launcher.stop()
    assert metrics["kvbm_onboard_blocks_d2d"] > 50
    assert flip_bits(tmp_path, stride_bytes=2 * BLOCK_BYTES, offset_bytes=1234) > 50
    engine = start("windows", disk(tmp_path, SMALL_HOST_BLOCKS))
    assert differences(references("windows"), engine.run(workload())) == []
    assert launcher.metrics()['kvbm_failures_total{tier="disk",kind="corrupt"}'] > 10
    launcher.assert_nothing_held()


def test_disk_without_host(launcher: Launcher, start: Start, references: Any, tmp_path: Path) -> None:
    engine = start("windows", disk(tmp_path))
    for turn in ("", "+"):
        assert differences(references("windows"), engine.run(again(workload(), turn)), turn) == []
    assert launcher.metrics()["kvbm_onboard_blocks_d2d"] > 50
    launcher.assert_nothing_held()


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
@pytest.mark.parametrize("every", [1, 2])
def test_loads_that_fail(
    launcher: Launcher, start: Start, references: Any, tmp_path: Path, every: int
) -> None:
    """A part of a load is of no use: the whole request is computed."""
    engine = start("windows", disk(tmp_path, SMALL_HOST_BLOCKS))
    engine.call(reach.fail_loads, every, timeout_s=20.0)
    for turn in ("", "+"):
        assert differences(references("windows"), engine.run(again(workload(), turn)), turn) == []
    metrics = launcher.metrics()
    failed = sum(metrics[f'kvbm_failures_total{{tier="{tier}",kind="load"}}'] for tier in ("host", "disk"))
    assert failed > 20
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
def test_loads_that_fail_under_policy_fail(start: Start, references: Any) -> None:
    """Such a request ends early, by its user's choice; none gets a wrong token, none hangs."""
    engine = start("windows", host(HOST_BLOCKS), transfer={**KV_CONNECTOR, "kv_load_failure_policy": "fail"})
    requests = [request for request in workload() if not request.parent]
    engine.run(requests)
    engine.call(reach.reset, connector=False, timeout_s=20.0)
    engine.call(reach.fail_loads, 3, timeout_s=20.0)
    answers = engine.run(again(requests, "+"))
    for request in requests:
        if request.abort_after is None:
            right, given = references("windows")[request.name], answers.outputs[request.name + "+"]
            ended = request.name + "+" in answers.failed
            assert given == (right[: len(given)] if ended else right)
    assert 0 < len(answers.failed) < len(answers.outputs)
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
def test_two_ranks(launcher: Launcher, start: Start, references: Any, tmp_path: Path) -> None:
    """One of two ranks fails at every second load: the other's part is of no use then."""
    engine = start("windows", disk(tmp_path, SMALL_HOST_BLOCKS), tensor_parallel_size=2)
    for turn in ("", "+"):
        assert differences(references("windows"), engine.run(again(workload(), turn)), turn) == []
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > 100
    engine.call(reach.fail_loads_of_rank, 1, 2, timeout_s=20.0)
    assert differences(references("windows"), engine.run(again(workload(), "!")), "!") == []
    assert launcher.metrics()['kvbm_failures_total{tier="host",kind="load"}'] > 0
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


def test_manager_killed_while_serving(
    launcher: Launcher, start: Start, references: Any, tmp_path: Path
) -> None:
    engine = start("windows", disk(tmp_path, SMALL_HOST_BLOCKS))
    for turn in range(2):
        requests = again(workload(), f"+{turn}")
        answers, _ = engine.call(reach.run_and_kill, requests, [15, 60], timeout_s=180.0)
        assert differences(references("windows"), answers, f"+{turn}") == []
        engine.call(reach.wait_until_ready, timeout_s=40.0)
    assert differences(references("windows"), engine.run(again(workload(), "+end")), "+end") == []
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


def test_stores_beside_later_steps(launcher: Launcher, start: Start, references: Any) -> None:
    """As on a GPU: the engine waits for copies of blocks that leave their window before it overwrites them."""
    engine = start("windows", host(HOST_BLOCKS))
    engine.call(reach.store_beside, 0.01, timeout_s=20.0)
    assert differences(references("windows"), engine.run(workload())) == []
    engine.call(reach.audit_copies, timeout_s=20.0)
    assert differences(references("windows"), engine.run(again(workload(), "+")), "+") == []
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > 100
    assert engine.call(reach.stores_waited_for, timeout_s=20.0) > 0
    launcher.assert_nothing_held()


def test_abort_while_loading(launcher: Launcher, start: Start, references: Any) -> None:
    engine = start("windows", host(HOST_BLOCKS))
    engine.run(workload())
    engine.call(reach.reset, connector=False, timeout_s=20.0)
    engine.call(reach.gate_loads, timeout_s=20.0)
    first_turns = [request for request in again(workload(), "!") if not request.parent][:8]
    assert engine.call(reach.abort_while_loading, first_turns, False, timeout_s=60.0) > 0
    engine.call(reach.open_gate, timeout_s=20.0)
    engine.call(reach.step_idle, 20, timeout_s=20.0)
    assert differences(references("windows"), engine.run(again(workload(), "+")), "+") == []
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()

"""The engine plans a step before it knows the last one's tokens, as it does on CUDA: the same answers in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import ahead, reach
from engine.engine_child import KV_CONNECTOR
from engine.hybrid_models import HYBRID_DEVICE_BLOCKS, HybridModel
from engine.launcher import Launcher, differences
from engine.model_runners import V1, chosen
from engine.tier_settings import SMALL_HOST_BLOCKS, disk, host
from engine.vllm_versions import VERSION
from engine.workload import again, some, workload

MODES = {
    "before the step": {},
    "layer by layer": {"DYN_KVBM_ONBOARD_MODE": "layerwise"},
}
FAIL = {"kv_load_failure_policy": "fail"}
NOTHING = {"requests": 0, "lookups": 0, "stores": 0}

Reference = dict[str, list[int]]


@pytest.fixture
def ahead_launcher(launcher: Launcher) -> Iterator[Launcher]:
    """Its engines schedule ahead."""
    with ahead.scheduling_ahead(launcher.process):
        yield launcher


@pytest.mark.parametrize("mode", list(MODES))
def test_scheduled_ahead(ahead_launcher: Launcher, reference: Reference, tmp_path: Path, mode: str) -> None:
    launcher = ahead_launcher
    # Layer by layer is refused where failures are recomputed, see below.
    policy = FAIL if mode == "layer by layer" else {}
    engine = launcher.start(
        {**disk(tmp_path, SMALL_HOST_BLOCKS), **MODES[mode]}, transfer={**KV_CONNECTOR, **policy}
    )
    assert engine.call(ahead.steps_in_flight, timeout_s=20.0) == 2
    engine.call(reach.count_layers, timeout_s=20.0)
    for turn in ("", "+"):
        answers = engine.run(again(workload(), turn))
        assert differences(reference, answers, turn) == []
    assert (engine.call(reach.layers_counted, timeout_s=20.0)[1] > 0) == (mode == "layer by layer")
    assert answers.preempted > 0
    metrics = launcher.metrics()
    assert metrics["kvbm_onboard_blocks_h2d"] > some(100)
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
def test_loads_fail_and_are_recomputed(ahead_launcher: Launcher, reference: Reference) -> None:
    """The next step was planned before this one's loads were known to have failed."""
    launcher = ahead_launcher
    engine = launcher.start(host())
    engine.call(reach.fail_loads, 5, timeout_s=20.0)
    for turn in ("", "+", "++"):
        assert differences(reference, engine.run(again(workload(), turn)), turn) == []
    assert launcher.metrics()['kvbm_failures_total{tier="host",kind="load"}'] > 0
    launcher.assert_nothing_held()


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
def test_layers_fail_and_so_do_their_requests_alone(ahead_launcher: Launcher, reference: Reference) -> None:
    launcher = ahead_launcher
    engine = launcher.start({**host(), **MODES["layer by layer"]}, transfer={**KV_CONNECTOR, **FAIL})
    engine.call(reach.count_layers, timeout_s=20.0)
    engine.call(reach.fail_loads, 40, timeout_s=20.0)
    failed = 0
    for turn in ("", "+", "++"):
        answers = engine.run(again(workload(), turn))
        assert {name + turn for name in differences(reference, answers, turn)} == answers.failed
        failed += len(answers.failed)
    assert 0 < failed < 3 * len(reference)
    assert engine.call(reach.layers_counted, timeout_s=20.0)[1] > some(100)
    launcher.assert_nothing_held()


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
def test_layer_by_layer_is_refused_where_a_failure_would_be_recomputed(
    ahead_launcher: Launcher, reference: Reference
) -> None:
    """vLLM would read a token that was never computed: it crashes, or says what nobody computed."""
    launcher = ahead_launcher
    engine = launcher.start({**host(), **MODES["layer by layer"]})
    assert "loaded before their requests, not layer by layer" in engine.log()
    engine.call(reach.count_layers, timeout_s=20.0)
    engine.call(reach.fail_loads, 5, timeout_s=20.0)
    for turn in ("", "+"):
        assert differences(reference, engine.run(again(workload(), turn)), turn) == []
    whole, by_layer = engine.call(reach.layers_counted, timeout_s=20.0)
    assert whole > some(20)
    assert by_layer == 0


def test_stores_beside_steps_that_were_planned_ahead(ahead_launcher: Launcher, reference: Reference) -> None:
    launcher = ahead_launcher
    engine = launcher.start(host())
    engine.call(reach.store_beside, 0.03, timeout_s=20.0)
    for turn in ("", "+"):
        assert differences(reference, engine.run(again(workload(), turn)), turn) == []
    assert engine.call(reach.stores_waited_for, timeout_s=20.0) > 0
    launcher.assert_nothing_held()


@pytest.mark.skipif(VERSION < (0, 32), reason="this vLLM serves no model with several groups")
@pytest.mark.skipif(chosen() != V1, reason="too slow on V2 here")
def test_windows_scheduled_ahead(
    ahead_launcher: Launcher, hybrid_model: HybridModel, references: Any, tmp_path: Path
) -> None:
    """Blocks leave their window a step before it is known what that step gave."""
    expected = references("windows")
    engine = ahead_launcher.start(
        disk(tmp_path, 3 * SMALL_HOST_BLOCKS),
        model=str(hybrid_model("windows")),
        num_gpu_blocks_override=HYBRID_DEVICE_BLOCKS,
    )
    assert engine.call(ahead.steps_in_flight, timeout_s=20.0) == 2
    for turn in ("", "+"):
        assert differences(expected, engine.run(again(workload(), turn)), turn) == []
    assert ahead_launcher.metrics()["kvbm_onboard_blocks_h2d"] > 100
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    ahead_launcher.assert_nothing_held()

"""Pipeline parallel: each stage has the KV of its own layers, and a block is one shard for each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import pipeline, reach
from engine.conftest import ProcessOf, engine_answers
from engine.engine_process import EngineProcess
from engine.hybrid_models import HybridModel
from engine.launcher import Launcher, differences
from engine.model_runners import V1, chosen
from engine.tier_settings import HOST_BLOCKS, SMALL_HOST_BLOCKS, disk, host
from engine.vllm_versions import VERSION
from engine.workload import again, small_workload, workload

pytestmark = [
    pytest.mark.skipif(VERSION < (0, 32), reason="older releases were not tried on a CPU"),
    pytest.mark.skipif(chosen() != V1, reason="on a CPU stages are run on V1"),
    pytest.mark.timeout(300),  # processes for each stage, on few cores
]

NOTHING = {"requests": 0, "lookups": 0, "stores": 0}


@pytest.fixture
def start(launcher: Launcher) -> Callable[..., EngineProcess]:
    """Starts an engine of two stages on a device that is too small."""

    def started(environment: dict[str, str], **options: Any) -> EngineProcess:
        engine = launcher.start(environment, pipeline_parallel_size=2, **options)
        engine.call(pipeline.make_room_between_stages, timeout_s=20.0)
        return engine

    return started


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
def test_two_stages(
    launcher: Launcher, start: Callable[..., Any], reference: dict[str, list[int]], tmp_path: Path
) -> None:
    """Then one of the stages fails at every second load: the other's part is of no use."""
    engine = start(disk(tmp_path, SMALL_HOST_BLOCKS))
    for turn in ("", "+"):
        answers = engine.run(again(workload(), turn))
        assert len(answers.outputs) >= 96
        assert differences(reference, answers, turn) == []
    metrics = launcher.metrics()
    assert metrics['kvbm_sessions{role="worker"}'] == 2
    assert metrics["kvbm_onboard_blocks_h2d"] + metrics["kvbm_onboard_blocks_d2d"] > 100
    assert metrics["kvbm_onboard_blocks_d2d"] > 0
    engine.call(reach.fail_loads_of_rank, 1, 2, timeout_s=20.0)
    assert differences(reference, engine.run(again(workload(), "!")), "!") == []
    assert launcher.metrics()['kvbm_failures_total{tier="host",kind="load"}'] > 0
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


def test_a_stage_with_wrong_kv_is_noticed(
    launcher: Launcher, start: Callable[..., Any], reference: dict[str, list[int]]
) -> None:
    """The negative control: the second stage's layers count."""
    engine = start(host())
    engine.call(reach.scribble_in_rank, 1, timeout_s=20.0)
    assert len(differences(reference, engine.run(workload()))) > 10


def test_stages_of_different_sizes_and_several_groups(
    launcher: Launcher,
    start: Callable[..., Any],
    process_of: ProcessOf,
    hybrid_model: HybridModel,
) -> None:
    """Four of six layers are in the first stage: in the tiers its shard is as large as the other's."""
    directory = hybrid_model("windows")
    expected = engine_answers(process_of(f"engine-{chosen()}", chosen()), directory, small_workload())
    engine = start(
        {**host(1200), "VLLM_PP_LAYER_PARTITION": "4,2"}, model=str(directory), num_gpu_blocks_override=100
    )
    small, large = sorted(engine.call(pipeline.shard_bytes, timeout_s=20.0))
    assert small < large
    for turn in ("", "+"):
        assert differences(expected, engine.run(again(small_workload(), turn)), turn) == []
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > 50
    launcher.assert_nothing_held()


@pytest.mark.timeout(300)
def test_two_stages_of_two_ranks(
    launcher: Launcher, start: Callable[..., Any], v1_reference: dict[str, list[int]]
) -> None:
    engine = start(host(HOST_BLOCKS), tensor_parallel_size=2)
    for turn in ("", "+"):
        assert differences(v1_reference, engine.run(again(small_workload(), turn)), turn) == []
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > 50
    assert launcher.metrics()['kvbm_sessions{role="worker"}'] == 4

"""Real engines with KVBM's copies for CUDA, on the stand-in for a driver: copies run beside steps and end late.

The answers are those of an engine that never evicts. The controls let the engine go on without its copies, which shows.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from engine import ahead, over_cuda, reach
from engine.engine_child import KV_CONNECTOR
from engine.engine_process import EngineFailed, EngineProcess
from engine.launcher import Launcher, differences
from engine.model_runners import V1, chosen, runs_v2
from engine.tier_settings import host
from engine.workload import again, small_workload

LATE_S = {"batch": 0.1, "rows": 0.02}
"""How long a call's copies take, by method: a batch takes several steps, and rows are many calls behind one another."""
HANGS_S = 0.5
TURNS = ("", "+")
FAIL = {**KV_CONNECTOR, "kv_load_failure_policy": "fail"}
NOTHING = {"requests": 0, "lookups": 0, "stores": 0}

Reference = dict[str, list[int]]
pytestmark = pytest.mark.timeout(600)
runs_v1 = pytest.mark.skipif(chosen() != V1, reason="too slow on V2 here")


def start(launcher: Launcher, method: str, *, layerwise: bool) -> EngineProcess:
    """An engine that copies by that method, and layer by layer if that is asked for."""
    mode = "layerwise" if layerwise else "async"
    engine = launcher.start(
        {**host(), "DYN_KVBM_CUDA_COPY": method, "DYN_KVBM_ONBOARD_MODE": mode},
        transfer=FAIL if layerwise else KV_CONNECTOR,
    )
    assert engine.call(over_cuda.copier_of, timeout_s=20.0) == "CudaCopier"
    return engine


def ask(engine: EngineProcess, reference: Reference) -> list[str]:
    """Ask everything twice; the requests whose answers differ."""
    return [
        name
        for turn in TURNS
        for name in differences(reference, engine.run(again(small_workload(), turn)), turn)
    ]


def check_device(engine: EngineProcess) -> None:
    """Copies went through the device, without violations."""
    copied, violations = engine.call(over_cuda.device_seen, timeout_s=20.0)
    assert copied > 300
    assert violations == []


def check_late_copies(
    launcher: Launcher, reference: Reference, library: Path, method: str, *, layerwise: bool
) -> None:
    """The engine's answers, while each call's copies take up to `LATE_S`."""
    with over_cuda.on_cuda(launcher.process, library, LATE_S[method]):
        engine = start(launcher, method, layerwise=layerwise)
        engine.call(reach.count_layers, timeout_s=20.0)
        assert ask(engine, reference) == []
        check_device(engine)
        assert (engine.call(reach.layers_counted, timeout_s=20.0)[1] > 0) == layerwise
        metrics = launcher.metrics()
        assert metrics["kvbm_onboard_blocks_h2d"] > 50
        assert metrics["kvbm_offload_blocks_d2h"] > 50
        assert metrics['kvbm_failures_total{tier="host",kind="load"}'] == 0
        assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
        launcher.assert_nothing_held()


@runs_v1
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layers"])
@pytest.mark.parametrize("method", ["batch", "rows"])
@pytest.mark.parametrize("scheduled", ["in turn", "ahead"])
def test_late_copies(
    launcher: Launcher,
    v1_reference: Reference,
    libcuda_path: Path,
    scheduled: str,
    method: str,
    layerwise: bool,
) -> None:
    context: Any = ahead.scheduling_ahead(launcher.process) if scheduled == "ahead" else nullcontext()
    with context:
        check_late_copies(launcher, v1_reference, libcuda_path, method, layerwise=layerwise)


@runs_v2
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layers"])
def test_late_copies_on_v2(
    v2_launcher: Launcher, v2_reference: Reference, libcuda_path: Path, layerwise: bool
) -> None:
    check_late_copies(v2_launcher, v2_reference, libcuda_path, "batch", layerwise=layerwise)


@pytest.mark.swallows("^CudaError: cuMemcpyBatchAsync .*CUDA_ERROR_INVALID_VALUE")
@runs_v1
def test_copies_that_fail(launcher: Launcher, v1_reference: Reference, libcuda_path: Path) -> None:
    """The driver refuses batches, some of which it has begun: they are computed again, or not kept."""
    with over_cuda.on_cuda(launcher.process, libcuda_path, LATE_S["batch"]):
        engine = start(launcher, "batch", layerwise=False)
        engine.call(over_cuda.fail_by_chance, "batch", 0.1, timeout_s=20.0)
        assert ask(engine, v1_reference) == []
        check_device(engine)
        assert launcher.metrics()['kvbm_failures_total{tier="host",kind="load"}'] > 0
        launcher.assert_nothing_held()


@runs_v1
def test_stores_that_hang_cost_the_cache_alone(
    launcher: Launcher, v1_reference: Reference, libcuda_path: Path
) -> None:
    with over_cuda.on_cuda(launcher.process, libcuda_path, LATE_S["batch"]):
        engine = start(launcher, "batch", layerwise=False)
        engine.call(over_cuda.stop_copies, HANGS_S, timeout_s=20.0)
        assert ask(engine, v1_reference) == []
        assert "KVBM is off in this rank from now on: a store has not ended" in engine.log()


@runs_v1
def test_a_load_that_hangs_ends_the_engine(
    launcher: Launcher, v1_reference: Reference, libcuda_path: Path
) -> None:
    with over_cuda.on_cuda(launcher.process, libcuda_path, LATE_S["batch"]):
        engine = start(launcher, "batch", layerwise=False)
        assert differences(v1_reference, engine.run(small_workload())) == []
        engine.call(over_cuda.stop_copies, HANGS_S, timeout_s=20.0)
        with pytest.raises(EngineFailed, match="KVBM ends this engine: a load has not ended"):
            engine.run(again(small_workload(), "+"))


@runs_v1
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layers"])
@pytest.mark.parametrize("fault", over_cuda.FAULTS)
def test_control_an_engine_that_does_not_wait(
    launcher: Launcher, v1_reference: Reference, libcuda_path: Path, fault: str, layerwise: bool
) -> None:
    with over_cuda.on_cuda(launcher.process, libcuda_path, LATE_S["batch"], fault):
        assert ask(start(launcher, "batch", layerwise=layerwise), v1_reference) != []

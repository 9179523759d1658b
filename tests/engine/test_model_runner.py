"""Model Runner V2, which vLLM takes on CUDA, with KVBM: the answers of V2 alone, which are those of V1.

`KVBM_TESTS_RUNNER=V2` runs the other engine tests on it as well; `make test-all` runs those of this file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import call_order, reach
from engine.engine_child import KV_CONNECTOR
from engine.launcher import Launcher, differences
from engine.model_runners import V2, runs_v2
from engine.tier_settings import SMALL_HOST_BLOCKS, disk, host
from engine.workload import again, small_workload

LAYERWISE = {"DYN_KVBM_ONBOARD_MODE": "layerwise"}
NOTHING = {"requests": 0, "lookups": 0, "stores": 0}

BEFORE = ("update_requests", "handle_preemptions", "bind_connector_metadata")
AFTER = (
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)

Reference = dict[str, list[int]]
# Two processes of engines may have to start first.
pytestmark = [runs_v2, pytest.mark.timeout(300)]


def test_both_runners_say_the_same(v1_reference: Reference, v2_reference: Reference) -> None:
    assert v1_reference == v2_reference


def test_host(v2_launcher: Launcher, v2_reference: Reference) -> None:
    engine = v2_launcher.start(host())
    assert engine.call(reach.model_runners, timeout_s=20.0) == (V2, V2)
    answers = engine.run(small_workload())
    assert differences(v2_reference, answers) == []
    assert answers.preempted > 0
    assert differences(v2_reference, engine.run(again(small_workload(), "+")), "+") == []
    metrics = v2_launcher.metrics()
    assert metrics["kvbm_onboard_blocks_h2d"] > 50
    assert metrics["kvbm_offload_blocks_d2h"] > 50
    assert metrics['kvbm_failures_total{tier="host",kind="load"}'] == 0
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    v2_launcher.assert_nothing_held()


def test_host_and_disk_and_a_restart(v2_launcher: Launcher, v2_reference: Reference, tmp_path: Path) -> None:
    engine = v2_launcher.start(disk(tmp_path, SMALL_HOST_BLOCKS))
    assert engine.call(reach.model_runners, timeout_s=20.0) == (V2, V2)
    assert differences(v2_reference, engine.run(small_workload())) == []
    v2_launcher.stop()
    engine = v2_launcher.start(disk(tmp_path, SMALL_HOST_BLOCKS))
    assert differences(v2_reference, engine.run(small_workload())) == []
    metrics = v2_launcher.metrics()
    assert metrics["kvbm_onboard_blocks_d2d"] > 20
    assert metrics['kvbm_failures_total{tier="disk",kind="corrupt"}'] == 0
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    v2_launcher.assert_nothing_held()


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
def test_loads_that_fail(v2_launcher: Launcher, v2_reference: Reference) -> None:
    """They are computed again, and so none runs beside its forward pass, though that was asked for."""
    engine = v2_launcher.start({**host(), **LAYERWISE})
    assert "loaded before their requests, not layer by layer" in engine.log()
    engine.call(reach.count_layers, timeout_s=20.0)
    engine.call(reach.fail_loads, 3, timeout_s=20.0)
    for turn in ("", "+"):
        assert differences(v2_reference, engine.run(again(small_workload(), turn)), turn) == []
    metrics = v2_launcher.metrics()
    assert metrics['kvbm_failures_total{tier="host",kind="load"}'] > 5
    assert metrics["kvbm_onboard_blocks_h2d"] > 20
    assert engine.call(reach.layers_counted, timeout_s=20.0)[1] == 0
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    v2_launcher.assert_nothing_held()


def test_the_order_of_a_step(v2_launcher: Launcher, v2_reference: Reference) -> None:
    """What is written in `kvbm.vllm_integration.runner`: a vLLM that calls otherwise has to be read again.

    Loads run beside the forward pass here, where failures end their requests.
    """
    transfer = {**KV_CONNECTOR, "kv_load_failure_policy": "fail"}
    engine = v2_launcher.start({**host(), **LAYERWISE}, transfer=transfer)
    engine.call(reach.count_layers, timeout_s=20.0)
    engine.call(call_order.note_calls, timeout_s=20.0)
    for turn in ("", "+"):
        assert differences(v2_reference, engine.run(again(small_workload(), turn)), turn) == []
    assert engine.call(call_order.orders_noted, timeout_s=20.0) == {
        # Loads before their requests, or none: begun after sampling.
        (*BEFORE, "forward", "sample", "start_load_kv", *AFTER),
        # Loads beside the forward pass.
        (*BEFORE, "start_load_kv", "forward", "sample", *AFTER),
        # Nothing to compute.
        (*BEFORE, "start_load_kv", *AFTER),
    }
    whole, by_layer = engine.call(reach.layers_counted, timeout_s=20.0)
    assert whole > 0
    assert by_layer > 10

"""Loads beside the forward pass, stores beside later steps: the same answers throughout."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from engine import reach, young_pins
from engine.engine_child import KV_CONNECTOR
from engine.launcher import Launcher, differences
from engine.model_runners import V2, chosen
from engine.tier_settings import SMALL_HOST_BLOCKS, disk, host
from engine.workload import BLOCK_TOKENS, Request, again, random_tokens, some, workload

LAYERWISE = {"DYN_KVBM_ONBOARD_MODE": "layerwise"}
NOTHING = {"requests": 0, "lookups": 0, "stores": 0}

Reference = dict[str, list[int]]


def test_layer_by_layer(launcher: Launcher, reference: Reference, tmp_path: Path) -> None:
    """What lies in host memory is loaded beside the forward pass; what comes from disk, or fills the prompt, before."""
    # V2 has such loads only where failures are not recomputed.
    policy = {"kv_load_failure_policy": "fail"} if chosen() == V2 else {}
    engine = launcher.start(
        {**disk(tmp_path, SMALL_HOST_BLOCKS), **LAYERWISE}, transfer={**KV_CONNECTOR, **policy}
    )
    engine.call(reach.count_layers, timeout_s=20.0)
    answers = engine.run(workload())
    assert differences(reference, answers) == []
    assert differences(reference, engine.run(again(workload(), "+")), "+") == []
    whole, by_layer = engine.call(reach.layers_counted, timeout_s=20.0)
    # How many is the disk's doing (19 and 20 were seen); that both kinds occur is what makes the comparison one.
    assert whole > some(5)
    assert by_layer > some(100)
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING
    launcher.assert_nothing_held()


@pytest.mark.swallows("^RuntimeError: injected: this copy fails")
@pytest.mark.skipif(chosen() == V2, reason="V2 has no such loads where failures are recomputed")
def test_layer_by_layer_with_failures(launcher: Launcher, reference: Reference) -> None:
    """What was computed on top of a layer that did not come is computed again, and nothing of it is kept."""
    engine = launcher.start({**host(), **LAYERWISE})
    engine.call(reach.fail_loads, 7, timeout_s=20.0)
    for turn in ("", "+", "++"):
        assert differences(reference, engine.run(again(workload(), turn)), turn) == []
    assert launcher.metrics()['kvbm_failures_total{tier="host",kind="load"}'] > 0
    launcher.assert_nothing_held()


def test_stores_beside_later_steps(launcher: Launcher, reference: Reference) -> None:
    """As on a GPU: the engine goes on while blocks are copied, and waits only before it overwrites them."""
    engine = launcher.start(host())
    engine.call(reach.store_beside, 0.03, timeout_s=20.0)
    assert differences(reference, engine.run(workload())) == []
    engine.call(reach.audit_copies, timeout_s=20.0)
    assert differences(reference, engine.run(again(workload(), "+")), "+") == []
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > some(100)
    assert engine.call(reach.stores_waited_for, timeout_s=20.0) > 0
    launcher.assert_nothing_held()


def test_a_layout_that_the_backend_cannot_read_is_only_a_wish(
    launcher: Launcher, reference: Reference
) -> None:
    """vLLM's attention on a CPU reads one layout: it says so and goes on, and so do we."""
    engine = launcher.start({**host(), "DYN_KVBM_KV_LAYOUT": "block"})
    assert differences(reference, engine.run(workload())) == []
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > some(20)
    launcher.assert_nothing_held()


@pytest.mark.parametrize(
    ("variable", "value", "piecewise", "layout"),
    [
        ("DYN_KVBM_ONBOARD_MODE", "async", False, None),
        ("DYN_KVBM_ONBOARD_MODE", "layerwise", True, None),
        ("DYN_KVBM_KV_LAYOUT", "block", False, "BLNHC"),
        ("DYN_KVBM_KV_LAYOUT", "engine", False, None),
    ],
)
def test_what_is_asked_of_vllm_before_there_is_a_connector(
    launcher: Launcher, variable: str, value: str, piecewise: bool, layout: str | None
) -> None:
    assert launcher.process.call(reach.asked_of_vllm, variable, value, timeout_s=60.0) == (
        piecewise,
        layout if reach.knows_layouts() else None,
    )


def beside_pins() -> list[Request]:
    """One request that ends soon, and three that need its blocks once they have answered half."""
    source = random.Random(7)
    asked = [Request("short", random_tokens(source, 8 * BLOCK_TOKENS), 1)]
    return asked + [
        Request(f"long{i}", random_tokens(source, 17 * BLOCK_TOKENS), 3 * BLOCK_TOKENS) for i in range(3)
    ]


BESIDE_PINS_BLOCKS = 65
"""An eighth of them may be pinned, and the long requests take 60 in the end."""
tells_of_pins = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "has_pending_block_frees"), reason="vLLM asks for pins from 0.30 on"
)


@tells_of_pins
def test_nothing_is_preempted_for_blocks_that_are_about_to_come_back(launcher: Launcher) -> None:
    engine = launcher.start(host(), num_gpu_blocks_override=BESIDE_PINS_BLOCKS)
    answers, full_steps = engine.call(young_pins.run_beside_pins, beside_pins(), True, timeout_s=180.0)
    assert (len(answers.outputs), answers.preempted, full_steps) == (4, 0, young_pins.FULL_STEPS)
    assert engine.call(reach.open_business, timeout_s=20.0) == NOTHING


@tells_of_pins
def test_control_a_request_is_preempted_where_vllm_is_not_told_of_pins(launcher: Launcher) -> None:
    engine = launcher.start(host(), num_gpu_blocks_override=BESIDE_PINS_BLOCKS)
    answers, full_steps = engine.call(young_pins.run_beside_pins, beside_pins(), False, timeout_s=180.0)
    assert answers.preempted > 0
    assert full_steps < young_pins.FULL_STEPS

"""How vLLM meets us: by name, among other connectors, in its metrics."""

from __future__ import annotations

from engine import reach
from engine.engine_child import KV_CONNECTOR
from engine.launcher import Launcher, differences
from engine.tier_settings import host
from engine.vllm_versions import splits_hits_by_source
from engine.workload import some, workload

Reference = dict[str, list[int]]
BY_NAME = {name: value for name, value in KV_CONNECTOR.items() if name != "kv_connector_module_path"}


def test_by_name(launcher: Launcher, reference: Reference) -> None:
    """The entry point makes the name known: no module path. vLLM counts our hits as external."""
    engine = launcher.start(host(), BY_NAME)
    assert differences(reference, engine.run(workload())) == []
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > some(100)
    counted = engine.call(reach.engine_metrics, timeout_s=20.0)
    assert counted["vllm:external_prefix_cache_hits"] > some(1000)
    assert counted["vllm:kvbm_loaded_host_blocks"] > some(100)
    assert counted["vllm:num_preemptions"] > 0


@splits_hits_by_source
def test_hits_by_source(launcher: Launcher, reference: Reference) -> None:
    engine = launcher.start(host(), BY_NAME)
    assert differences(reference, engine.run(workload())) == []
    counted = engine.call(reach.engine_metrics, timeout_s=20.0)
    sources = {name: value for name, value in counted.items() if "cached_by_source" in name}
    assert sources["vllm:prompt_tokens_cached_by_source/host"] > some(1000), sources
    assert sources["vllm:prompt_tokens_cached_by_source/device"] > 0
    assert sum(sources.values()) == counted["vllm:prompt_tokens_cached"]


def test_inside_a_multi_connector(launcher: Launcher, reference: Reference) -> None:
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [BY_NAME]},
    }
    engine = launcher.start(host(), transfer)
    assert differences(reference, engine.run(workload())) == []
    assert launcher.metrics()["kvbm_onboard_blocks_h2d"] > some(100)
    counted = engine.call(reach.engine_metrics, timeout_s=20.0)
    assert counted["vllm:external_prefix_cache_hits"] > some(1000)
    assert counted["vllm:kvbm_loaded_host_blocks"] > some(100)

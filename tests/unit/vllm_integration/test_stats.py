"""KVBM's part of vLLM's /metrics and of its log line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the statistics are vLLM's; vllm is not installed")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvbm.block import Tier
from kvbm.protocol import UNLOADED_REASONS
from kvbm.vllm_integration.stats import COUNTERS, Counted, KvbmPromMetrics, KvbmStats, build


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> KvbmPromMetrics:
    def counter(**arguments: Any) -> Counter:
        return Counter(**arguments, registry=registry)

    types = {Gauge: Gauge, Counter: counter, Histogram: Histogram}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    return KvbmPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_what_was_not_loaded_is_reported_once_by_reason_and_zeros_are_left_out() -> None:
    leader: Any = SimpleNamespace(
        lookups=SimpleNamespace(
            loaded_blocks={Tier.HOST: 0, Tier.DISK: 0, Tier.REMOTE: 0},
            failed_blocks=0,
            unloaded=dict.fromkeys(UNLOADED_REASONS, 0),
        ),
    )
    counted = Counted(leader)
    assert counted.since_last() is None
    leader.lookups.unloaded["cost"] = 3
    leader.lookups.loaded_blocks[Tier.DISK] = 2
    first = counted.since_last()
    assert first is not None
    assert first.data == {
        "loaded_host_blocks": 0,
        "loaded_disk_blocks": 2,
        "loaded_remote_blocks": 0,
        "failed_blocks": 0,
        "unloaded_cost_blocks": 3,
    }
    assert counted.since_last() is None
    leader.lookups.unloaded["cost"] = 4
    more = counted.since_last()
    assert more is not None
    assert more.data["unloaded_cost_blocks"] == 1
    assert first.aggregate(more).reduce()["unloaded cost blocks"] == 4


def test_every_engine_has_a_series_for_every_reason(
    registry: CollectorRegistry, metrics: KvbmPromMetrics
) -> None:
    metrics.observe({"loaded_host_blocks": 5, "unloaded_deadline_blocks": 2}, engine_idx=1)
    metrics.observe(KvbmStats(data={"unloaded_deadline_blocks": 1}), engine_idx=1)
    metrics.observe({"unloaded_cost_blocks": 7}, engine_idx=0)

    def value(name: str, engine: str, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"vllm:kvbm_{name}_total", {"model_name": "m", "engine": engine, **labels}
        )

    assert value("loaded_host_blocks", "1") == 5
    assert value("unloaded_blocks", "1", reason="deadline") == 3
    assert value("unloaded_blocks", "0", reason="cost") == 7
    for reason in UNLOADED_REASONS:
        assert value("unloaded_blocks", "0", reason=reason) is not None
    assert all(value(name, "0") is not None for name in COUNTERS)


def test_statistics_survive_the_way_between_processes() -> None:
    assert build({"unloaded_no_room_blocks": 2}).data == {"unloaded_no_room_blocks": 2}
    assert build({"data": {"failed_blocks": 1}}).data == {"failed_blocks": 1}

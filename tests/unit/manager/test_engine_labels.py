"""Each engine's part of a shared manager's numbers, under names of which there are few."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvbm.manager.engine_labels import LABELS_MAX, EngineLabels
from kvbm.observe.metric_table import OTHER_ENGINES
from kvbm.protocol import PROTOCOL_VERSION, Hello, Release
from rigs.manager import KEYS, LAYOUT, OTHER, ManagerBench, refusal, store


def test_a_restart_gets_its_name_again_and_a_second_engine_another() -> None:
    labels = EngineLabels()
    first = labels.name("m", 1, ())
    assert first == "m/dp1"
    assert labels.name("m", 1, {first}) == "m/dp1#2"
    assert labels.name("m", 1, {"m/dp1#2"}) == first


def test_names_are_bounded() -> None:
    labels = EngineLabels()
    given = {labels.name(f"model-{number}", 0, ()) for number in range(3 * LABELS_MAX)}
    assert len(given) == LABELS_MAX + 1
    assert OTHER_ENGINES in given
    assert labels.name("model-0", 0, ()) == "model-0/dp0", "a known one keeps its name"
    assert len(EngineLabels().name("x" * 10_000, 0, ())) < 128


def test_each_engine_has_its_own_counts_and_its_own_line(
    make_manager: Callable[..., ManagerBench], caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(namespaces=2)
    leader, worker = manager.engine("uuid-1", data_parallel_rank=3)
    store(leader, worker, 1, KEYS[:2])
    other, _ = manager.engine("uuid-2", namespace=OTHER)
    leader.lookup(2, KEYS[:4])
    other.lookup(1, KEYS[:8])
    leader.send(Release(lookup=2, loaded=1, failed=1, seconds=0.1, answer_s=0.25, wait_s=0.5))
    with caplog.at_level(logging.INFO, logger="kvbm.traffic"):
        manager.tick(60.0)
    value, tokens = manager.metrics.value, LAYOUT.block_tokens
    mine, theirs = "unit/model/dp3", "unit/model/dp0"
    assert value("kvbm_queried_tokens_total", engine=mine) == 4 * tokens
    assert value("kvbm_queried_tokens_total", engine=theirs) == 8 * tokens
    assert value("kvbm_hit_tokens_total", engine=mine, tier="host") == 2 * tokens
    assert value("kvbm_hit_tokens_total", engine=theirs, tier="host") == 0
    for name in ("kvbm_lookup_answer_seconds", "kvbm_load_wait_seconds", "kvbm_recompute_fallbacks_total"):
        assert (value(name, engine=mine), value(name, engine=theirs)) == (1, 0), name
    assert value("kvbm_host_cache_hit_rate") == 2 / 12, "the compatible gauge is the manager's"
    lines = [record.getMessage() for record in caplog.records if "Hit Rates" in record.getMessage()]
    assert lines == [
        "KVBM [worker-uuid-1] Cache Hit Rates - Host: 50.0% (2/4), Disk: 0.0% (0/4)",
        "KVBM [worker-uuid-2] Cache Hit Rates - Host: 0.0% (0/8), Disk: 0.0% (0/8)",
    ]
    assert not any("uuid" in word for row in manager.metrics.snapshot() for word in row)


def test_a_rank_that_cannot_be_is_refused(make_manager: Callable[..., ManagerBench]) -> None:
    manager = make_manager()
    client = manager.client()
    hello: Hello = manager.worker_hello(data_parallel_rank=-1)
    assert hello.version == PROTOCOL_VERSION
    client.send(hello)
    assert "data_parallel_rank=-1" in refusal(client)

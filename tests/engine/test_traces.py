"""The spans of requests behind a real engine, at a collector: each part lies in what it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from engine.launcher import Launcher
from engine.tier_settings import SMALL_HOST_BLOCKS, disk
from engine.workload import small_workload
from rigs.collector import Collector

PARENT = {
    "kvbm.lookup": "kvbm.request",
    "kvbm.promotion": "kvbm.request",
    "kvbm.load": "kvbm.request",
    "kvbm.copy": "kvbm.load",
}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_a_request_that_loads_from_disk(launcher: Launcher, tmp_path: Path, collector: Collector) -> None:
    traces = {"DYN_KVBM_TRACES": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    engine = launcher.start({**disk(tmp_path, SMALL_HOST_BLOCKS), **traces})
    engine.run(small_workload())
    launcher.stop()  # the last spans are sent before the engine has ended
    spans = {span.span_id: span for span in collector.all()}
    for span in spans.values():
        if span.name in PARENT:
            parent: Any = spans[span.parent_span_id]
            assert parent.name == PARENT[span.name]
            assert parent.trace_id == span.trace_id
        else:
            assert (span.name, span.parent_span_id) == ("kvbm.request", b"")
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    traced: dict[bytes, set[str]] = {}
    for span in spans.values():
        traced.setdefault(span.trace_id, set()).add(span.name)
    assert {"kvbm.request", *PARENT} in traced.values(), "one was looked up, promoted, loaded and copied"

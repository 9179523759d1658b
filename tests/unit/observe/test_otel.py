"""Spans through OpenTelemetry's own packages: to a collector that decodes them; what is said when they cannot go."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.rigs.collector import Collector
from tests.rigs.leader import HASHES, TABLE, Bench

from kvbm.observe import otel
from kvbm.observe.otel import OtelSink, open_sink
from kvbm.observe.spans import Span
from kvbm.step_plan import StepReport

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
SPAN = Span("whole", 100, 900, {"answer": 42}, (Span("part", 200, 300, {}, (), "it broke"),))
DEADLINE_S = 30.0


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    yield collector
    collector.close()


def load(bench: Bench) -> None:
    """A request with a trace of its own loads five blocks, two of them from disk."""
    bench.leader.request_added("r", HASHES[:8], b"", 0, trace_headers=HEADERS)
    (lookup,) = bench.manager.said()
    bench.answer(lookup, 5, ready=3, disk=2)
    assert bench.leader.matched("r", 0).blocks == 5
    bench.leader.allocated("r", 5, TABLE)
    bench.step()
    bench.leader.updated(StepReport(loaded={"r": 0.5}, copied={"r": (10, 20)}), ["r"], set())
    bench.leader.close()
    bench.manager.close()


def test_a_collector_gets_the_spans_of_a_request_in_its_trace(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    sink = open_sink("engine-1")
    assert sink is not None
    load(Bench(spans=sink))
    sink.close()
    spans = collector.spans()
    assert set(spans) == {"kvbm.request", "kvbm.lookup", "kvbm.promotion", "kvbm.load", "kvbm.copy"}
    request = spans["kvbm.request"]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert request.parent_span_id.hex() == PARENT
    for name in ("kvbm.lookup", "kvbm.promotion", "kvbm.load"):
        assert spans[name].parent_span_id == request.span_id
    assert spans["kvbm.copy"].parent_span_id == spans["kvbm.load"].span_id
    copy = spans["kvbm.copy"]
    assert (copy.start_time_unix_nano, copy.end_time_unix_nano) == (10, 20)
    facts = {each.key: each.value for each in request.attributes}
    assert facts["gen_ai.request.id"].string_value == "r"
    assert facts["kvbm.found_disk_tokens"].int_value == 8
    resource = {
        each.key: each.value.string_value
        for each in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "kvbm"
    assert resource["service.instance.id"] == "engine-1"
    assert resource["deployment.environment"] == "test"
    assert set(collector.paths) == {"/v1/traces"}


def test_the_standard_variables_name_the_service_and_sample(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    sink = open_sink("e")
    assert sink is not None
    sink.put(lambda: SPAN, {})
    sink.close()
    assert collector.requests == []
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    sink = open_sink("e")
    assert sink is not None
    sink.put(lambda: SPAN, {})
    sink.put(lambda: SPAN._replace(name="of a sampled request"), HEADERS)
    sink.close()
    assert set(collector.spans()) == {"of a sampled request", "part"}
    (service,) = (
        each.value.string_value
        for each in collector.requests[0].resource_spans[0].resource.attributes
        if each.key == "service.name"
    )
    assert service == "chat"


def kept() -> tuple[OtelSink, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OtelSink(provider), exporter


def test_a_span_and_its_parts_keep_times_facts_and_faults() -> None:
    sink, exporter = kept()
    sink.put(lambda: SPAN, {})
    sink.close()
    part, whole = exporter.get_finished_spans()
    assert (whole.name, whole.start_time, whole.end_time) == ("whole", 100, 900)
    assert dict(whole.attributes or {}) == {"answer": 42}
    assert whole.parent is None and whole.status.is_unset
    assert (part.name, part.start_time, part.end_time) == ("part", 200, 300)
    assert part.parent is not None and whole.context is not None
    assert part.parent.span_id == whole.context.span_id
    assert (part.status.is_ok, part.status.description) == (False, "it broke")


@pytest.mark.parametrize("headers", [{"traceparent": "nonsense"}, {"traceparent": ""}, {"x": "y"}])
def test_headers_that_name_no_trace_begin_a_new_one(headers: dict[str, str]) -> None:
    sink, exporter = kept()
    sink.put(lambda: SPAN, headers)
    sink.close()
    assert exporter.get_finished_spans()[-1].parent is None


def test_what_comes_faster_than_it_leaves_is_lost_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otel, "QUEUED_MAX", 3)
    sink, exporter = kept()
    busy, gate = threading.Event(), threading.Event()
    emit = sink._emit

    def slow(span: Span, context: Any) -> None:
        busy.set()
        assert gate.wait(DEADLINE_S)
        emit(span, context)

    monkeypatch.setattr(sink, "_emit", slow)
    sink.put(lambda: SPAN._replace(parts=()), {})
    assert busy.wait(DEADLINE_S)
    for _ in range(5):
        sink.put(lambda: SPAN._replace(parts=()), {})
    assert sink.lost == 2
    gate.set()
    sink.close()
    assert len(exporter.get_finished_spans()) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "traces come faster than they can be sent: some are lost; sample fewer of them"
    ]


@pytest.mark.swallows("^IndexError: tuple index out of range$")
def test_a_span_that_cannot_be_made_costs_itself_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink, exporter = kept()
    for _ in range(2):
        sink.put(lambda: SPAN._replace(start_ns="soon", parts=()), {})  # type: ignore[arg-type]
        sink.put(lambda: SPAN[99], {})
    sink.put(lambda: SPAN, {})
    sink.close()
    assert exporter.get_finished_spans()[-1].name == "whole"
    assert len([r for r in caplog.records if r.getMessage().startswith("a trace could not be made: ")]) == 1


def test_a_collector_that_does_not_answer_does_not_hold_the_end_of_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otel, "CLOSE_S", 0.01)
    gate, ended = threading.Event(), threading.Event()

    class Hanging(InMemorySpanExporter):
        def shutdown(self) -> None:
            assert gate.wait(DEADLINE_S)
            ended.set()

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Hanging()))
    sink = OtelSink(provider)
    sink.put(lambda: SPAN, {})
    sink.close()
    assert not ended.is_set()
    gate.set()
    assert ended.wait(DEADLINE_S)


MISSING = """
import logging, sys
sys.modules["opentelemetry"] = None
logging.basicConfig(format="%(message)s")
from kvbm.observe.otel import open_sink
assert open_sink("e") is None
"""


def test_without_the_packages_one_line_says_how_to_install_them() -> None:
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("no traces: ")
    assert line.endswith("pip install 'openkvbm[otel]'")


def test_settings_that_opentelemetry_refuses_are_one_line(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    assert open_sink("e") is None
    (line,) = (record.getMessage() for record in caplog.records if record.name == "kvbm.traces")
    assert line.startswith("no traces: OpenTelemetry refuses its settings: max_export_batch_size")

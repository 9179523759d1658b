"""Spans on their way to an OpenTelemetry collector (OTLP over HTTP), made and sent by threads of their own.

OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, …) say where they go, and how many;
its packages read them. They are imported only where traces are asked for.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvbm.observe.spans import Span
from kvbm.strict import record_swallowed

log = logging.getLogger("kvbm.traces")

QUEUED_MAX = 1024
"""Requests whose spans wait to be made; what comes beyond is lost."""
CLOSE_S = 3.0
"""How long the end of an engine waits for its last spans to leave."""

EXTRA = "pip install 'openkvbm[otel]'"


class OtelSink:
    """A `SpanSink` that gives spans to an OpenTelemetry `TracerProvider`, which it ends with itself."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("kvbm")
        self._propagator = TraceContextTextMapPropagator()
        self._queue: queue.SimpleQueue[tuple[Callable[[], Span], Mapping[str, str]] | None]
        self._queue = queue.SimpleQueue()
        self.lost = 0
        """Spans with their parts that found the queue full."""
        self._told_of_loss = self._told_of_fault = False
        self._thread = threading.Thread(target=self._run, name="kvbm-traces", daemon=True)
        self._thread.start()

    def put(self, make: Callable[[], Span], parent: Mapping[str, str]) -> None:
        """As `SpanSink`."""
        if self._queue.qsize() < QUEUED_MAX:
            self._queue.put((make, parent))
        else:
            self.lost += 1

    def close(self) -> None:
        """Send what is there, for a bounded time; nothing may be put in any more."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._emit(item[0](), self._propagator.extract(item[1]))
            except Exception as error:
                record_swallowed(error)
                # Traces are for people who look: no fault in them may cost a request anything.
                if not self._told_of_fault:
                    self._told_of_fault = True
                    log.warning("a trace could not be made: %s", error)
            if self.lost and not self._told_of_loss:
                self._told_of_loss = True
                log.warning("traces come faster than they can be sent: some are lost; sample fewer of them")
        self._provider.shutdown()

    def _emit(self, span: Span, context: Any) -> None:
        made = self._tracer.start_span(
            span.name, context, attributes=dict(span.attributes), start_time=span.start_ns
        )
        if span.fault:
            made.set_status(self._trace.StatusCode.ERROR, span.fault)
        inside = self._trace.set_span_in_context(made, context)
        for part in span.parts:
            self._emit(part, inside)
        made.end(span.end_ns)


def open_sink(engine: str) -> OtelSink | None:
    """The sink of an engine with this id; None, and one line that says why, where there can be none."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        ours = Resource({"service.name": "kvbm", "service.instance.id": engine})
        named = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=named, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return OtelSink(provider)
    except ImportError as error:
        log.warning("no traces: %s: %s", error, EXTRA)
    except Exception as error:
        log.warning("no traces: OpenTelemetry refuses its settings: %s", error)
    return None

"""OpenTelemetry spans, optional: of a request, of its windows, and of the verify calls of a window.

A span's parent is named by its W3C traceparent, which the request carries: so a client's own trace goes on
here, and spans of one request join across processes. Nothing of OpenTelemetry is imported while it is off.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm42.config import TelemetrySettings
from llm42.errors import LLM42Error
from llm42.protocol import Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_HEADER = "traceparent"


class TracingUnavailable(LLM42Error):
    """The package that the tracing settings need is not installed."""

    code = "tracing_unavailable"


class Span:
    """A span that has begun; this one is of no trace."""

    trace = ""
    """Its traceparent; empty when nothing is traced."""

    def carry(self, request: Request) -> Request:
        """The request with this span as what its further spans belong to."""
        return replace(request, trace=self.trace) if self.trace else request

    def end(self, **attributes: Any) -> None:
        """Ends it; attributes are numbers, strings or booleans."""


class Tracer:
    """Makes spans; this one traces nothing."""

    def start(self, name: str, parent: str, **attributes: Any) -> Span:
        """Begins a span now. parent: a traceparent; empty, or anything else: a trace of its own."""
        return Span()

    def close(self) -> None:
        """Sends what is left; waits for it."""


class _OtelSpan(Span):
    def __init__(self, span: Any, trace: str) -> None:
        self._span, self.trace = span, trace

    def end(self, **attributes: Any) -> None:
        self._span.set_attributes({f"llm42.{name}": value for name, value in attributes.items()})
        self._span.end()


class OtelTracer(Tracer):
    """Spans through OpenTelemetry's SDK, with a provider of its own: the process-wide one is left alone."""

    def __init__(self, settings: TelemetrySettings, component: str) -> None:
        """Raises TracingUnavailable when the exporter is not installed."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "llm42", "llm42.component": component})
        self._provider = TracerProvider(ParentBased(TraceIdRatioBased(settings.trace_share)), resource)
        exporter = _exporter(settings, component)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer, self._propagator = self._provider.get_tracer("llm42"), TraceContextTextMapPropagator()

    def start(self, name: str, parent: str, **attributes: Any) -> Span:
        """A span that runs until its end. parent: a W3C traceparent, or "" for a trace of its own."""
        context = self._propagator.extract({_HEADER: parent})
        named = {f"llm42.{key}": value for key, value in attributes.items()}
        span = self._tracer.start_span(f"llm42.{name}", context, attributes=named)
        carrier: dict[str, str] = {}
        from opentelemetry.trace import set_span_in_context

        self._propagator.inject(carrier, set_span_in_context(span))
        return _OtelSpan(span, carrier.get(_HEADER, ""))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def _exporter(settings: TelemetrySettings, component: str) -> SpanExporter:
    if settings.traces == "file":
        return _file_exporter(Path(settings.trace_dir) / f"{component}-{os.getpid()}.jsonl")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise TracingUnavailable(
            "telemetry.traces: otlp needs its exporter: pip install opentelemetry-exporter-otlp-proto-http"
        ) from error
    return OTLPSpanExporter(endpoint=settings.trace_endpoint)


def _file_exporter(path: Path) -> SpanExporter:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class JsonLines(SpanExporter):
        """One span a line, in the SDK's JSON."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.writelines(span.to_json(indent=None) + "\n" for span in spans)
            return SpanExportResult.SUCCESS

    return JsonLines()


def make_tracer(settings: TelemetrySettings, component: str) -> Tracer:
    """The tracer that the settings ask for. Raises TracingUnavailable."""
    return Tracer() if settings.traces == "off" else OtelTracer(settings, component)

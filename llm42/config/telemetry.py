"""Settings of metrics, logs and traces."""

from __future__ import annotations

from typing import Literal

from llm42.config.section import Port, Section, Share


class TelemetrySettings(Section):
    """What the service says of itself: metrics, logs, traces."""

    metrics_port: Port = 0
    """Where `llm42 serve` shows the metrics of all its processes. 0: 8090, or a free port where that is
    taken. On a cluster this is Ray's --metrics-export-port."""
    log_format: Literal["text", "json"] = "text"
    """text, or json: one object a line. Logs are in Ray's logs of the processes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """From which level on: debug, info (a line for each request), warning, error."""
    log_prompts: bool = False
    """Whether a request's line has the prompt's text."""
    traces: Literal["off", "file", "otlp"] = "off"
    """OpenTelemetry spans of requests, windows and verify calls. off; file: JSON lines in trace_dir, a
    file for each process; otlp: to trace_endpoint (pip install -e '.[otlp]')."""
    trace_dir: str = ".cache/traces"
    """Where `traces: file` writes."""
    trace_endpoint: str = "http://127.0.0.1:4318/v1/traces"
    """Where `traces: otlp` sends to (OTLP over HTTP)."""
    trace_share: Share = 1.0
    """Share of requests that are traced, unless the client's traceparent header decides."""

"""Settings of metrics, logs and traces."""

from __future__ import annotations

from typing import Literal

from llm42.config.section import Port, Section, Share


class TelemetrySettings(Section):
    """Metrics, logs and traces."""

    metrics_port: Port = 0
    """TCP port on which `llm42 serve` shows the metrics of all its processes. 0: 8090, or a free port if that
    is taken. On a cluster Ray's --metrics-export-port decides."""
    log_format: Literal["text", "json"] = "text"
    """text, or json: one object a line. Logs go to the log files that Ray keeps of each process."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged: debug, info (a line for each request), warning, error."""
    log_prompts: bool = False
    """true: a request's line in the log holds the text of the prompt."""
    traces: Literal["off", "file", "otlp"] = "off"
    """OpenTelemetry spans of requests, windows and calls to verifiers. off: none. file: JSON lines in
    trace_dir, a file for each process. otlp: sent to trace_endpoint (pip install -e '.[otlp]')."""
    trace_dir: str = ".cache/traces"
    """Directory of the files that `traces: file` writes."""
    trace_endpoint: str = "http://127.0.0.1:4318/v1/traces"
    """URL that `traces: otlp` sends to (OTLP over HTTP)."""
    trace_share: Share = 1.0
    """Share of the requests that are traced (0 to 1). A client's traceparent header overrides it for its
    request."""

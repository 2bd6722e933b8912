"""Logs, spans and the counting around a request's stream."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from llm42.config import TelemetrySettings
from llm42.errors import Overloaded
from llm42.protocol import Delta, FinishReason, Request, RequestStats
from llm42.telemetry.logs import LOGGERS, configure, event
from llm42.telemetry.metrics import Metrics
from llm42.telemetry.request_metrics import Observed
from llm42.telemetry.tracing import OtelTracer, Tracer, TracingUnavailable, make_tracer
from tests.metrics_page import PrometheusMetrics

REQUEST = Request("cmpl-1-0", (7, 8, 9), 4, deterministic=True)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Where the loggers write; they are put back afterwards."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(x.handlers, x.level) for x in loggers]
    yield io.StringIO()
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers = handlers
        logger.setLevel(level)


async def deltas(*pieces: Delta | Exception) -> AsyncGenerator[Delta, None]:
    """A stream that gives these."""
    for piece in pieces:
        if isinstance(piece, Exception):
            raise piece
        yield piece


FIRST = Delta((1,), "a", fingerprint="llm42-f")
LAST = Delta(
    (2, 3),
    "b",
    finish_reason=FinishReason.LENGTH,
    stats=RequestStats(windows=2, rollbacks=1, verified_tokens=3),
)


async def outcome(*pieces: Delta | Exception, leave_after: int = 99) -> str:
    """What the metrics say of a stream."""
    metrics = PrometheusMetrics("tiny")
    stream = Observed(REQUEST, metrics).run(deltas(*pieces))
    try:
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == leave_after:
                break
    except (Overloaded, RuntimeError):
        pass
    await stream.aclose()
    lines = generate_latest(metrics.registry).decode().splitlines()
    ended = [x for x in lines if x.startswith("llm42_requests_total") and not x.endswith(" 0.0")]
    assert len(ended) == 1, "every request ends once"
    assert ended[0].endswith(" 1.0")
    return ended[0].split('outcome="')[1].split('"')[0]


async def test_a_request_is_counted_once_however_it_ends() -> None:
    assert await outcome(FIRST, LAST) == "finished"
    assert await outcome(FIRST, LAST, leave_after=1) == "aborted"
    assert await outcome(FIRST, LAST, leave_after=2) == "finished", "the client has everything"
    assert await outcome(FIRST, Overloaded("full")) == "overloaded"
    assert await outcome(RuntimeError("a bug")) == "internal_error"


@pytest.mark.parametrize(
    ("stream", "deterministic", "gaps"),
    [(True, False, 1), (False, False, 0), (True, True, 1), (False, True, 0)],
)
async def test_gaps_that_no_client_sees_are_not_measured(
    stream: bool, deterministic: bool, gaps: int
) -> None:
    """A reply that is read as a whole comes in pieces of our making."""
    metrics = PrometheusMetrics("tiny")
    request = replace(REQUEST, stream=stream, deterministic=deterministic)
    async for _ in Observed(request, metrics).run(deltas(FIRST, LAST)):
        pass
    lines = generate_latest(metrics.registry).decode().splitlines()
    counts = [float(x.split()[-1]) for x in lines if x.startswith("llm42_commit_gap_seconds_count")]
    assert sum(counts) == gaps


async def test_json_lines_have_the_request_id_and_no_prompt(log: io.StringIO) -> None:
    configure(TelemetrySettings(log_format="json"), "ingress", log)
    async for _ in Observed(REQUEST, Metrics()).run(deltas(FIRST, LAST)):
        pass
    line = json.loads(log.getvalue())
    assert line.pop("seconds") >= 0
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info", "component": "ingress", "logger": "llm42.telemetry.request_metrics",
        "message": "request",
        "request_id": "cmpl-1-0", "mode": "deterministic", "outcome": "finished", "prompt_tokens": 3,
        "output_tokens": 3, "fingerprint": "llm42-f", "windows": 2, "rollbacks": 1,
        "verified_tokens": 3, "direct_tokens": 0, "way": "verify",
    }  # fmt: skip
    async for _ in Observed(REQUEST, Metrics(), None, repr).run(deltas(FIRST, LAST)):
        pass
    assert json.loads(log.getvalue().splitlines()[1])["prompt"] == "(7, 8, 9)"


@pytest.mark.parametrize(("direct", "way"), [(0, "verify"), (3, "direct"), (1, "both")])
async def test_a_line_and_the_span_say_which_way_decoded_it(log: io.StringIO, direct: int, way: str) -> None:
    configure(TelemetrySettings(log_format="json"), "ingress", log)
    assert LAST.stats is not None
    last = replace(LAST, stats=replace(LAST.stats, direct_tokens=direct))
    for request in (REQUEST, replace(REQUEST, deterministic=False)):
        async for _ in Observed(request, Metrics()).run(deltas(FIRST, last)):
            pass
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    # best effort has one where there is no engine
    assert [line.get("way") for line in lines] == [way, way if direct else None]
    assert lines[0]["direct_tokens"] == direct


def test_a_value_cannot_forge_a_line(log: io.StringIO) -> None:
    for kind in ("text", "json"):
        configure(TelemetrySettings(log_format=kind), "ingress", log)
        event(logging.getLogger("llm42.x"), "request", request_id="a\n2026-01-01 forged")
    assert len(log.getvalue().splitlines()) == 2


def test_levels_and_exceptions(log: io.StringIO) -> None:
    configure(TelemetrySettings(log_format="json", log_level="warning"), "verifier", log)
    logger = logging.getLogger("llm42_serve.x")
    logger.info("not this")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("this")
    (line,) = map(json.loads, log.getvalue().splitlines())
    assert line["level"] == "error"
    assert "ValueError: why" in line["exception"]


def family(tracer: Tracer) -> None:
    """A request with a window in it."""
    span = tracer.start("request", PARENT, mode="deterministic")
    window = tracer.start("window", span.carry(REQUEST).trace, candidates=3)
    window.end(accepted=2)
    span.end(outcome="finished")
    tracer.close()


def test_spans_go_to_a_file_and_know_their_parents(tmp_path: Path) -> None:
    settings = TelemetrySettings(traces="file", trace_dir=str(tmp_path / "new"))
    family(make_tracer(settings, "ingress"))
    (file,) = (tmp_path / "new").iterdir()
    window, request = map(json.loads, file.read_text().splitlines())
    assert request["parent_id"] == "0xb7ad6b7169203331"
    assert window["parent_id"] == request["context"]["span_id"]
    assert window["context"]["trace_id"] == request["context"]["trace_id"] == f"0x{PARENT.split('-')[1]}"
    assert window["attributes"] == {"llm42.candidates": 3, "llm42.accepted": 2}


def test_tracing_is_off_by_default_and_then_imports_nothing() -> None:
    import subprocess
    import sys

    made = make_tracer(TelemetrySettings(), "ingress")
    assert type(made) is Tracer
    assert made.start("request", PARENT).carry(REQUEST) is REQUEST
    modules = "llm42.session.driver, llm42.telemetry.request_metrics"
    code = f"import sys, {modules}; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize("given", ["", "rubbish", "00-0-0-00", "x" * 5000])
def test_a_traceparent_that_is_none_starts_a_trace_of_its_own(tmp_path: Path, given: str) -> None:
    tracer = OtelTracer(TelemetrySettings(traces="file", trace_dir=str(tmp_path)), "ingress")
    tracer.start("request", given).end()
    tracer.close()
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["parent_id"] is None


def test_the_share_is_kept_but_a_client_may_ask(tmp_path: Path) -> None:
    tracer = OtelTracer(TelemetrySettings(traces="file", trace_dir=str(tmp_path), trace_share=0), "ingress")
    tracer.start("request", "").end()
    tracer.start("request", PARENT.removesuffix("01") + "00").end()
    tracer.start("request", PARENT).end()
    tracer.close()
    (file,) = tmp_path.iterdir()
    assert len(file.read_text().splitlines()) == 1


def test_spans_go_to_a_collector() -> None:
    """OTLP over HTTP, decoded with the protocol's own messages."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'llm42[otlp]'")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    names: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            sent: Any = ExportTraceServiceRequest.FromString(body)
            names.extend(s.name for r in sent.resource_spans for x in r.scope_spans for s in x.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    family(make_tracer(TelemetrySettings(traces="otlp", trace_endpoint=endpoint), "ingress"))
    server.shutdown()
    server.server_close()
    assert sorted(names) == ["llm42.request", "llm42.window"]


def test_without_the_exporter_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingUnavailable, match="pip install"):
        make_tracer(TelemetrySettings(traces="otlp"), "ingress")

"""Traces, logs and the live view of the running service."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llm42.cli.main import app
from llm42.config.serve_file import APP_NAME
from llm42_serve.launch import Service, log_dir
from tests.metrics.conftest import CANARY, PLANTED, TRACE, Traffic

pytestmark = [pytest.mark.service, pytest.mark.slow]


def spans(directory: Path) -> list[dict[str, Any]]:
    """All spans written so far."""
    return [json.loads(x) for file in directory.glob("*.jsonl") for x in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def traced(traffic: Traffic, trace_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Spans by name once no more arrive."""
    found: list[dict[str, Any]] = []
    for _ in range(20):
        time.sleep(2.5)
        before, found = found, spans(trace_dir)
        if found and len(found) == len(before):
            break
    by_name: dict[str, list[dict[str, Any]]] = {}
    for span in found:
        if span["context"]["trace_id"] == f"0x{TRACE}":
            by_name.setdefault(span["name"], []).append(span)
    return by_name


def test_spans_of_a_request_join_across_processes(
    traced: dict[str, list[dict[str, Any]]], traffic: Traffic, trace_dir: Path
) -> None:
    """The client's trace goes on through ingress and replica: request, window, verify."""
    replies = traffic.replies[PLANTED]
    requests, windows = traced["llm42.request"], traced["llm42.window"]
    assert {r["attributes"]["llm42.request_id"].rpartition("-")[0] for r in requests} == set(
        traffic.ids[PLANTED]
    )
    assert {r["parent_id"] for r in requests} == {"0xb7ad6b7169203331"}
    assert len(windows) == replies["windows"]
    assert {w["parent_id"] for w in windows} == {r["context"]["span_id"] for r in requests}
    by_id = {w["context"]["span_id"] for w in windows}
    calls = traced["llm42.verify"]
    assert {c["parent_id"] for c in calls} == by_id
    assert all(c["attributes"]["llm42.compute_s"] > 0 for c in calls)
    assert {f.name.split("-")[0] for f in trace_dir.glob("*.jsonl")} == {"ingress", "fastpath"}
    rejected = [w for w in windows if w["attributes"]["llm42.accepted"] < w["attributes"]["llm42.candidates"]]
    assert 0 < len(rejected) <= replies["rollbacks"]


def test_there_are_no_traces_unless_asked_for(service: Service, traffic: Traffic, trace_dir: Path) -> None:
    """The session's own application has none, though its requests said the same."""
    ids = " ".join(file.read_text() for file in trace_dir.glob("*.jsonl"))
    assert all(reply in ids for reply in traffic.ids[PLANTED])
    assert not any(reply in ids for reply in traffic.ids[APP_NAME])
    assert not list(Path(service.settings.telemetry.trace_dir).glob("*.jsonl"))


def log_lines() -> list[str]:
    """Everything that the processes of the session have logged."""
    return [
        line
        for file in Path(log_dir()).rglob("*")
        if file.is_file()
        for line in file.read_text(errors="replace").splitlines()
    ]


def test_logs_have_request_ids_and_prompts_only_where_asked(service: Service, traffic: Traffic) -> None:
    lines = log_lines()
    found = [json.loads(x) for x in lines if x.startswith("{") and '"message": "request"' in x]
    logged = {x["request_id"].rpartition("-")[0]: x for x in found}
    for reply in traffic.ids[PLANTED]:
        line = logged[reply]
        assert line["outcome"] == "finished"
        assert line["component"] == "ingress"
        assert line["fingerprint"].startswith("llm42-")
        assert CANARY in line["prompt"], "telemetry.log_prompts"
        assert TRACE in line["trace"]
    plain = [x for x in lines if any(f'"{reply}-' in x for reply in traffic.ids[APP_NAME])]
    assert len(plain) == len(traffic.ids[APP_NAME])
    assert all("llm42.telemetry.request_metrics: request " in x and " request_id=" in x for x in plain)
    leaks = [x for x in lines if "Quibblewick" in x and not x.startswith('{"time"')]
    assert leaks == []


def test_top_shows_what_the_replies_say(service: Service, traffic: Traffic) -> None:
    result = CliRunner().invoke(app, ["top", "--once", service.metrics_url], env={"COLUMNS": "240"})
    assert result.exit_code == 0, result.output
    for title in ("Determinism", "Latency", "Verifiers", "Requests"):
        assert title in result.output
    shown = re.search(r"rollbacks +│ +([\d,]+)", result.output)
    assert shown is not None
    assert int(shown[1].replace(",", "")) >= sum(r["rollbacks"] for r in traffic.replies.values())
    assert service.health()["fingerprint"] in result.output
    assert re.search(r"state +│ +1 ready", result.output)
    assert re.search(r"error reply: model_not_found +│ +\d+", result.output)

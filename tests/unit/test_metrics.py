"""The metric definitions, and labels as a sink takes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest

import llm42
from llm42.telemetry.metrics import (
    CATALOGUE,
    CODES,
    COMMON,
    REQUESTS,
    VERIFY_SECONDS,
    WINDOWS,
    Kind,
    Label,
    Metric,
    Scope,
)
from tests.metrics_page import PrometheusMetrics

ASKED_FOR = {
    *("candidate_tokens", "committed_tokens", "rolled_back_tokens", "windows", "rollbacks"),
    *("accepted_length_tokens", "window_length_tokens", "verify_queue_seconds", "verify_seconds"),
    *("verifier_rows", "verifier_padding_rows", "verifier_step_seconds"),
    *("verifier_cache_hits", "verifier_cache_evictions", "preemptions"),
    *("first_token_seconds", "commit_gap_seconds", "request_seconds", "requests_running", "requests_queued"),
    *("verifier_tokens", "verifier_direct_requests", "verifier_preemptions"),
    *("audits", "audit_mismatches", "failovers", "rejects", "fingerprint_info"),
}


def problems(metric: Metric) -> list[str]:
    """What is wrong with a definition."""
    found = []
    if not re.fullmatch(r"llm42_[a-z0-9_]+", metric.name) or metric.name.endswith("_total"):
        found.append("name")
    if not metric.help or not metric.unit:
        found.append("help or unit")
    if metric.name.endswith("_seconds") != (metric.unit == "seconds"):
        found.append("unit of the name")
    rising = list(metric.buckets) == sorted(set(metric.buckets)) and all(b > 0 for b in metric.buckets)
    if bool(metric.buckets) != (metric.kind is Kind.HISTOGRAM) or not rising:
        found.append("buckets")
    labels = (*COMMON[metric.scope], *metric.labels)
    if any(bool(label.values) == bool(label.bound) for label in labels):
        found.append("a label needs its values or what bounds them")
    return found


def test_definitions_are_complete_and_distinct() -> None:
    assert len({m.name for m in CATALOGUE}) == len(CATALOGUE)
    assert {m.name: problems(m) for m in CATALOGUE if problems(m)} == {}
    assert {f"llm42_{name}" for name in ASKED_FOR} <= {m.name for m in CATALOGUE}


def test_an_incomplete_definition_is_noticed() -> None:
    labels = (Label("prompt"),)
    wrong = Metric("llm42_x_total", Kind.COUNTER, Scope.REPLICA, "", "", labels, (2.0, 1.0))
    assert len(problems(wrong)) == 4


STARTS = {"unsupported_model", "model_file_error", "launch_failed", "certification_failed", "no_fast_path"}
"""Codes of what ends a command or a start: no client has a reply with them."""


def test_every_code_that_a_client_may_see_is_counted_by_its_name() -> None:
    root, codes = Path(llm42.__file__).parent, set[str]()
    for file in (root / "errors.py", *(root / "api").glob("*.py"), *(root / "engine").rglob("*.py")):
        codes |= set(re.findall(r'code(?:: str)?(?:, status)? ?= ?"([a-z_]+)"', file.read_text()))
    assert len(codes) > 8
    assert codes - STARTS - {*CODES} == set()


def test_a_sink_counts() -> None:
    metrics = PrometheusMetrics("tiny")
    metrics.inc(WINDOWS, 3)
    metrics.inc(REQUESTS, mode="deterministic", outcome="finished")
    metrics.observe(VERIFY_SECONDS, 0.2)
    text = generate_latest(metrics.registry).decode()
    assert 'llm42_windows_total{model="tiny"} 3.0' in text
    assert 'llm42_requests_total{mode="deterministic",model="tiny",outcome="finished"} 1.0' in text
    assert 'llm42_verify_seconds_bucket{le="0.25",model="tiny"} 1.0' in text
    assert 'llm42_audit_mismatches_total{model="tiny"} 0.0' in text, "counters begin with 0"
    with pytest.raises(ValueError, match="label"):
        metrics.inc(REQUESTS, mode="deterministic")


def test_a_label_never_has_more_values_than_defined() -> None:
    metrics = PrometheusMetrics("tiny")
    for i in range(100):
        metrics.inc(REQUESTS, mode="deterministic", outcome=f"made up {i}")
    text = generate_latest(metrics.registry).decode()
    assert 'outcome="other"} 100.0' in text
    assert "made up" not in text

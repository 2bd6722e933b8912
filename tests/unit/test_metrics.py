"""The metric definitions and the embedded sink."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from llm42.metrics import CATALOGUE, REQUESTS, VERIFY_SECONDS, WINDOWS, Kind, PrometheusMetrics


def test_definitions_are_complete_and_distinct() -> None:
    assert len({m.name for m in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert re.fullmatch(r"llm42_[a-z0-9_]+", metric.name)
        assert metric.help
        assert not metric.name.endswith("_total"), "the sinks add it"
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_the_prometheus_sink_counts() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    metrics.inc(WINDOWS, 3)
    metrics.inc(REQUESTS, mode="deterministic", outcome="finished")
    metrics.observe(VERIFY_SECONDS, 0.2)
    text = generate_latest(registry).decode()
    assert "llm42_windows_total 3.0" in text
    assert 'llm42_requests_total{mode="deterministic",outcome="finished"} 1.0' in text
    assert 'llm42_verify_seconds_bucket{le="0.25"} 1.0' in text
    with pytest.raises(ValueError, match="label"):
        metrics.inc(REQUESTS, mode="deterministic")

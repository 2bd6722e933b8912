"""No histogram ends below what its settings allow: its high quantiles would all be the last limit."""

from __future__ import annotations

import pytest

from llm42.config import Settings
from llm42.telemetry.metrics import CATALOGUE, Kind, Metric
from llm42_serve.verifiers.actor import STALLED_S

HISTOGRAMS = [m for m in CATALOGUE if m.kind is Kind.HISTOGRAM]


def most(metric: Metric) -> float:
    """What may well be observed."""
    settings = Settings()
    if metric.unit == "tokens":
        return float(settings.audit.max_window - 1)  # and session.max_window may be as much
    if metric.name == "llm42_verifier_step_seconds":
        return STALLED_S
    # a window's retries; a stream may wait as long for each, and for another replica
    session = settings.session
    return 2 * session.verify_timeout_s * session.verify_attempts + settings.server.failover_s


@pytest.mark.parametrize("metric", HISTOGRAMS, ids=lambda m: m.name)
def test_it_reaches_as_far_as_the_settings(metric: Metric) -> None:
    assert metric.buckets[-1] >= most(metric)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert all(limit > 0 for limit in metric.buckets), "Ray keeps none of 0 or below"


LATENCIES = [m for m in HISTOGRAMS if m.unit == "seconds" and m.name != "llm42_verifier_step_seconds"]
"""A step that takes two minutes is ended."""


def test_ten_minutes_are_told_from_five_and_from_thirty() -> None:
    """Alerts and panels of waits: a quantile is found between two limits."""
    assert len(LATENCIES) >= 6
    for metric in LATENCIES:
        assert {300.0, 600.0, 1800.0} <= set(metric.buckets), metric.name

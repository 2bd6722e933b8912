"""`llm42 top`: figures from metrics pages."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from rich.console import Console
from typer.testing import CliRunner

from llm42.cli.main import app
from llm42.cli.top import Interval, NoMetrics, Page, sections, view
from llm42.telemetry import metrics as m
from tests.metrics_page import PrometheusMetrics, metrics_page


def page(metrics: PrometheusMetrics, taken: float = 0.0) -> Page:
    """What a scrape shows now."""
    return Page.parse(generate_latest(metrics.registry).decode(), taken)


def figures(seen: Interval) -> dict[str, str]:
    """Everything that is shown, by label."""
    return dict(row for _, rows in sections(seen) for row in rows)


def test_figures_since_the_start_and_between_two_pages() -> None:
    metrics = PrometheusMetrics("tiny")
    metrics.inc(m.COMMITTED_TOKENS, 1000, way="verify")
    metrics.inc(m.COMMITTED_TOKENS, 200, way="direct")
    metrics.inc(m.ROLLBACKS, 100)
    first = page(metrics, 10.0)
    assert figures(Interval(first))["rollback rate"] == "10.00%"
    assert figures(Interval(first))["tokens committed"] == "1,200"
    assert figures(Interval(first))["  decoded directly"] == "200"
    metrics.inc(m.COMMITTED_TOKENS, 500, way="verify")
    metrics.inc(m.COMMITTED_TOKENS, 40, way="direct")
    metrics.inc(m.ROLLBACKS, 5)
    metrics.inc(m.VERIFIER_BUSY, 2.5)
    between = figures(Interval(page(metrics, 20.0), first))
    assert between["rollback rate"] == "1.00%"
    assert between["tokens committed"] == "54.0/s"
    assert between["  decoded directly"] == "4.0/s"
    assert between["busy, local"] == "25%"


def test_what_the_model_of_the_ways_expects_stands_beside_what_was_measured() -> None:
    metrics = PrometheusMetrics("tiny")
    nothing = figures(Interval(page(metrics)))
    assert not {"  expected, all verify", "changes of way", "best effort moved"} & set(nothing)
    metrics.inc(m.COMMITTED_TOKENS, 1000, way="verify")
    metrics.set(m.WAY_EXPECTED, 90.0, way="verify")
    metrics.set(m.WAY_EXPECTED, 120.5, way="direct")
    metrics.inc(m.WAY_CHANGES, 3, way="direct")
    metrics.inc(m.MOVED_TOKENS, 40)
    shown = list(figures(Interval(page(metrics))).items())
    at = shown.index(("tokens committed", "1,000"))
    assert shown[at + 2 : at + 6] == [
        ("  expected, all verify", "90.0/s"),
        ("  expected, all direct", "120.5/s"),
        ("changes of way", "3"),
        ("best effort moved", "40"),
    ]


def test_an_empty_service_shows_dashes_not_errors() -> None:
    shown = figures(Interval(page(PrometheusMetrics("tiny"))))
    assert shown["rollback rate"] == shown["step time (p50)"] == shown["fingerprint"] == "-"


def test_series_of_all_processes_are_added_up_with_or_without_rays_prefix() -> None:
    text = "\n".join(
        f'ray_llm42_{name}_total{{replica="{replica}"}} {value}'
        for name, replica, value in (
            ("committed_tokens", "a", 100),
            ("committed_tokens", "b", 300),
            ("rollbacks", "a", 30),
            ("rollbacks", "b", 10),
        )
    )
    shown = figures(Interval(Page.parse(text, 0.0)))
    assert shown["rollback rate"] == "10.00%"
    assert shown["  replica a"] == "30.00%"


def test_quantiles_are_interpolated_as_prometheus_does() -> None:
    metrics = PrometheusMetrics("tiny")
    for seconds in (0.3, 0.3, 0.3, 0.7):
        metrics.observe(m.VERIFY_SECONDS, seconds)
    seen = Interval(page(metrics))
    # three of four in (0.25, 0.5]: half of all is two thirds into it
    assert seen.quantile(0.5, "verify_seconds") == "0.417 s"
    metrics.observe(m.VERIFY_SECONDS, 1e6)
    assert Interval(page(metrics), seen.now).quantile(0.5, "verify_seconds") == "7200.000 s"


def test_everything_fits_a_terminal() -> None:
    console = Console(width=80, record=True, file=None)
    with console.capture() as captured:
        console.print(view(Interval(page(PrometheusMetrics("tiny")))))
    assert "audit mismatches" in captured.get()


def test_the_command() -> None:
    metrics = PrometheusMetrics("tiny")
    metrics.inc(m.ROLLBACKS, 7)
    with metrics_page(metrics) as url:
        shown = CliRunner().invoke(app, ["top", "--once", url])
    assert shown.exit_code == 0
    assert "rollbacks" in shown.output
    gone = CliRunner().invoke(app, ["top", "--once", url])
    assert isinstance(gone.exception, NoMetrics)
    assert "llm42 serve" in str(gone.exception)


def test_a_page_of_something_else_is_refused() -> None:
    from prometheus_client import CollectorRegistry, Counter

    metrics = PrometheusMetrics("tiny")
    metrics.registry = CollectorRegistry()
    Counter("other", "of another program", registry=metrics.registry)
    with metrics_page(metrics) as url, pytest.raises(NoMetrics, match="has no metrics of LLM-42"):
        Page.fetch(url)

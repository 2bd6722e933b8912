"""A real Prometheus scraping the real service under mixed load."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from benchmarks.lib.prometheus import RULES, Prometheus, filled_in, panels
from llm42.config.serve_file import APP_NAME
from tests.metrics.conftest import CORRUPT_SHARE, PLANTED, REQUESTS, TOKENS, Traffic, settled
from tests.metrics.test_runbook import blocks, runbook

pytestmark = [pytest.mark.service, pytest.mark.slow]
ALERT = re.compile(r"(?P<left>.+) (?P<compare>>|<|==) (?P<right>[\d.]+)")
"""What an alert's expression looks like: one comparison with a number, last."""


@pytest.fixture(scope="module", autouse=True)
def after_the_load(prometheus: Prometheus, traffic: Traffic) -> dict[str, dict[str, float]]:
    """All tests here look at the same state: everything that happened has arrived."""
    return settled(prometheus)


def finite(prometheus: Prometheus, expression: str) -> list[float]:
    """The numbers that an expression gives now."""
    return [s.value for s in prometheus.query(expression) if math.isfinite(s.value)]


def rules() -> Iterator[dict[str, Any]]:
    """All rules of the chart."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def test_every_panel_has_data(prometheus: Prometheus) -> None:
    found = {
        f"{panel['title']}: {target['legendFormat']}": finite(prometheus, filled_in(target["expr"]))
        for panel in panels()
        for target in panel["targets"]
    }
    assert len(found) > 40
    assert [name for name, values in found.items() if not values] == []


def test_an_expression_without_data_is_noticed(prometheus: Prometheus) -> None:
    assert finite(prometheus, "sum(rate(ray_llm42_rolled_back_total[5m]))") == []
    expression = panels()[0]["targets"][0]["expr"]
    assert finite(prometheus, filled_in(expression, application="no such application")) == []
    with pytest.raises(ValueError, match="parse error"):
        prometheus.query("sum(")


def test_every_rule_has_data(prometheus: Prometheus) -> None:
    """Records are there under their names; alerts are evaluated with their comparison answering 0 or 1."""
    records = [rule["record"] for rule in rules() if "record" in rule]
    assert [name for name in records if not finite(prometheus, name)] == []
    for rule in rules():
        if "alert" in rule:
            parts = ALERT.fullmatch(rule["expr"])
            assert parts is not None, rule["expr"]
            answers = finite(prometheus, f"{parts['left']} {parts['compare']} bool {parts['right']}")
            assert answers, rule["alert"]
            assert set(answers) <= {0.0, 1.0}


def test_the_queries_of_the_runbook_have_data(prometheus: Prometheus) -> None:
    queries = list(blocks(runbook(), "promql"))
    assert len(queries) >= 6
    assert [query for query in queries if not finite(prometheus, query)] == []


def test_the_counters_are_what_the_replies_say(
    traffic: Traffic, after_the_load: dict[str, dict[str, float]]
) -> None:
    for name, replies in traffic.replies.items():
        before = traffic.before[name]
        counted = {c: after_the_load[name][c] - before.get(c, 0.0) for c in replies}
        assert counted == replies, name
        assert replies["rollbacks"] > 0
    assert traffic.replies[PLANTED]["verified_tokens"] == REQUESTS[PLANTED] * TOKENS


def test_no_replica_is_missing_and_every_request_has_waited(
    prometheus: Prometheus, after_the_load: dict[str, dict[str, float]]
) -> None:
    missing = {s.labels["application"]: s.value for s in prometheus.query("llm42:replicas_missing:count")}
    wanted = prometheus.query("max by (application) (ray_llm42_replicas_wanted)")
    assert missing == {APP_NAME: 0.0, PLANTED: 0.0}
    assert {s.labels["application"]: s.value for s in wanted} == {APP_NAME: 2.0, PLANTED: 1.0}
    waits = prometheus.query("sum by (application, mode) (ray_llm42_queue_seconds_count)")
    ended = prometheus.query("sum by (application, mode) (ray_llm42_requests_total)")
    by_class = {(s.labels["application"], s.labels["mode"]): s.value for s in ended}
    waited = {(s.labels["application"], s.labels["mode"]): s.value for s in waits}
    assert {k: n for k, n in waited.items() if k[0] == PLANTED} == {
        k: n for k, n in by_class.items() if k[0] == PLANTED
    }
    # of the others some were refused before they waited, where other tests ran beforehand
    assert all(count <= by_class[of] for of, count in waited.items())
    assert waited[APP_NAME, "deterministic"] > 0


def test_the_rollback_rate_is_that_of_the_replies(prometheus: Prometheus, traffic: Traffic) -> None:
    """The dashboard's own expression, over the time since the traffic began."""
    (panel,) = [p for p in panels() if p["title"] == "Rollback rate by model"]
    seconds = time.monotonic() - traffic.began + 5  # from the quiet before it
    expression = filled_in(panel["targets"][0]["expr"], window=f"{seconds:.0f}s", application=PLANTED)
    replies = traffic.replies[PLANTED]
    expected = replies["rollbacks"] / replies["verified_tokens"]
    # rate() extends each counter to the window's borders, but not to before it would have been 0: the two
    # differ in that, by a percent, or by several where scrapes are late. The counts themselves are compared
    # exactly, above.
    assert finite(prometheus, expression) == [pytest.approx(expected, rel=0.1)]
    wrong = expression.replace("rollbacks_total", "rolled_back_tokens_total")
    assert finite(prometheus, wrong) != [pytest.approx(expected, rel=0.1)], "the control"


def test_a_planted_mismatch_shows_as_such(prometheus: Prometheus, traffic: Traffic) -> None:
    """10 % of the candidates are wrong: 10 % of the committed tokens cost a rollback, and the alert is on its
    way. The allowance above is what this machine's own kernels may differ by."""
    tokens = traffic.replies[PLANTED]["verified_tokens"]
    spread = 4 * math.sqrt(CORRUPT_SHARE * (1 - CORRUPT_SHARE) / tokens)
    rate = f'llm42:rollback_rate:ratio_rate5m{{application="{PLANTED}"}}'
    (shown,) = finite(prometheus, rate)
    assert CORRUPT_SHARE - spread < shown < CORRUPT_SHARE + spread + 0.03
    alert = f'ALERTS{{alertname="LLM42RollbackRateHigh",application="{PLANTED}"}}'
    assert finite(prometheus, alert) == [1.0]
    for name in ("LLM42AuditMismatch", "LLM42NoVerifier", "LLM42FingerprintMixed"):
        assert finite(prometheus, f'ALERTS{{alertname="{name}"}}') == []


@pytest.mark.parametrize("role", ["ingress", "replica", "verifier"])
def test_each_process_says_how_many_tasks_it_has(prometheus: Prometheus, role: str) -> None:
    assert all(value >= 1 for value in finite(prometheus, f"ray_llm42_{role}_tasks") or [0.0])


def test_errors_are_counted_by_reason(prometheus: Prometheus, traffic: Traffic) -> None:
    where = f'application="{PLANTED}"'
    for reason in ("model_not_found", "invalid_value"):
        series = f'ray_llm42_rejects_total{{{where},reason="{reason}"}}'
        assert prometheus.value(series) == 1
    finished = f'ray_llm42_requests_total{{{where},outcome="finished"}}'
    assert {s.labels["mode"]: s.value for s in prometheus.query(f"sum by (mode) ({finished})")} == {
        "deterministic": REQUESTS[PLANTED] + 1,  # and one of each kind before, of best effort a stream too
        "best_effort": 3 + 2,
    }

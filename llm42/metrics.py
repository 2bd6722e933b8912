"""Every metric, defined once (name, kind, help, labels), and the small interface that emits them.

Code that counts takes a `Metrics` and names a definition of this file: `metrics.inc(ROLLBACKS)`. Inside Ray
the sink is deployments/ray_metrics.py; embedded, it is `PrometheusMetrics`; else `NullMetrics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Kind(StrEnum):
    """What a metric is to Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One definition. `name` has no unit prefix of a sink; times are in seconds; buckets are upper bounds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


CATALOGUE: list[Metric] = []


def _define(
    name: str, kind: Kind, help: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> Metric:
    metric = Metric(name, kind, help, labels, buckets)
    CATALOGUE.append(metric)
    return metric


_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

# Requests. `mode` is "deterministic" or "best_effort".
REQUESTS = _define("llm42_requests", Kind.COUNTER, "Requests that ended, by outcome", ("mode", "outcome"))
RUNNING = _define("llm42_requests_running", Kind.GAUGE, "Requests that a replica holds", ("mode",))
PROMPT_TOKENS = _define("llm42_prompt_tokens", Kind.COUNTER, "Prompt tokens of admitted requests", ("mode",))
OUTPUT_TOKENS = _define("llm42_output_tokens", Kind.COUNTER, "Output tokens sent to clients", ("mode",))
FIRST_TOKEN = _define(
    "llm42_first_token_seconds",
    Kind.HISTOGRAM,
    "Arrival to first output token (committed, when deterministic)",
    ("mode",),
    _LATENCY,
)

# Decode-verify-rollback sessions.
WINDOWS = _define("llm42_windows", Kind.COUNTER, "Windows sent to a verifier and committed")
VERIFIED_TOKENS = _define("llm42_verified_tokens", Kind.COUNTER, "Tokens committed by a verifier")
ROLLBACKS = _define("llm42_rollbacks", Kind.COUNTER, "Commits that cut candidates of the fast path")
ROLLED_BACK_TOKENS = _define("llm42_rolled_back_tokens", Kind.COUNTER, "Candidates that were thrown away")
WINDOW_TOKENS = _define("llm42_window_tokens", Kind.HISTOGRAM, "Candidates in a window", buckets=_TOKENS)
VERIFY_SECONDS = _define(
    "llm42_verify_seconds", Kind.HISTOGRAM, "Window sent to commit received", buckets=_LATENCY
)
VERIFY_RETRIES = _define("llm42_verify_retries", Kind.COUNTER, "Verify calls that had to be repeated")
AUDITS = _define("llm42_audits", Kind.COUNTER, "Windows that a second verifier has computed again")
AUDIT_MISMATCHES = _define("llm42_audit_mismatches", Kind.COUNTER, "Audited windows with another answer")
FAILOVERS = _define("llm42_failovers", Kind.COUNTER, "Streams that another replica went on with", ("mode",))

# State of a fast-path replica.
KV_USED = _define("llm42_fastpath_kv_tokens_used", Kind.GAUGE, "KV cache in use by live requests, in tokens")
WAITING = _define("llm42_fastpath_waiting", Kind.GAUGE, "Requests that wait for a place in the batch")
QUEUED = _define("llm42_requests_queued", Kind.GAUGE, "Requests that wait to be admitted", ("mode",))
ADMITTED_LIMIT = _define(
    "llm42_deterministic_limit", Kind.GAUGE, "Deterministic requests that a replica admits at once"
)
VERIFIERS_READY = _define("llm42_verifiers_ready", Kind.GAUGE, "Certified verifiers that a replica can reach")


class Metrics(Protocol):
    """A sink. Labels are keyword arguments and must be exactly those of the definition."""

    def inc(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Adds `value` >= 0 to a counter."""
        ...

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""
        ...

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
        ...


class NullMetrics:
    """Drops everything."""

    def inc(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Does nothing."""

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Does nothing."""

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Does nothing."""


class PrometheusMetrics:
    """Emits through prometheus-client into `registry` (the process default when None)."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        import prometheus_client as prom

        target = prom.REGISTRY if registry is None else registry
        kinds: dict[Kind, Any] = {Kind.COUNTER: prom.Counter, Kind.GAUGE: prom.Gauge}
        self._series: dict[str, Any] = {}
        for m in CATALOGUE:
            if m.kind is Kind.HISTOGRAM:
                series = prom.Histogram(m.name, m.help, m.labels, registry=target, buckets=m.buckets)
            else:
                series = kinds[m.kind](m.name, m.help, m.labels, registry=target)
            self._series[m.name] = series

    def _at(self, metric: Metric, labels: dict[str, str]) -> Any:
        series = self._series[metric.name]
        return series.labels(**labels) if metric.labels else series

    def inc(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Adds to a counter; ValueError when the labels are not those of the definition."""
        self._at(metric, labels).inc(value)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._at(metric, labels).set(value)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
        self._at(metric, labels).observe(value)

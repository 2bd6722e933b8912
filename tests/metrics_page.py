"""A sink for metrics that shows them as a Prometheus page, as Ray shows a service's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import prometheus_client as prom
from prometheus_client import CollectorRegistry

from llm42.telemetry.metrics import CATALOGUE, COMMON, Kind, Metric


class PrometheusMetrics:
    """Emits into a registry of its own. Counters exist from the start, at 0."""

    def __init__(self, model: str) -> None:
        """model: the value of a label that every series has."""
        self.registry = CollectorRegistry()
        self._common = {"model": model, "verifier": "local"}
        self._series: dict[str, Any] = {m.name: self._make(m) for m in CATALOGUE}
        for metric in CATALOGUE:
            if metric.kind is Kind.COUNTER:
                for labels in metric.combinations():
                    self._at(metric, labels)

    def _make(self, metric: Metric) -> Any:
        kinds: dict[Kind, Any] = {Kind.COUNTER: prom.Counter, Kind.GAUGE: prom.Gauge}
        if metric.kind is Kind.HISTOGRAM:
            names = metric.label_names
            return prom.Histogram(
                metric.name, metric.help, names, registry=self.registry, buckets=metric.buckets
            )
        return kinds[metric.kind](metric.name, metric.help, metric.label_names, registry=self.registry)

    def _at(self, metric: Metric, labels: dict[str, str]) -> Any:
        common = {label.name: self._common[label.name] for label in COMMON[metric.scope]}
        return self._series[metric.name].labels(**common, **metric.clean(labels))

    def inc(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Adds to a counter. Raises ValueError when the labels are not those of the definition."""
        self._at(metric, labels).inc(value)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._at(metric, labels).set(value)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
        self._at(metric, labels).observe(value)


@contextmanager
def metrics_page(metrics: PrometheusMetrics) -> Iterator[str]:
    """Serves the metrics on a free port of 127.0.0.1 while the block lasts, and yields the page's address."""
    server, thread = prom.start_http_server(0, addr="127.0.0.1", registry=metrics.registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

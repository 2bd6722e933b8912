"""The metric sink inside Ray: every definition of llm42.metrics through the node's metrics agent."""

from __future__ import annotations

from typing import Any

from llm42.metrics import CATALOGUE, Kind, Metric


class RayMetrics:
    """Series are made on first use. `in_replica` adds Serve's application, deployment and replica tags."""

    def __init__(self, in_replica: bool) -> None:
        if in_replica:
            from ray.serve import metrics as sink
        else:
            from ray.util import metrics as sink
        self._kinds: dict[Kind, Any] = {
            Kind.COUNTER: sink.Counter,
            Kind.GAUGE: sink.Gauge,
            Kind.HISTOGRAM: sink.Histogram,
        }
        self._known = {m.name for m in CATALOGUE}
        self._series: dict[str, Any] = {}

    def _at(self, metric: Metric) -> Any:
        series = self._series.get(metric.name)
        if series is None:
            assert metric.name in self._known, f"{metric.name} is not in the catalogue"
            extra = {"boundaries": list(metric.buckets)} if metric.kind is Kind.HISTOGRAM else {}
            kind = self._kinds[metric.kind]
            series = kind(metric.name, description=metric.help, tag_keys=metric.labels, **extra)
            self._series[metric.name] = series
        return series

    def inc(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Adds to a counter; zero is dropped, which Ray refuses."""
        if value > 0:
            self._at(metric).inc(value, tags=labels)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._at(metric).set(value, tags=labels)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds one observation to a histogram; Ray keeps none of value 0 or below."""
        self._at(metric).observe(max(value, 1e-9), tags=labels)

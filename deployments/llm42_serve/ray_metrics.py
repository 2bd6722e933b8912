"""The metric sink inside Ray: definitions of llm42.telemetry.metrics through the node's metrics agent, so
that one scrape of a node shows all its processes.

What Ray makes of histograms: the buckets are exact, the sum is an estimate from the buckets' middles.
So times that are added up are counters of their own.
"""

from __future__ import annotations

from typing import Any

import ray

from llm42.telemetry.metrics import CATALOGUE, Kind, Metric, Metrics, Scope


class RayMetrics(Metrics):
    """Series of one scope. Inside Serve they also have application, deployment and replica as labels."""

    def __init__(self, scope: Scope, in_replica: bool, **common: str) -> None:
        """common: the values of the labels that every series of this scope has."""
        if in_replica:
            from ray.serve import metrics as sink
        else:
            from ray.util import metrics as sink
        self._series: dict[str, Any] = {}
        for metric in CATALOGUE:
            if metric.scope is scope:
                extra = {"boundaries": list(metric.buckets)} if metric.kind is Kind.HISTOGRAM else {}
                make = getattr(sink, metric.kind.title())
                series = make(metric.name, description=metric.help, tag_keys=metric.label_names, **extra)
                series.set_default_tags(dict(common))
                self._series[metric.name] = series
                # Counters exist from the start: Prometheus takes no increase from a series that begins with
                # 1, so the first audit mismatch would go unnoticed. `inc` refuses 0, hence the call beneath.
                for labels in metric.combinations() if metric.kind is Kind.COUNTER else ():
                    series._record(0.0, tags=labels)

    def inc(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Adds to a counter; zero is dropped, which Ray refuses."""
        if value > 0:
            self._series[metric.name].inc(value, tags=metric.clean(labels))

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._series[metric.name].set(value, tags=metric.clean(labels))

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds one observation to a histogram; Ray keeps none of value 0 or below."""
        self._series[metric.name].observe(max(value, 1e-9), tags=metric.clean(labels))


def actor_metrics(scope: Scope, **common: str) -> Metrics:
    """The sink of a plain actor; nothing outside of Ray."""
    return RayMetrics(scope, in_replica=False, **common) if ray.is_initialized() else Metrics()

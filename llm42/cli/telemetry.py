"""What the command line has for metrics: `llm42 top`, and a metrics page beside commands without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from llm42.config import Settings
    from llm42.telemetry.metrics import Metrics

err = Console(stderr=True)
PageArgument = Annotated[
    str, typer.Argument(help="address of the metrics page, which `llm42 serve` prints", metavar="URL")
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option("--metrics-port", help="shows metrics on this port; 0: a free one", min=0, max=65535),
]


def top(
    url: PageArgument = "http://127.0.0.1:8090/metrics",
    once: Annotated[bool, typer.Option(help="print the figures since the start, and end")] = False,
    interval: Annotated[float, typer.Option(help="seconds between two looks", min=0.2)] = 2.0,
) -> None:
    """Shows rollback rate, latency, verifiers and errors of a running service, live."""
    from llm42.cli.top import run_top

    run_top(url, once, interval)


@contextmanager
def metrics_for(settings: Settings, port: int | None) -> Iterator[Metrics]:
    """A sink, and its page for as long as the block lasts; nothing without a port."""
    from llm42.telemetry.metrics import NullMetrics

    if port is None:
        yield NullMetrics()
        return
    from llm42.telemetry.prometheus import PrometheusMetrics, metrics_page

    metrics = PrometheusMetrics(settings.model.name)
    with metrics_page(metrics, port) as url:
        err.print(f"Metrics: {url}", soft_wrap=True)
        yield metrics

"""Draws the dashboard's panels from what a real Prometheus says of a real service under changing load.

    python -m benchmarks.service.dashboard_picture

Needs matplotlib (pip install 'llm42[pictures]') and Prometheus (apt-get install prometheus).
The service makes 10 % of its candidates wrong on purpose, so that there is something to see. Writes
docs/dashboard.png and benchmarks/results/dashboard.json.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib.pyplot as plt

from benchmarks.lib.processes import free_port
from benchmarks.lib.prometheus import Prometheus, filled_in, panels
from benchmarks.lib.report import Figure, report
from llm42.config import Settings
from llm42.config.serve_file import absolute
from llm42_serve.launch import Service, prepare_environment

PICTURE = Path(__file__).parents[2] / "docs" / "dashboard.png"
CORRUPT_SHARE = 0.1
PHASES = ((2, 1, 40.0), (5, 3, 40.0), (8, 0, 30.0), (1, 6, 40.0))
"""(deterministic clients, best-effort clients, seconds)"""
STEP_S = 2.0
WINDOW = "40s"
COLUMNS = 4
Series = list[tuple[str, list[tuple[float, float]]]]


def settings() -> Settings:
    """The default model, one replica that is wrong now and then, and many audits."""
    return absolute(
        Settings.load(
            {
                "engine": {"threads": 1, "corrupt_share": CORRUPT_SHARE},
                "verifier": {"audit_share": 0.1},
                "session": {"mode": "verify"},
                "server": {"port": free_port(), "fastpath_replicas": 2},
            }
        )
    )


async def load(url: str, model: str) -> dict[str, int]:
    """The phases, one after another; returns what the replies say, summed."""
    totals = dict.fromkeys(("rollbacks", "verified_tokens", "windows", "requests"), 0)

    async def client(http: httpx.AsyncClient, number: int, deterministic: bool, until: float) -> None:
        turn = 0
        while time.monotonic() < until:
            body = {
                "model": model if turn % 3 != 1 else "another",
                "prompt": f"Story {number}, part {turn}:",
                "max_tokens": 32,
                "temperature": 0.8,
                "seed": number,
                "deterministic": deterministic,
            }
            reply = await http.post(f"{url}/v1/completions", json=body)
            turn += 1
            if reply.status_code == 200 and deterministic:
                evidence = reply.json()["llm42"]
                totals["requests"] += 1
                for name in ("rollbacks", "verified_tokens", "windows"):
                    totals[name] += evidence[name]

    async with httpx.AsyncClient(timeout=300) as http:
        for det, best, seconds in PHASES:
            until = time.monotonic() + seconds
            kinds = [True] * det + [False] * best
            await asyncio.gather(*(client(http, i, kind, until) for i, kind in enumerate(kinds)))
    return totals


def legend(template: str, labels: dict[str, str]) -> str:
    """Grafana's legend template with a series' labels."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), template)


def panel_series(prometheus: Prometheus, panel: dict[str, Any], start: float, end: float) -> Series:
    """Every series of a panel, values that are no numbers left out."""
    found: Series = []
    for target in panel["targets"]:
        expression = filled_in(target["expr"], window=WINDOW)
        for labels, points in prometheus.query_range(expression, start, end, STEP_S):
            values = {t: v for t, v in points if math.isfinite(v)}
            steps = [start + STEP_S * i for i in range(int((end - start) / STEP_S) + 1)]
            # a step without a value breaks the line
            kept = [(t - start, values.get(round(t, 3), math.nan)) for t in steps] if values else []
            found.append((legend(target["legendFormat"], labels), kept))
    return found


def draw(shown: list[tuple[dict[str, Any], Series]], footer: str) -> None:
    """One field for each panel: a number where the dashboard has one, else lines."""
    rows = -(-len(shown) // COLUMNS)
    heights = [0.3, *[1.0] * (rows - 1)]  # the first row holds the dashboard's single numbers
    size = (5.2 * COLUMNS, 3.1 * sum(heights))
    figure, axes = plt.subplots(rows, COLUMNS, figsize=size, height_ratios=heights)
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    for axis, (panel, series) in zip(axes.flat, shown, strict=False):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        scale, suffix = (100.0, " %") if unit == "percentunit" else (1.0, " s" if unit == "s" else "")
        axis.set_title(f"{panel['title']}{f' ({suffix.strip()})' if suffix else ''}", fontsize=11, loc="left")
        if panel["type"] == "stat":
            axis.axis("off")
            last = [[v for _, v in points if math.isfinite(v)][-1] for _, points in series if points]
            text = "\n".join(f"{scale * value:.4g}{suffix}" for value in last)
            axis.text(0.5, 0.5, text, fontsize=30, ha="center", va="center", transform=axis.transAxes)
            continue
        for name, points in series[:10]:
            label = textwrap.shorten(name.replace("SmolLM2-135M-Instruct ", ""), 34, placeholder=" ...")
            axis.plot([t for t, _ in points], [scale * v for _, v in points], linewidth=1.2, label=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7, loc="upper left", framealpha=0.6)
    figure.text(0.01, 0.003, footer, fontsize=9, color="dimgray")
    figure.tight_layout(rect=(0, 0.012, 1, 1))
    figure.savefig(PICTURE, dpi=64)


def main() -> None:
    """Starts everything, waits for the load, draws."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    prepare_environment()
    wanted = settings()
    with tempfile.TemporaryDirectory() as directory, Service(wanted) as service:
        service.wait_deterministic()
        target = service.metrics_url.removeprefix("http://").removesuffix("/metrics")
        with Prometheus(Path(directory), [target]) as prometheus:
            time.sleep(10)
            start = float(int(time.time()))
            totals = asyncio.run(load(service.url, wanted.model.name))
            end = time.time()
            prometheus.settled("sum(ray_llm42_committed_tokens_total)")
            shown = [(panel, panel_series(prometheus, panel, start, end)) for panel in panels()]
            counted = prometheus.value("sum(ray_llm42_rollbacks_total)")
            committed = prometheus.value("sum(ray_llm42_committed_tokens_total)")
    empty = [panel["title"] for panel, series in shown if not any(points for _, points in series)]
    assert not empty, f"panels without data: {empty}"
    figures = {
        "rollback_rate_prometheus": Figure(counted / committed, "rollbacks per committed token"),
        "rollback_rate_replies": Figure(
            totals["rollbacks"] / totals["verified_tokens"], "rollbacks per committed token"
        ),
        "planted_share": Figure(CORRUPT_SHARE, "of candidates"),
    }
    path = report("dashboard", figures, {"replies": totals, "phases": PHASES, "window": WINDOW})
    day = time.strftime("%Y-%m-%d", time.gmtime())
    draw(
        shown,
        f"{day}; SmolLM2-135M on {os.cpu_count()} CPU cores, 2 replicas, 1 verifier; {CORRUPT_SHARE:.0%} of"
        f" the candidates made wrong on purpose; x: seconds. Drawn by matplotlib. Data: {path.name}",
    )
    print(f"{PICTURE}, {path}")


if __name__ == "__main__":
    main()

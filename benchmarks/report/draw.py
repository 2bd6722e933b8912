"""Draws charts with matplotlib, the same bytes each time: no date, fixed ids, letters left as text."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.report.charts import Chart

COLOURS = ("#64748b", "#0f5fb8", "#d97706", "#7c3aed")


def draw(chart: Chart, folder: Path) -> None:
    """Writes one picture."""
    style = {"svg.hashsalt": "llm42", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with plt.rc_context({**plt.rcParamsDefault, **style}):
        figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
        width = 0.8 / len(chart.series)
        for number, (name, values) in enumerate(chart.series):
            at = [place + (number - (len(chart.series) - 1) / 2) * width for place in range(len(values))]
            there = [(x, y) for x, y in zip(at, values, strict=True) if y is not None]
            bars = axes.bar(
                [x for x, _ in there],
                [y for _, y in there],
                width,
                label=name,
                color=COLOURS[number % len(COLOURS)],
            )
            axes.bar_label(bars, fmt=_short, fontsize=6)
        if chart.line is not None:
            axes.axhline(chart.line, color="#334155", linewidth=1, label="plain vLLM")
        axes.set_xticks(range(len(chart.labels)), [label.replace(", ", "\n") for label in chart.labels])
        axes.set_ylabel(chart.unit)
        axes.set_title(chart.title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=len(chart.series) + 1, frameon=False)
        metadata = {"Date": None, "Creator": None, "Description": f"numbers {chart.digest}"}
        figure.savefig(folder / chart.file, format="svg", metadata=metadata)
        plt.close(figure)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""docs/performance.md, from results: the same text for the same results. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.report.charts import charts
from benchmarks.report.headlines import FIRST, HEADLINES, METHOD, SUMMARY
from benchmarks.report.results import Result, Row

PICTURES = "figures"
"""The folder of pictures, beside the page."""
WAITS = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99"))


def page(results: Mapping[str, Result], explained: Mapping[str, str]) -> str:
    """The whole text. `explained` has the page under measurements/ that tells of a result, by result."""
    names = [name for name in FIRST if name in results]
    names += [name for name in results if name not in names]
    ordered = [results[name] for name in names]
    parts = [
        "# Performance", SUMMARY, *_summary(results), *_missing(results), *_pictures(results),
        "## Where we lose", *_losses(ordered), "## Method", METHOD, "## Every figure",
        "One row a figure, by result. *Met* says whether a target was reached.",
    ]  # fmt: skip
    for result in ordered:
        parts += _section(result, explained.get(result.name))
    return "\n\n".join(parts) + "\n"


def number(value: float | None) -> str:
    """As a reader needs it: four digits, thousands with commas, nothing for None."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{round(value, 4):.4g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def target(row: Row) -> str:
    """With the side on which it is met."""
    if row.target is None:
        return ""
    return f"{'at least' if row.better == 'higher' else 'at most'} {number(row.target)}"


def met(row: Row) -> str:
    """Nothing without a target."""
    return "" if row.target is None else "yes" if row.met else "**no**"


def _summary(results: Mapping[str, Result]) -> Iterator[str]:
    rows = []
    for words, name, figure in HEADLINES:
        row = results[name].row(figure) if name in results else None
        if row is not None:
            cells = [number(row.value), number(row.predicted), target(row), met(row), row.date]
            rows.append([words, *cells, f"[{name}](#{name})"])
    yield table(["what", "measured", "predicted", "target", "met", "date", "result"], rows)
    every = [row for result in results.values() for row in result.rows]
    judged = [row for row in every if row.target is not None]
    missed = sum(row.missed for row in judged)
    yield (
        f"{len(every):,} figures in {len(results)} results. {len(judged)} of them have a target: "
        f"{len(judged) - missed} met, {missed} missed."
    )


def _missing(results: Mapping[str, Result]) -> Iterator[str]:
    """Results that the top of the page asks for and that are not there, and figures that they lack."""
    told = [f"`{name}`" for name in FIRST if name not in results]
    told += [f"`{f}` of `{n}`" for _, n, f in HEADLINES if n in results and results[n].row(f) is None]
    if told:
        yield f"Not measured yet: {', '.join(told)}."


def _pictures(results: Mapping[str, Result]) -> list[str]:
    return [f"![{chart.title}]({PICTURES}/{chart.file})" for chart in charts(results)]


def _losses(ordered: Sequence[Result]) -> Iterator[str]:
    missed = [(result, row) for result in ordered for row in result.rows if row.missed]
    yield f"Targets that were missed: {len(missed)}." if missed else "No target was missed."
    if missed:
        rows = [
            [f"[{each.name}](#{each.name})", f"`{row.name}`", number(row.value), row.unit, target(row)]
            for each, row in missed
        ]
        yield table(["result", "figure", "measured", "unit", "target"], rows)
    behind = [
        (result, row) for result in ordered for row in result.rows if row.behind_vllm and not row.missed
    ]
    if behind:
        yield "Slower than plain vLLM by more than 2 %, within the target or without one:"
        rows = [[f"[{each.name}](#{each.name})", f"`{row.name}`", number(row.value)] for each, row in behind]
        yield table(["result", "figure", "over vLLM"], rows)


def _section(result: Result, explained: str | None) -> Iterator[str]:
    yield f"### {result.name}"
    told = f" Told in [{explained}](measurements/{explained})." if explained else ""
    file = f"[{result.name}.json](../benchmarks/results/{result.name}.json)"
    yield f"{result.date}, {file}.{told}"
    yield f"- Machine: {result.machine}\n- Versions: {result.versions}"
    yield "```\n" + "\n".join(line.strip() for line in result.command.split("; ")) + "\n```"
    if result.note:
        yield result.note
    rows = [
        [f"`{r.name}`", number(r.value), r.unit, number(r.predicted), target(r), met(r), r.date]
        for r in result.rows
    ]
    yield table(["figure", "measured", "unit", "predicted", "target", "met", "date"], rows)
    if result.runs:
        yield "Each turn of each system. Waits in ms: p50, p99 to the first token; p50, p99 between tokens."
        yield table(
            [
                "load",
                "system",
                "tokens/s",
                "predicted",
                "waits by class",
                "client's cores",
                "rollbacks",
                "lost tokens",
            ],
            [_run(run) for run in result.runs],
        )


def _run(run: Mapping[str, Any]) -> list[str]:
    waits = []
    for who, kinds in run.get("waits", {}).items():
        told = [number(kinds.get(kind, {}).get(at)) for kind, at in WAITS]
        waits.append(f"{who}: {told[0]}, {told[1]}; {told[2]}, {told[3]}")
    ends = [number(run.get(key)) for key in ("client_cpu", "rollbacks", "lost_tokens")]
    rates = [number(run["tok_s"]), number(run.get("predicted_tok_s"))]
    return [f"`{run['row']}`", str(run["system"]), *rates, "<br>".join(waits), *ends]

"""From what the systems found in each round to named figures: pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from benchmarks.lib.report import Figure
from benchmarks.peers.cells import TARGETS, is_low, is_shape, percent_of, shape_of
from benchmarks.peers.loads import SHAPES

Round = Mapping[str, Mapping[str, Any]]
"""By system: what one run found. All of one command."""
Rows = Mapping[str, Sequence[Round]]
CLIENT_LIMIT = 0.7
"""Cores: above it the client is what is measured."""
AUTO_SHARES = (2, 10, 50)


def figures_of(rows: Rows, level: str) -> dict[str, Figure]:
    """Of one level; those over HTTP have names that begin with http_, but for the one that is only there."""
    found: dict[str, Figure] = {}
    for name, rounds in rows.items():
        for lane in ("invariant", "canonical", "auto", "verify"):
            if (value := ratio(rounds, lane)) is not None and "_open_" not in name:
                found[f"{lane}_{name}"] = Figure(value, "of vLLM's tokens/s", None, "higher")
    found |= _kept(found) | _best_effort(rows) | _lost(rows)
    prefix = "http_" if level == "http" else ""
    told = {f"{prefix}{key}": figure for key, figure in found.items()}
    if level == "http":  # fewer loads are meant to run there
        told = {k: replace(f, target=None) if "loads_in" in k else f for k, f in told.items()}
    if level == "http":
        told |= _waits(rows) | _client(rows)
    return told


def ratio(rounds: Sequence[Round], lane: str, key: str = "tok_s") -> float | None:
    """The median over the rounds of a system's value over vLLM's in the same round."""
    each = [r[lane][key] / r["vllm"][key] for r in rounds if lane in r and "vllm" in r and r["vllm"].get(key)]
    return round(statistics.median(each), 4) if each else None


def _kept(ratios: Mapping[str, Figure]) -> dict[str, Figure]:
    """Means over the loads that were run, and the worst; of how many loads is a figure of its own."""
    found: dict[str, Figure] = {}
    for lane, percent in (*(("auto", percent) for percent in AUTO_SHARES), ("canonical", 100)):
        mine = {
            name.removeprefix(f"{lane}_"): figure.value
            for name, figure in ratios.items()
            if name.startswith(f"{lane}_{percent}_")
        }
        shapes = [value for name, value in mine.items() if is_shape(name)]
        low = [value for name, value in mine.items() if is_low(name)]
        if shapes:
            found |= {
                f"kept_{percent}": _judged(f"kept_{percent}", round(statistics.mean(shapes), 4), "ratio"),
                f"worst_{percent}": _judged(f"worst_{percent}", min(shapes), "ratio"),
                f"loads_in_kept_{percent}": Figure(len(shapes), "of 6 loads", len(SHAPES), "higher"),
            }
        if low:
            found[f"worst_low_{percent}"] = Figure(min(low), "ratio", None, "higher")
    return found


def _best_effort(rows: Rows) -> dict[str, Figure]:
    """Time per token of best effort beside one in ten deterministic, over vLLM's: the worst load."""
    each = {}
    for name, rounds in rows.items():
        if percent_of(name) != 10 or not is_shape(name):
            continue
        ratios = [
            mine / theirs for r in rounds
            if "auto" in r and "vllm" in r
            and (mine := wait(r["auto"], "best_effort", "itl_ms", "p50"))
            and (theirs := wait(r["vllm"], "all", "itl_ms", "p50"))
        ]  # fmt: skip
        if ratios:
            each[name] = round(statistics.median(ratios), 4)
    found = {f"best_effort_p50_ratio_{name}": Figure(value, "ratio") for name, value in each.items()}
    if each:
        name = "best_effort_p50_ratio_10"
        found[name] = _judged(name, max(each.values()), "ratio")
    return found


def _lost(rows: Rows) -> dict[str, Figure]:
    """Rollbacks and tokens lost; of verify pinned there must be some, or nothing was verified."""
    found, sums = dict[str, Figure](), dict.fromkeys(("windows", "rollbacks"), 0)
    for name, rounds in rows.items():
        for lane in ("auto", "verify"):
            runs = [r[lane] for r in rounds if lane in r and r[lane].get("committed")]
            committed = sum(run["committed"] for run in runs)
            if not committed:
                continue
            total = {
                key: sum(run["stats"][key] for run in runs)
                for key in ("windows", "rollbacks", "rolled_back_tokens")
            }
            per = 1000 / committed
            found[f"rollbacks_per_1000_{lane}_{name}"] = Figure(
                round(per * total["rollbacks"], 3), "per 1000 committed tokens"
            )
            found[f"lost_per_1000_{lane}_{name}"] = Figure(
                round(per * total["rolled_back_tokens"], 2), "tokens per 1000 committed tokens"
            )
            if lane == "verify":
                sums = {key: sums[key] + total[key] for key in sums}
    if any(name.startswith("rollbacks_per_1000_verify") for name in found):
        found |= {f"verify_{key}": Figure(value, key, 1, "higher") for key, value in sums.items()}
    return found


def _waits(rows: Rows) -> dict[str, Figure]:
    """At 60 % of what vLLM takes, with requests that come at random."""
    each = [
        mine / theirs
        for name, rounds in rows.items() if "_open_" in name and percent_of(name) == 100
        for r in rounds if "canonical" in r and "vllm" in r
        and (mine := wait(r["canonical"], "all", "ttft_ms", "p99"))
        and (theirs := wait(r["vllm"], "all", "ttft_ms", "p99"))
    ]  # fmt: skip
    name = "ttft_p99_ratio_100"
    return {name: _judged(name, round(statistics.median(each), 4), "ratio")} if each else {}


def _client(rows: Rows) -> dict[str, Figure]:
    """The busiest the client was, with each system."""
    most: dict[str, float] = {}
    for rounds in rows.values():
        for each in rounds:
            for lane, run in each.items():
                most[lane] = max(most.get(lane, 0.0), run.get("client_cpu", 0.0))
    return {f"client_cpu_{lane}": Figure(round(v, 3), "cores", CLIENT_LIMIT) for lane, v in most.items()}


def wait(run: Mapping[str, Any], who: str, kind: str, at: str) -> float | None:
    """Of what a run found; None where there was none."""
    value: float | None = run.get("waits", {}).get(who, {}).get(kind, {}).get(at)
    return value


def _judged(name: str, value: float, unit: str) -> Figure:
    if name not in TARGETS:
        return Figure(value, unit, None, "higher")
    target, better = TARGETS[name]
    way: Literal["higher", "lower"] = "higher" if better == "higher" else "lower"
    return Figure(value, unit, target, way)


def table(rows: Rows) -> list[dict[str, Any]]:
    """A line for each row, system and round: what a page about performance shows."""
    from benchmarks.peers.cells import predicted

    return [
        {
            "row": name, "load": shape_of(name), "percent": percent_of(name), "system": lane,
            "tok_s": round(run["tok_s"], 1), "predicted_tok_s": predicted(name, lane),
            "waits": run.get("waits", {}), "client_cpu": run.get("client_cpu"),
            "rollbacks": run.get("stats", {}).get("rollbacks"),
            "lost_tokens": run.get("stats", {}).get("rolled_back_tokens"),
        }
        for name, rounds in rows.items() for each in rounds for lane, run in each.items()
    ]  # fmt: skip

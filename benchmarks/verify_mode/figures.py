"""From what the lanes of each round found to named figures: pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.lib.report import Figure
from benchmarks.verify_mode.cells import CELLS, TARGETS, loads_of, percent_of, stage_of

Round = Mapping[str, Mapping[str, Any]]
"""By lane: what one run found."""
NO_TARGET_AT = "at_8"
"""Where vLLM may split its attention, rollbacks are only written down."""
MOSTLY, HARDLY = 0.9, 0.02
"""Of the prompts' tokens: an engine computes the last block of a prompt anew."""
UNITS = {"rollbacks": "per 1000 committed tokens"}


def figures_of(rows: Mapping[str, Sequence[Round]], cells: Iterable[str] = CELLS) -> dict[str, Figure]:
    """Of the rows that were run. A figure of several loads is the worst of them, and waits for all."""
    found: dict[str, Figure] = {}
    for cell in cells:
        if stage_of(cell) == "steps":
            continue
        judge = _rollbacks if cell.startswith("rollbacks") else _kept
        found |= (_prefill_once if cell.startswith("prefill") else judge)(cell, rows)
    return found | _over_pinned(rows)


def steps_figure(ratios: Sequence[float]) -> dict[str, Figure]:
    """The worst of the decode steps."""
    if not ratios:
        return {}
    return {"best_effort_step_max": Figure(max(ratios), "ratio", TARGETS["best_effort_step_max"])}


def ratio(rounds: Sequence[Round], above: str, *below: str) -> float | None:
    """The median over the rounds of one lane's rate over the best of others', in the same round."""
    found = []
    for each in rounds:
        others = [each[lane]["tok_s"] for lane in below if lane in each]
        if above in each and len(others) == len(below) and max(others):
            found.append(each[above]["tok_s"] / max(others))
    return round(statistics.median(found), 4) if found else None


def rates(rounds: Sequence[Round]) -> dict[str, float]:
    """Median tokens per second of each lane."""
    lanes = dict.fromkeys(lane for each in rounds for lane in each)
    return {
        lane: round(statistics.median(each[lane]["tok_s"] for each in rounds if lane in each), 1)
        for lane in lanes
    }


def differing(answers: Round) -> tuple[int, int]:
    """Deterministic answers that two lanes or more of a round have, and those of them that are not equal."""
    by_number: dict[str, list[str]] = {}
    for lane in answers.values():
        for number, digest in lane.get("digests", {}).items():
            by_number.setdefault(str(number), []).append(digest)
    several = [digests for digests in by_number.values() if len(digests) > 1]
    return len(several), sum(len(set(digests)) > 1 for digests in several)


def cached_share(run: Mapping[str, Any]) -> float | None:
    """Of the deterministic requests' prompt tokens, what the engine says it found in its cache."""
    prompts = run.get("engine_prompts", {"tokens": 0})
    return round(prompts["cached"] / prompts["tokens"], 4) if prompts["tokens"] else None


def wrongly_cached(answers: Round, mostly: float = MOSTLY) -> list[str]:
    """Where `warmed` and `verify` did not differ in the way in which they are to be compared."""
    shares = {lane: cached_share(answers[lane]) for lane in ("warmed", "verify") if "warmed" in answers}
    bounds = {"warmed": (mostly, 1.0), "verify": (0.0, HARDLY)}
    return [
        f"{lane}: {share} of its prompts were cached" for lane, share in shares.items()
        if share is not None and not bounds[lane][0] <= share <= bounds[lane][1]
    ]  # fmt: skip


def _prefill_once(cell: str, rows: Mapping[str, Sequence[Round]]) -> dict[str, Figure]:
    """An upper bound, and what was cached in either lane."""
    (name,), percent = loads_of(cell), percent_of(cell)
    rounds = [each for each in rows.get(name, ()) if {"verify", "warmed"} <= each.keys()]
    found = dict[str, Figure]()
    if (value := ratio(rounds, "warmed", "verify")) is not None:
        found[f"prefill_once_gain_{percent}"] = Figure(value, "ratio", TARGETS[cell], "higher")
    for lane in ("warmed", "verify"):
        shares = [share for each in rounds if (share := cached_share(each[lane])) is not None]
        if shares:
            title = f"prefill_once_cached_{percent}_{lane}"
            found[title] = Figure(statistics.median(shares), "of prompt tokens", None, "higher")
    return found


def _kept(cell: str, rows: Mapping[str, Sequence[Round]]) -> dict[str, Figure]:
    lane, target = ("auto" if cell.startswith("auto") else "verify"), TARGETS[cell]
    names, found = list(loads_of(cell)), dict[str, Figure]()
    for name in names:
        if (value := ratio(rows.get(name, ()), lane, "vllm")) is not None:
            title = cell if len(names) == 1 else f"{cell}_{name.split('_', 1)[1]}"
            found[title] = Figure(value, "ratio", target, "higher")
    if len(names) > 1 and len(found) == len(names):
        found[cell] = Figure(min(f.value for f in found.values()), "ratio", target, "higher")
    return found


def _rollbacks(cell: str, rows: Mapping[str, Sequence[Round]]) -> dict[str, Figure]:
    found, unit = dict[str, Figure](), UNITS["rollbacks"]
    for name in loads_of(cell):
        runs = [each["verify"] for each in rows.get(name, ()) if "verify" in each]
        committed = sum(run["committed"] for run in runs)
        if committed:
            per_1000 = 1000 * sum(run["stats"]["rollbacks"] for run in runs) / committed
            target = None if name.endswith(NO_TARGET_AT) else TARGETS[cell]
            found[name] = Figure(round(per_1000, 3), unit, target)
    judged = [f.value for f in found.values() if f.target is not None]
    if judged and len(found) == len(loads_of(cell)):
        found[cell] = Figure(max(judged), unit, TARGETS[cell])
    return found


def _over_pinned(rows: Mapping[str, Sequence[Round]]) -> dict[str, Figure]:
    """auto over the better of the pinned modes that ran beside it."""
    found, target = dict[str, Figure](), TARGETS["auto_over_pinned"]
    for name, rounds in rows.items():
        pinned = [m for m in ("verify", "direct") if any("auto" in each and m in each for each in rounds)]
        if pinned and (value := ratio(rounds, "auto", *pinned)) is not None:
            found[f"auto_over_pinned_{name}"] = Figure(value, "ratio", target, "higher")
    if found:
        found["auto_over_pinned"] = Figure(min(f.value for f in found.values()), "ratio", target, "higher")
    return found

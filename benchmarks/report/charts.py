"""What each picture shows, as numbers. Pure: the page names a picture if its numbers are there."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from benchmarks.report.results import AGAINST_VLLM, Result


@dataclass(frozen=True)
class Chart:
    """Bars: a group for each label, a bar in it for each series. None where nothing was measured."""

    file: str
    title: str
    unit: str
    labels: tuple[str, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    line: float | None = None
    """Drawn across: what plain vLLM has."""

    @property
    def digest(self) -> str:
        """Of everything it shows. The picture carries it, so that an old one is noticed without drawing."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def charts(results: Mapping[str, Result]) -> list[Chart]:
    """Of the results that are there."""
    made = (_peers(results), _loads(results), _steps(results), _modes(results), _two_gpus(results))
    return [chart for group in made for chart in group]


def shape(name: str) -> str:
    """Of a load's name, as a reader needs it: 256_256 is 256/256."""
    return re.sub(r"(\d+)_(\d+)", r"\1/\2", name).replace("_", " ")


def _peers(results: Mapping[str, Result]) -> list[Chart]:
    """A picture for each share of deterministic requests, without HTTP and over it."""
    if "h200-peers" not in results:
        return []
    found: dict[tuple[str, int], dict[str, dict[str, float]]] = {}
    for row in results["h200-peers"].rows:
        name = re.fullmatch(r"(http_)?(canonical|auto|verify|invariant)_(\d+)_(\w+)", row.name)
        if name and row.unit == AGAINST_VLLM:
            key = "http-" if name[1] else "", int(name[3])
            found.setdefault(key, {}).setdefault(name[4], {})[name[2]] = row.value
    made = []
    for (level, percent), loads in sorted(found.items()):
        systems = [
            s for s in ("canonical", "auto", "verify", "invariant") if any(s in v for v in loads.values())
        ]
        series = tuple((s, tuple(values.get(s) for values in loads.values())) for s in systems)
        title = f"Output rate over plain vLLM's, {percent} % deterministic{', over HTTP' if level else ''}"
        labels = tuple(shape(load) for load in loads)
        made.append(Chart(f"peers-{level}{percent}.svg", title, "of vLLM's tokens/s", labels, series, 1.0))
    return made


def _loads(results: Mapping[str, Result]) -> list[Chart]:
    names = ("256_256", "512_512", "1024_256", "256_256_sampled", "256_256_restricted")
    sides = (("plain vLLM", "vllm"), ("canonical", "ours"), ("vLLM, batch invariant", "invariant"))
    title = "Every request deterministic: output tokens per second, one H200, 8B shape, no HTTP"
    return _sides(results, "loads.svg", title, "tokens/s", [f"load_{name}" for name in names], sides)


def _steps(results: Mapping[str, Result]) -> list[Chart]:
    names = [f"step_{name}" for name in ("1", "8", "12", "64", "100", "200", "300", "1_32k", "8_32k")]
    sides = (("plain vLLM", "vllm"), ("canonical", "ours"))
    title = "Time between tokens by requests at a time, one H200, 8B shape, 1k context unless said"
    return _sides(results, "steps.svg", title, "ms", names, sides)


def _sides(
    results: Mapping[str, Result],
    file: str,
    title: str,
    unit: str,
    names: list[str],
    sides: tuple[tuple[str, str], ...],
) -> list[Chart]:
    """Figures NAME_SIDE of h200-direct."""
    if "h200-direct" not in results:
        return []
    value = results["h200-direct"].value
    labels = tuple(shape(re.sub(r"^(load|step)_", "", name).replace("_32k", " at 32k")) for name in names)
    series = tuple((label, tuple(value(f"{name}_{side}") for name in names)) for label, side in sides)
    return [Chart(file, title, unit, labels, series)]


def _modes(results: Mapping[str, Result]) -> list[Chart]:
    if "h200-verify-mode" not in results:
        return []
    value = results["h200-verify-mode"].value
    cases = [(p, load) for load in ("256_256", "1024_256") for p in (2, 10, 50, 100)]
    series = tuple(
        (label, tuple(value(f"{prefix}kept_{p}_{load}") for p, load in cases))
        for label, prefix in (("verify", ""), ("auto", "auto_"))
    )
    labels = tuple(f"{p} %, {shape(load)}" for p, load in cases)
    title = "Output rate over plain vLLM's by share of deterministic requests, one H200"
    return [Chart("modes.svg", title, "of vLLM's tokens/s", labels, series, 1.0)]


def _two_gpus(results: Mapping[str, Result]) -> list[Chart]:
    if "h200x2" not in results:
        return []
    value, shares = results["h200x2"].value, (0, 10, 50, 100)
    series = tuple((each, tuple(value(f"{each}_{p}_tok_s") for p in shares)) for each in ("apart", "beside"))
    title = "Two H200s over HTTP by share of deterministic requests, verify mode"
    return [Chart("two-gpus.svg", title, "tokens/s", tuple(f"{p} %" for p in shares), series)]

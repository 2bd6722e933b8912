"""Results as the page needs them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.report import validate
from benchmarks.report.predictions import predictions_of

AGAINST_VLLM = "of vLLM's tokens/s"
"""The unit of figures that are one system's rate over plain vLLM's in the same turn."""
NOTICED = 0.02
"""A ratio within this of 1 is neither a gain nor a loss."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `target` and `predicted` are None where there was none."""

    name: str
    value: float
    unit: str
    target: float | None
    better: str
    met: bool
    predicted: float | None
    date: str
    """When it was measured: of its own run, where a file joins several."""

    @property
    def missed(self) -> bool:
        """It has a target and did not reach it."""
        return not self.met

    @property
    def behind_vllm(self) -> bool:
        """A ratio of ours to vLLM on the wrong side of 1: not a prediction, not vLLM's own other mode."""
        if self.name.removeprefix("http_").startswith(("predicted_", "invariant_")):
            return False
        named = "kept" in self.name or self.name.endswith(("_over_vllm", "_cost"))
        if self.unit != AGAINST_VLLM and not (self.unit == "ratio" and named):
            return False
        return self.value < 1 - NOTICED if self.better == "higher" else self.value > 1 + NOTICED


@dataclass(frozen=True, slots=True)
class Result:
    """One file of benchmarks/results."""

    name: str
    date: str
    machine: str
    versions: str
    command: str
    rows: tuple[Row, ...]
    runs: tuple[Mapping[str, Any], ...]
    """What each system did in each turn, where the file has it: `row`, `system`, `tok_s` and more."""
    note: str
    """What the file says about itself; may be empty."""

    def row(self, name: str) -> Row | None:
        """The figure of that name; None if there is none."""
        return next((row for row in self.rows if row.name == name), None)

    def value(self, name: str) -> float | None:
        """Of the figure of that name."""
        row = self.row(name)
        return None if row is None else row.value


def read(folder: Path) -> dict[str, Result]:
    """All results of a folder by name. Raises ValueError for a file that does not validate."""
    return {
        path.stem: result_of(path.stem, json.loads(path.read_text()))
        for path in sorted(folder.glob("*.json"))
    }


def result_of(name: str, document: Mapping[str, Any]) -> Result:
    """Raises ValueError if it does not validate."""
    validate(document)
    predicted = predictions_of(name, document)
    rows = tuple(
        Row(
            name=figure, value=told["value"], unit=told["unit"], target=told["target"], better=told["better"],
            met=told["met"], predicted=predicted.get(figure), date=_date(document, told.get("run")),
        )
        for figure, told in document["figures"].items()
    )  # fmt: skip
    raw = document["raw"]
    note = raw.get("note", "") if isinstance(raw, Mapping) else ""
    return Result(
        name=name, date=_date(document), machine=_machine(document["machine"]),
        versions=", ".join(f"{lib} {number}" for lib, number in document["versions"].items() if number),
        command=document["command"], rows=rows, runs=tuple(_runs(raw)), note=str(note),
    )  # fmt: skip


def _date(document: Mapping[str, Any], run: int | None = None) -> str:
    """The day, of one of the runs that a file joins."""
    told = document if run is None else document["raw"]["runs"][run - 1]
    return str(told["date"])[:10]


def _machine(told: Mapping[str, Any]) -> str:
    gpu = told.get("gpu") or {}
    facts = [f"{key} {gpu[key]}" for key in ("driver", "cuda") if gpu.get(key)]
    name = f"{gpu['name']} ({', '.join(facts)})" if facts else gpu.get("name")
    card = f"{name}; " if name else ""
    return f"{card}{told['cpu']}, {told['cores']} cores, Python {told['python']}"


def _runs(raw: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(raw, Mapping):
        if {"row", "system", "tok_s"} <= raw.keys():
            yield raw
        else:
            for value in raw.values():
                yield from _runs(value)
    elif isinstance(raw, list):
        for value in raw:
            yield from _runs(value)

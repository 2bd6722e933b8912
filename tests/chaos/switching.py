"""A test plant for replicas: at any commit a request may take the other way, whatever it costs. Loaded by
tests alone. What took place is written to files, which outlive a replica that is killed."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from ray.serve import Application

from llm42.session import drive
from llm42.session.load import Load, Progress, Way
from llm42.telemetry import metrics as m
from llm42_serve import app
from llm42_serve.replica.fastpath import FastPath
from tests.protocol.switching import OneLate
from tests.support import RandomWays

CHANGES, LATE = "changes-", "late"
"""Files beside the certificate: what each replica did; and while there is this one, switches are broken."""


def changes_in(directory: Path) -> Counter[str]:
    """What all replicas did so far: how often `to direct`, `to verify`, `moved`, `back`."""
    return Counter(line for file in directory.glob(f"{CHANGES}*") for line in file.read_text().splitlines())


def build(tree: dict[str, Any]) -> Application:
    """The application with such replicas."""
    with mock.patch.object(app, "FastPath", SwitchingFastPath):
        return app.build(tree)


class SwitchingFastPath(FastPath):
    """Both classes are decoded here and there in turn."""

    def _build(self) -> tuple[Any, Any]:
        directory = Path(self._settings.verifier.certificate_dir)
        engine, generator = super()._build()
        seed, ways, told = os.getpid(), generator.ways, _Told(directory / f"{CHANGES}{os.getpid()}")
        ways.decide, ways.decide_best_effort = RandomWays(seed), _BestEffortWays(seed + 1, told)
        ways.hold, came_back = 0, ways.came_back

        def told_back() -> None:
            told("back")
            came_back()

        ways.came_back = told_back  # type: ignore[method-assign]
        generator.metrics = _Counts(generator.metrics, told)
        drive.Session = _late_while_asked(directory / LATE)  # type: ignore[misc]
        return engine, generator


class _Told:
    """Lines of a file, written at once."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, what: str) -> None:
        with self._file.open("a") as lines:
            lines.write(f"{what}\n")


class _Counts(m.Metrics):
    """The replica's own metrics; changes of a deterministic request's way are told, too."""

    def __init__(self, inner: m.Metrics, told: _Told) -> None:
        self._inner, self._told = inner, told

    def inc(self, metric: m.Metric, value: float = 1.0, **labels: str) -> None:
        if metric is m.WAY_CHANGES:
            self._told(f"to {labels['way']}")
        self._inner.inc(metric, value, **labels)

    def set(self, metric: m.Metric, value: float, **labels: str) -> None:
        self._inner.set(metric, value, **labels)

    def observe(self, metric: m.Metric, value: float, **labels: str) -> None:
        self._inner.observe(metric, value, **labels)


class _BestEffortWays(RandomWays):
    """Tells who goes to a verifier or comes back, be it at the beginning or on the way."""

    def __init__(self, seed: int, told: _Told) -> None:
        super().__init__(seed)
        self._told = told

    def __call__(self, request: Progress, load: Load) -> Way:
        way, before = super().__call__(request, load), request.way or "verify"
        if way != before:
            self._told("moved" if way == "direct" else "back")
        return way


def _late_while_asked(flag: Path) -> type[OneLate]:
    class Late(OneLate):
        """A token late while there is the file; else as it should be."""

        def turn(self, way: Way) -> None:
            if flag.exists():
                super().turn(way)
            else:
                super(OneLate, self).turn(way)

    return Late

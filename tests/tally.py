"""What a run of pytest came to, as JSON for tests/tiers.py: python -m pytest -p tests.tally --tally FILE

Ids of the tests that ran, that were skipped (and why) and that the marker expression left out (and their
markers), and the seconds that each test took with its fixtures: of time, and of this process's and its ended
children's CPU.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

TOLD = ("gpu", "vllm", "slow")
"""Markers that say why a test is left out, the strongest first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """--tally FILE"""
    parser.addoption("--tally", metavar="FILE", help="write what the run came to as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Without the option nothing is recorded."""
    if file := config.getoption("--tally"):
        config.pluginmanager.register(Tally(Path(file)))


class Tally:
    """Notes what happens and writes it when the session ends."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.ran: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.failed: set[str] = set()
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """One test with its fixtures."""
        before = sum(os.times()[:4])
        told = yield
        self.cpu[item.nodeid] = sum(os.times()[:4]) - before
        return told

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Left out by -m or -k."""
        for item in items:
            marks = {mark.name for mark in item.iter_markers()}
            self.left_out[item.nodeid] = next((name for name in TOLD if name in marks), "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that skips itself, or cannot be read."""
        if report.skipped:
            self.skipped[report.nodeid] = _reason(report)
        elif report.failed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of a test's three parts."""
        self.seconds[report.nodeid] += report.duration
        if report.skipped:
            self.skipped[report.nodeid] = _reason(report)
        elif report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call":
            self.ran.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Writes the file."""
        told: dict[str, Any] = {
            "ran": sorted(self.ran | self.failed),
            "failed": sorted(self.failed),
            "skipped": self.skipped,
            "left_out": self.left_out,
            "seconds": {name: round(s, 3) for name, s in self.seconds.items()},
            "cpu": {name: round(s, 3) for name, s in self.cpu.items()},
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(told, indent=1))


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    told = report.longrepr
    text = told[2] if isinstance(told, tuple) else str(told)
    return text.removeprefix("Skipped: ")

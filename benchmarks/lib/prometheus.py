"""A Prometheus server of its own for a test or a picture, and its HTTP API."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.lib.processes import free_port

RULES = Path(__file__).parents[2] / "helm" / "llm42" / "rules" / "llm42.yaml"
DASHBOARD = Path(__file__).parents[2] / "helm" / "llm42" / "dashboards" / "llm42.json"


def tool(name: str) -> str | None:
    """Path of prometheus or promtool (Debian: apt-get install prometheus); None when not installed."""
    return shutil.which(name, path=None) or shutil.which(name, path="/usr/bin:/usr/local/bin")


@dataclass(frozen=True)
class Sample:
    """One series of an instant query."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """Scrapes `targets` (host:port) every five seconds; evaluates the chart's rules every second. A context
    manager."""

    def __init__(self, directory: Path, targets: Sequence[str], rules: Path = RULES) -> None:
        self._directory, self._process = directory, None
        self._address = f"127.0.0.1:{free_port()}"
        config = {
            # a busy machine may take seconds for a page; a scrape that is too late leaves a hole
            "global": {"scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": list(targets)}]}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> Prometheus:
        program = tool("prometheus")
        assert program is not None, "Prometheus is not installed: apt-get install prometheus"
        command = [
            program,
            f"--config.file={self._directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._directory / 'data'}",
            f"--web.listen-address={self._address}",
            "--log.level=warn",
        ]
        with (self._directory / "prometheus.log").open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5):
                    return self
            except OSError:  # refused, or too busy to answer
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.__exit__()
                    text = (self._directory / "prometheus.log").read_text()
                    raise RuntimeError(f"Prometheus did not start: {text}") from None
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=20)

    def _get(self, what: str, **parameters: str | float) -> Any:
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[Sample]:
        """The expression's value now. Raises ValueError for one that is wrong."""
        found = self._get("query", query=expression)["result"]
        return [Sample(x["metric"], float(x["value"][1])) for x in found]

    def value(self, expression: str) -> float:
        """The sum over the expression's series; NaN when there are none."""
        found = self.query(expression)
        return sum(x.value for x in found) if found else math.nan

    def settled(self, expression: str, quiet_s: float = 15.0, timeout_s: float = 180.0) -> list[Sample]:
        """The expression's value once it has not changed for longer than what happens takes to arrive."""
        before, since, end = self.query(expression), time.monotonic(), time.monotonic() + timeout_s
        while time.monotonic() - since < quiet_s or not before:
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} does not come to rest: {before}")
            if (now := self.query(expression)) != before:
                before, since = now, time.monotonic()
            time.sleep(0.5)
        return before

    def query_range(
        self, expression: str, start: float, end: float, step_s: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Series of (labels, [(Unix time, value)])."""
        found = self._get("query_range", query=expression, start=start, end=end, step=step_s)["result"]
        return [(x["metric"], [(float(t), float(v)) for t, v in x["values"]]) for x in found]

    def targets_up(self) -> bool:
        """Whether every target has been scraped with success."""
        found = self.query("up")
        return bool(found) and all(x.value == 1 for x in found)


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without rows."""
    document = json.loads(DASHBOARD.read_text())
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def filled_in(expression: str, window: str = "5m", application: str = ".*", model: str = ".*") -> str:
    """A panel's expression with the dashboard's variables replaced; every release is meant."""
    values = {"__rate_interval": window, "application": application, "model": model}
    for name, value in (values | dict.fromkeys(("cluster", "namespace", "release"), ".*")).items():
        expression = expression.replace(f"${name}", value)
    return expression

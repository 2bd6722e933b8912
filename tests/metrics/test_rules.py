"""The chart's rules under promtool, and the dashboard's JSON against the file that generates it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.lib.prometheus import DASHBOARD, RULES, panels, tool
from llm42.telemetry.metrics import CATALOGUE, Kind
from tests.metrics.conftest import require_prometheus
from tests.support import sweep

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "rules.test.yaml"
DAYS = Path(__file__).parent / "days.test.yaml"


@pytest.fixture
def promtool() -> str:
    """Path of promtool."""
    require_prometheus()
    return str(tool("promtool"))


def run(promtool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """promtool's answer."""
    command = [promtool, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def changed(directory: Path, old: str, new: str) -> list[Path]:
    """The cases over rules in which `old` has become `new`."""
    text = RULES.read_text()
    assert old in text
    (directory / "rules.yaml").write_text(text.replace(old, new))
    for file in (CASES, DAYS):
        cases = yaml.safe_load(file.read_text()) | {"rule_files": ["rules.yaml"]}
        (directory / file.name).write_text(yaml.safe_dump(cases))
    return [directory / file.name for file in (CASES, DAYS)]


def test_the_rules_do_what_their_cases_say(promtool: str) -> None:
    checked = run(promtool, "check", "rules", RULES)
    assert checked.returncode == 0, checked.stderr
    tested = run(promtool, "test", "rules", CASES, DAYS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    sweep(
        [
            ("ratio_rate5m > 0.05", "ratio_rate5m > 0.5"),
            ("ratio_rate5m > 0.9", "ratio_rate5m > 0.4"),
            ("increase1h > 0", "increase1h > 1"),
            ("max == 0", "max < 2"),
            ("fingerprints:count > 1", "fingerprints:count > 0"),
            ("for: 15m", "for: 5m"),
            ("missing:count > 0", "missing:count > 1"),
            ("failed_requests:ratio_rate5m > 0.01", "failed_requests:ratio_rate5m > 0.5"),
            ('"finished|aborted"', '"finished"'),
            ("or on () vector(0)", ""),
            ("_ready:max\n        expr: max by", "_ready:max\n        expr: min by"),
            ("(ray_llm42_fastpath_devices)", "(ray_llm42_verifier_devices)"),
            ("missing:count[15m]) > 0.5", "missing:count[15m]) > 0.9"),
            ("or 0 * max by", "or 2 * max by"),
            ("ingresses:count == 0", "ingresses:count == 1"),
            ('{state="failed"}', '{state="starting"}'),
            ("failed:count > 0", "failed:count > 1"),
            ("offset 1d", "offset 2d"),
            ("fingerprints_new:count > 0", "fingerprints_new:count >= 0"),
            ("p99_rate5m > 30", "p99_rate5m > 900"),
            ("p99_rate5m > 10", "p99_rate5m > 30"),
            ("kv_used:ratio > 0.95", "kv_used:ratio > 0.4"),
            ("kv_held:ratio > 0.95", "kv_held:ratio > 0.8"),
        ],
        quick=[("increase1h > 0", "increase1h > 1"), ("for: 15m", "for: 5m"), ("max == 0", "max < 2")],
    ),
)
def test_a_wrong_rule_is_noticed(promtool: str, tmp_path: Path, old: str, new: str) -> None:
    tested = run(promtool, "test", "rules", *changed(tmp_path, old, new))
    assert tested.returncode != 0, "the cases do not see the difference"


def test_every_alert_has_cases_both_ways_and_a_runbook() -> None:
    tests = [t for file in (CASES, DAYS) for t in yaml.safe_load(file.read_text())["tests"]]
    cases = [c for t in tests for c in t.get("alert_rule_test", [])]
    page = (ROOT / "docs" / "operations.md").read_text()
    headings = {h.lower() for h in re.findall(r"^### (\w+)$", page, re.MULTILINE)}
    alerts = [r for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"] if "alert" in r]
    assert len(alerts) >= 5
    for rule in alerts:
        mine = [bool(c["exp_alerts"]) for c in cases if c["alertname"] == rule["alert"]]
        assert set(mine) == {True, False}, rule["alert"]
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert file == "docs/operations.md"
        assert anchor == rule["alert"].lower()
        assert anchor in headings, f"docs/operations.md has no section {rule['alert']}"


def generator() -> Any:
    """helm/dashboard.py as a module."""
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "helm" / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboard"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_committed_dashboard_is_what_its_file_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = generator()
    assert DASHBOARD.read_text() == module.document(), "run python helm/dashboard.py"
    copy = tmp_path / "llm42.json"
    shutil.copy(DASHBOARD, copy)
    monkeypatch.setattr(module, "FILE", copy)
    monkeypatch.setattr("sys.argv", ["dashboard.py", "--check"])
    assert module.main() == 0
    copy.write_text(copy.read_text().replace("Rollback rate", "Roll rate"))
    assert module.main() == 1
    assert "out of date" in capsys.readouterr().out


def test_the_dashboard_has_its_variables_and_no_fixed_source() -> None:
    document = json.loads(DASHBOARD.read_text())
    assert [v["name"] for v in document["templating"]["list"]] == [
        "datasource", "cluster", "namespace", "release", "application", "model",
    ]  # fmt: skip
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["description"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == source
            assert 'model=~"$model"' in target["expr"]
    placed = [tuple(p["gridPos"][k] for k in "xy") for p in document["panels"]]
    assert len(set(placed)) == len(placed), "two panels in one place"


def test_measured_rates_are_shown_beside_the_models() -> None:
    """What session.mode auto goes by, and what comes of it, in one picture."""
    named = [
        {name for t in p["targets"] for name in re.findall(r"ray_llm42_(\w+)", t["expr"])} for p in panels()
    ]
    shown = [names for names in named if "way_expected_tokens_per_second" in names]
    assert shown
    assert all("committed_tokens_total" in names for names in shown)
    assert {"way_changes_total", "moved_tokens_total"} <= set.union(*shown)


def test_expressions_name_metrics_that_exist() -> None:
    suffixes = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket",)}
    known = {f"ray_{m.name}{suffix}" for m in CATALOGUE for suffix in suffixes[m.kind]}
    texts = [DASHBOARD.read_text(), RULES.read_text()]
    named = {name for text in texts for name in re.findall(r"ray_llm42_\w+", text)}
    assert named <= known
    unused = {name for name in known - named if name.endswith("_bucket")}
    assert not unused, "a histogram that nothing shows"

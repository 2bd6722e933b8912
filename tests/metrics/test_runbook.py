"""The runbook and the first hour name what exists: metrics, recorded series, panels, settings, chart values,
commands, paths, lines of logs; and each alert's section says its threshold. Each check has a control."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from benchmarks.lib.prometheus import RULES, panels, tool
from llm42.api.app import create_app
from llm42.cli.main import app as command_line
from llm42.config import Settings
from llm42.telemetry.metrics import CATALOGUE
from llm42.text.tokenizer import Tokenizer
from tests.metrics.conftest import require_prometheus
from tests.service.scripted import Scripted, hello
from tests.support import smollm2_file

ROOT = Path(__file__).parents[2]
OPERATIONS, FIRST_HOUR = ROOT / "docs" / "operations.md", ROOT / "docs" / "first-hour.md"
NO_METRICS = {"llm42_serve", "llm42_fast_path", "llm42_verifier", "llm42_kernels"}
"""Packages, and Ray resources of the chart."""
SOURCES = [f for d in ("llm42", "deployments") for f in (ROOT / d).rglob("*.py")]


def runbook() -> str:
    """The sections that are for whoever is on call, and the guide."""
    page = OPERATIONS.read_text()
    text = page[page.index("\n## What to watch\n") : page.index("\n## What was never tried\n")]
    return text + FIRST_HOUR.read_text()


def blocks(text: str, kind: str) -> Iterator[str]:
    """Fenced blocks of a language, without the indentation of a list."""
    for indent, body in re.findall(rf"^( *)```{kind}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        yield re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)


def unknown_metrics(text: str) -> set[str]:
    """Names of metrics that nothing emits."""
    known = {m.name for m in CATALOGUE} | NO_METRICS
    found = {re.sub(r"_(total|bucket|count|sum)$", "", n) for n in re.findall(r"llm42_[a-z0-9_]+", text)}
    return found - known


def unknown_records(text: str) -> set[str]:
    """Recorded series that no rule records."""
    recorded = set(re.findall(r"record: (\S+)", RULES.read_text()))
    return set(re.findall(r"llm42:\w+:\w+", text)) - recorded


def unknown_alerts(text: str) -> set[str]:
    """Alerts that no rule raises."""
    return set(re.findall(r"LLM42[A-Z]\w+", text)) - set(re.findall(r"alert: (\S+)", RULES.read_text()))


def unknown_panels(text: str) -> set[str]:
    """Panels, in quotes behind that word, that the dashboard does not have."""
    text = re.sub(r"\s+", " ", text)
    named = re.findall(r'[Pp]anels? ("[^"]+"(?:(?:,| and) "[^"]+")*)', text)
    titles = {panel["title"] for panel in panels()}
    return {title for found in named for title in re.findall(r'"([^"]+)"', found)} - titles


def _has(tree: Any, path: list[str]) -> bool:
    for name in path:
        if tree == {}:  # labels and the like: any key
            return True
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = tree[name]
    return True


def unknown_settings(text: str) -> set[str]:
    """Dotted names that are neither settings nor values of the chart."""
    values = yaml.safe_load((ROOT / "helm" / "llm42" / "values.yaml").read_text())
    values["ingress"]["tls"] = None
    trees = (Settings().model_dump(), values, {"config": Settings().model_dump()})
    dotted = r"[a-z]\w*(?:\.[A-Za-z]\w*)+"
    named = set(re.findall(rf"`({dotted})(?:: [^`]*)?`", text))
    named |= set(re.findall(rf"--set(?:-string|-json)? ({dotted})=", text))
    files = (".py", ".md", ".yaml", ".json", ".log", ".io")
    named = {n for n in named if not n.endswith(files) and n.split(".")[0] in {t for x in trees for t in x}}
    common = values["common"]  # the same keys under each role
    for role in ("head", "fastPath", "verifier"):
        values[role] = {**common, **values[role]}
    return {n for n in named if not any(_has(tree, n.split(".")) for tree in trees)}


def unknown_commands(text: str) -> set[str]:
    """Subcommands of ours that do not exist, and our own files that are not there."""
    shell = "\n".join([*blocks(text, "sh"), *re.findall(r"`([^`\n]+)`", text)])
    commands: Any = typer.main.get_command(command_line)
    bad = set(re.findall(r"(?<![\w/.-])llm42 ([a-z]\w+)", shell)) - set(commands.commands) - {"helm"}
    files = re.findall(r"(?<![\w/.-])((?:helm|docs|tests|benchmarks)/[\w/.-]+\.\w+)", shell)
    return bad | {name for name in files if not (ROOT / name).exists()}


def unknown_paths(text: str) -> set[str]:
    """Paths of the HTTP API that it does not have. Port 8080 is Ray's, 9090 Prometheus', 3000 Grafana's."""
    tokenizer = Tokenizer.load(smollm2_file())
    paths = set(create_app(Settings(), tokenizer, Scripted(hello)).openapi()["paths"])
    return set(re.findall(r"127\.0\.0\.1:8000(/[\w/.-]*)", text)) - paths


def unknown_log_lines(text: str) -> set[str]:
    """Words to look for in logs that no line of the sources has."""
    source = "\n".join(file.read_text() for file in SOURCES)
    return {words for words in re.findall(r'in_logs "([^"]+)"', text) if words not in source}


CHECKS = (
    unknown_metrics,
    unknown_records,
    unknown_alerts,
    unknown_panels,
    unknown_settings,
    unknown_commands,
    unknown_paths,
    unknown_log_lines,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_what_the_runbook_names_exists(check: Any) -> None:
    assert check(runbook()) == set()


@pytest.mark.parametrize(
    ("check", "text", "found"),
    [
        (unknown_metrics, "`llm42_sighs_total` and `ray_llm42_rollbacks_total`", {"llm42_sighs"}),
        (unknown_records, "llm42:rollback_rate:ratio_rate5m llm42:gone:count", {"llm42:gone:count"}),
        (unknown_alerts, "See LLM42NoVerifier and LLM42Rain.", {"LLM42Rain"}),
        (unknown_panels, 'panel "Saturation", panels "Columns" and "Verify\ncalls"', {"Columns"}),
        (unknown_settings, "`server.max_verifiers: 2` `verifier.nodeSelector`", set()),
        (unknown_settings, "`server.verifier` `podMonitor.on`", {"server.verifier", "podMonitor.on"}),
        (unknown_settings, "--set podMonitor.on=true", {"podMonitor.on"}),
        (unknown_commands, "`llm42 certify` and `llm42 bless`", {"bless"}),
        (unknown_commands, "```sh\nhelm lint helm/llm42 -f helm/none.yaml\n```\n", {"helm/none.yaml"}),
        (unknown_paths, "curl http://127.0.0.1:8000/health http://127.0.0.1:8000/healthy", {"/healthy"}),
        (unknown_log_lines, 'in_logs "is condemned" in_logs "is damned"', {"is damned"}),
    ],
)  # fmt: skip
def test_a_name_of_nothing_is_noticed(check: Any, text: str, found: set[str]) -> None:
    """The control."""
    assert check(text) == found


def wrong_queries(text: str, directory: Path) -> str:
    """promtool's complaints about the blocks of PromQL; "" where there are none."""
    rules = [{"record": f"x:{i}", "expr": q} for i, q in enumerate(blocks(text, "promql"))]
    assert rules
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": rules}]}))
    command = [str(tool("promtool")), "check", "rules", str(directory / "rules.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_queries_can_be_parsed(tmp_path: Path) -> None:
    require_prometheus()
    assert wrong_queries(runbook(), tmp_path) == ""
    assert wrong_queries("```promql\nsum by (\n```\n", tmp_path) != "", "the control"


def test_the_shell_can_read_the_commands(tmp_path: Path) -> None:
    def wrong(text: str) -> str:
        script = "\n".join(blocks(text, "sh"))
        return subprocess.run(
            ["bash", "-n"], input=script, text=True, capture_output=True, check=False
        ).stderr

    assert wrong(runbook()) == ""
    assert wrong("```sh\nkubectl get 'pods\n```\n") != "", "the control"


def untold(section: str, rule: dict[str, Any]) -> list[str]:
    """What an alert's section does not say: its threshold and how long it must last."""
    limit = re.fullmatch(r".+ (?:>|==) ([\d.]+)", rule["expr"])
    assert limit is not None
    value, wanted = float(limit[1]), list[str]()
    if value not in (0.0, 1.0):
        name = rule["expr"]
        percent, seconds = "ratio" in name, "seconds" in name
        wanted.append(f"{100 * value:g} %" if percent else f"{value:g}" + " seconds" * seconds)
    if "for" in rule:
        wanted.append(f"{int(rule['for'].removesuffix('m'))} minutes")
    head = re.sub(r"\s+", " ", section[: section.index("\n1. ")])
    return [words for words in wanted if words not in head]


def test_thresholds_are_those_of_the_rules() -> None:
    page = OPERATIONS.read_text()
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" not in rule:
                continue
            _, _, section = page.partition(f"\n### {rule['alert']}\n")
            section = re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]
            assert untold(section, rule) == [], rule["alert"]


@pytest.mark.parametrize(
    ("expr", "lasts", "missing"),
    [
        ("llm42:a:ratio > 0.05", "15m", []),
        ("llm42:a:ratio > 0.06", "15m", ["6 %"]),
        ("llm42:a:ratio > 0.05", "10m", ["10 minutes"]),
        ("llm42:a_seconds:p99 > 30", "15m", ["30 seconds"]),
    ],
)
def test_a_wrong_threshold_is_noticed(expr: str, lasts: str, missing: list[str]) -> None:
    """The control."""
    section = "More than 5 % of them,\nfor 15 minutes.\n\n1. Look."
    assert untold(section, {"expr": expr, "for": lasts}) == missing

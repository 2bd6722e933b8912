"""Two releases under one Prometheus: what is wrong with one is neither hidden nor doubled by the other."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.lib.prometheus import DASHBOARD, RULES, panels, tool
from tests.chart import helm
from tests.metrics.conftest import require_prometheus

PROD, STAGING = {"namespace": "prod", "release": "llm"}, {"namespace": "staging", "release": "llm"}
BESIDE = {"namespace": "prod", "release": "other"}
MINUTES = 60


def series(name: str, values: str, where: dict[str, str], **labels: str) -> dict[str, str]:
    shown = ", ".join(f'{k}="{v}"' for k, v in {**labels, **where}.items())
    return {"series": f"ray_llm42_{name}{{{shown}}}", "values": values}


def flat(value: float) -> str:
    return f"{value}x{MINUTES}"


def healthy(where: dict[str, str], **changed: str) -> list[dict[str, str]]:
    """What a release without a fault shows; `changed`: other values of some series."""
    app = {"application": "llm42", "model": "m"}
    values = {
        "fingerprint_info": flat(1),
        "verifiers_ready": flat(1),
        "fastpath_devices": flat(1),
        "verifiers_wanted": flat(1),
        "verifiers": flat(1),
        "committed_tokens_total": f"0+600x{MINUTES}",
        "rollbacks_total": f"0+1x{MINUTES}",
        **changed,
    }
    labels: dict[str, dict[str, str]] = {
        "fingerprint_info": {
            "model": "m",
            "verifier": "v-0",
            "fingerprint": f"of-{'-'.join(where.values())}",
        },
        "verifiers_wanted": {"model": "m"},
        "verifiers": {"model": "m", "state": "ready"},
    }
    return [series(n, v, where, **labels.get(n, app | {"replica": "1"})) for n, v in values.items()]


def firing(alert: str, where: dict[str, str], severity: str, **labels: str) -> dict[str, Any]:
    return {"exp_labels": {"severity": severity, **where, **labels}, "alertname": alert}


ALERTS = (
    "LLM42RollbackRateHigh", "LLM42VerifierSaturated", "LLM42AuditMismatch", "LLM42NoVerifier",
    "LLM42FingerprintMixed", "LLM42VerifiersMissing", "LLM42RequestsFail", "LLM42Gone",
)  # fmt: skip
APP = {"application": "llm42", "model": "m"}
CASES: dict[str, tuple[list[dict[str, str]], list[dict[str, Any]]]] = {
    "all is well, with a fingerprint each": (
        healthy(PROD) + healthy(STAGING) + healthy(BESIDE),
        [],
    ),
    "prod has no verifier, staging has one": (
        healthy(PROD, verifiers_ready=flat(0), verifiers=flat(0)) + healthy(STAGING),
        [
            firing("LLM42NoVerifier", PROD, "critical", **APP),
            firing("LLM42VerifiersMissing", PROD, "warning", model="m"),
        ],
    ),
    "another release in the same namespace": (
        healthy(PROD, verifiers_ready=flat(0)) + healthy(BESIDE),
        [firing("LLM42NoVerifier", PROD, "critical", **APP)],
    ),
    "prod's series end": (
        [s | {"values": s["values"].replace(f"x{MINUTES}", "x20")} for s in healthy(PROD)] + healthy(STAGING),
        [firing("LLM42Gone", PROD, "critical")],
    ),
    "staging's surplus does not make up for what prod lacks": (
        healthy(PROD, verifiers_wanted=flat(2)) + healthy(STAGING, verifiers_wanted=flat(0)),
        [firing("LLM42VerifiersMissing", PROD, "warning", model="m")],
    ),
    "prod rolls back, staging's traffic is a hundred times as much": (
        healthy(PROD, rollbacks_total=f"0+60x{MINUTES}")
        + healthy(STAGING, committed_tokens_total=f"0+60000x{MINUTES}"),
        [firing("LLM42RollbackRateHigh", PROD, "warning", **APP)],
    ),
}


def rendered(directory: Path, where: dict[str, str]) -> Path:
    """The rules as the chart installs them with one release."""
    done = helm.run(
        "template", where["release"], helm.CHART, "--namespace", where["namespace"],
        values="prometheusRule: {enabled: true}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (spec,) = [
        d["spec"] for d in yaml.load_all(done.stdout, yaml.CSafeLoader) if d and d["kind"] == "PrometheusRule"
    ]
    file = directory / f"{'-'.join(where.values())}.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


@pytest.fixture(scope="module")
def of_the_chart(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Rules of three releases side by side, as one Prometheus loads them."""
    directory = tmp_path_factory.mktemp("rules")
    return [rendered(directory, where) for where in (PROD, STAGING, BESIDE)]


def check(directory: Path, rules: list[Path], case: str, gone: list[dict[str, str]]) -> str:
    """promtool's complaints about one case; none: "". gone: releases with rules and without series."""
    require_prometheus()
    inputs, expected = CASES[case]
    expected = expected + [firing("LLM42Gone", where, "critical") for where in gone]
    asked = [
        {
            "eval_time": f"{MINUTES - 10}m",
            "alertname": name,
            "exp_alerts": [{"exp_labels": e["exp_labels"]} for e in expected if e["alertname"] == name],
        }
        for name in ALERTS
    ]
    stripped = [_without_texts(directory, file) for file in rules]
    tests = [{"name": case, "interval": "1m", "input_series": inputs, "alert_rule_test": asked}]
    document = {"rule_files": [str(f) for f in stripped], "evaluation_interval": "1m", "tests": tests}
    (directory / "case.yaml").write_text(yaml.safe_dump(document))
    command = [str(tool("promtool")), "test", "rules", str(directory / "case.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def _without_texts(directory: Path, rules: Path) -> Path:
    """The rules without annotations, which rules.test.yaml looks at."""
    tree = yaml.safe_load(rules.read_text())
    for group in tree["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    plain = directory / f"plain-{rules.name}"
    plain.write_text(yaml.safe_dump(tree))
    return plain


@pytest.mark.parametrize("case", CASES)
def test_one_set_of_rules_for_all(tmp_path: Path, case: str) -> None:
    """The file as it is, over every release's series."""
    assert check(tmp_path, [RULES], case, []) == ""


@pytest.mark.parametrize("case", CASES)
def test_the_rules_of_each_release(tmp_path: Path, of_the_chart: list[Path], case: str) -> None:
    """As the chart installs them: each sees its own release only, and a release without series is gone."""
    there = {s["series"].rpartition('namespace="')[2] for s in CASES[case][0]}
    gone = [
        w for w in (PROD, STAGING, BESIDE) if f'{w["namespace"]}", release="{w["release"]}"}}' not in there
    ]
    assert check(tmp_path, of_the_chart, case, gone) == ""


@pytest.mark.parametrize("labels", ["namespace, release, ", "namespace, ", "release, "])
def test_rules_that_do_not_name_the_release_are_noticed(tmp_path: Path, labels: str) -> None:
    """The control."""
    text = RULES.read_text().replace("namespace, release, ", "namespace, release, ".replace(labels, ""))
    text = text.replace("by (namespace, release)", "by ()" if labels == "namespace, release, " else "by (x)")
    (tmp_path / "rules.yaml").write_text(text)
    wrong = [case for case in CASES if check(tmp_path, [tmp_path / "rules.yaml"], case, [])]
    assert wrong


def test_every_query_keeps_releases_apart() -> None:
    """In the rules every sum names the release; every query of the dashboard is of those that are chosen."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            for part in rule["expr"].split(" by (")[1:]:
                named = {label.strip() for label in part.partition(")")[0].split(",")}
                assert {"namespace", "release"} <= named, rule
    document = json.loads(DASHBOARD.read_text())
    assert {"namespace", "release"} <= {v["name"] for v in document["templating"]["list"]}
    for panel in panels():
        for target in panel["targets"]:
            selectors = target["expr"].count("{")
            for name in ("namespace", "release"):
                assert target["expr"].count(f'{name}=~"${name}"') == selectors, target["expr"]


def test_the_monitor_names_the_release() -> None:
    monitor = helm.one(helm.render(values="podMonitor: {enabled: true}"), "PodMonitor")["spec"]
    for endpoint in monitor["podMetricsEndpoints"]:
        sources = {r["targetLabel"]: r["sourceLabels"] for r in endpoint["relabelings"]}
        assert sources["release"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"]
    labels = helm.pod_templates(helm.render())["head"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == helm.RELEASE

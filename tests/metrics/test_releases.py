"""Several releases, and clusters, under one Prometheus: what is wrong with one is neither hidden nor doubled
by another."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.lib.prometheus import DASHBOARD, RULES, panels, tool
from tests.chart import helm
from tests.metrics.conftest import require_prometheus
from tests.support import sweep

PROD, STAGING = {"namespace": "prod", "release": "llm"}, {"namespace": "staging", "release": "llm"}
BESIDE = {"namespace": "prod", "release": "other"}
EAST, WEST = {"cluster": "east", **PROD}, {"cluster": "west", **PROD}
"""One chart installed in two clusters, whose metrics are brought together."""
MINUTES = 60


def series(name: str, values: str, where: dict[str, str], **labels: str) -> dict[str, str]:
    shown = ", ".join(f'{k}="{v}"' for k, v in {**labels, **where}.items())
    return {"series": f"ray_llm42_{name}{{{shown}}}", "values": values}


def flat(value: float) -> str:
    return f"{value}x{MINUTES}"


def rising(by: float) -> str:
    """A counter, per minute."""
    return f"0+{by}x{MINUTES}"


APP = {"application": "llm42", "model": "m"}
CLASS = {**APP, "mode": "deterministic"}
VERIFIER = {"model": "m", "verifier": "v-0"}
STATES = ("ready", "failed")


def healthy(where: dict[str, str], **changed: str) -> list[dict[str, str]]:
    """What a release without a fault shows; `changed`: other values of some series."""
    fingerprint = {**VERIFIER, "fingerprint": f"of-{'-'.join(where.values())}"}
    shown: dict[str, tuple[str, dict[str, str]]] = {
        "fingerprint_info": (flat(1), fingerprint),
        "verifiers_ready": (flat(1), APP),
        "fastpath_devices": (flat(1), {**APP, "replica": "1"}),
        "replicas_wanted": (flat(1), APP),
        "verifiers_wanted": (flat(1), {"model": "m"}),
        "ready": (flat(1), {"model": "m", "state": "ready"}),
        "failed": (flat(0), {"model": "m", "state": "failed"}),
        "committed_tokens_total": (rising(600), APP),
        "rollbacks_total": (rising(1), APP),
        "audit_mismatches_total": (flat(0), APP),
        "verifier_busy_seconds_total": (rising(20), VERIFIER),
        "fastpath_kv_used_tokens": (flat(100), {**APP, "replica": "1"}),
        "fastpath_kv_total_tokens": (flat(1000), {**APP, "replica": "1"}),
        "verifier_kv_held_blocks": (flat(10), VERIFIER),
        "verifier_kv_total_blocks": (flat(100), VERIFIER),
    }
    for metric, limits in (("first_token_seconds", (1, 60)), ("queue_seconds", (1, 30))):
        for limit in (*limits, "+Inf"):
            shown[f"{metric}_{limit}"] = rising(60), {**CLASS, "le": str(limit)}
    for outcome, count in (("finished", 60), ("engine_error", 0)):
        shown[outcome] = rising(count), {**CLASS, "outcome": outcome}
    return [
        series(_metric(name), changed.get(name, values), where, **labels)
        for name, (values, labels) in shown.items()
    ]


def _metric(name: str) -> str:
    """A histogram's buckets, and the states and outcomes, have names of their own above."""
    if name in ("finished", "engine_error"):
        return "requests_total"
    return "verifiers" if name in STATES else re.sub(r"_seconds_(\d+|\+Inf)$", "_seconds_bucket", name)


def firing(alert: str, where: dict[str, str], severity: str, **labels: str) -> dict[str, Any]:
    return {"exp_labels": {"severity": severity, **where, **labels}, "alertname": alert}


ALERTS = tuple(
    rule["alert"]
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
)
FIRES: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    "LLM42RollbackRateHigh": ({"rollbacks_total": rising(60)}, "warning", APP),
    "LLM42VerifierSaturated": ({"verifier_busy_seconds_total": rising(58)}, "warning", VERIFIER),
    "LLM42AuditMismatch": ({"audit_mismatches_total": "0x20 1x40"}, "critical", APP),
    "LLM42NoVerifier": ({"verifiers_ready": flat(0)}, "critical", APP),
    "LLM42VerifiersMissing": ({"verifiers_wanted": flat(2)}, "warning", {"model": "m"}),
    "LLM42VerifierFailed": ({"failed": flat(1)}, "warning", {"model": "m"}),
    "LLM42ReplicasMissing": ({"replicas_wanted": flat(2)}, "warning", APP),
    "LLM42NoIngress": ({"replicas_wanted": f"_x{MINUTES}"}, "critical", APP),
    "LLM42RequestsFail": ({"engine_error": rising(2)}, "warning", APP),
    "LLM42FirstTokenLate": ({"first_token_seconds_1": rising(50)}, "warning", CLASS),
    "LLM42QueueLong": ({"queue_seconds_1": rising(50)}, "warning", CLASS),
    "LLM42KvFull": ({"fastpath_kv_used_tokens": flat(990)}, "warning", {**APP, "replica": "1"}),
    "LLM42VerifierKvFull": ({"verifier_kv_held_blocks": flat(99)}, "warning", VERIFIER),
}
"""Alert -> what makes a release have it and nothing else, its severity, its labels."""
Case = tuple[list[dict[str, str]], list[dict[str, Any]]]


def sick(alert: str, where: dict[str, str], *others: dict[str, str]) -> Case:
    """One release has the alert's fault, the others are well."""
    changed, severity, labels = FIRES[alert]
    inputs = healthy(where, **changed) + [s for other in others for s in healthy(other)]
    return inputs, [firing(alert, where, severity, **labels)]


def ending(where: dict[str, str]) -> list[dict[str, str]]:
    """A release whose series end."""
    return [s | {"values": re.sub(rf"x{MINUTES}$", "x20", s["values"])} for s in healthy(where)]


SECOND = series("fingerprint_info", flat(1), PROD, model="m", verifier="v-1", fingerprint="another")
CASES: dict[str, Case] = {
    "all is well, with a fingerprint each": (
        [s for where in (PROD, STAGING, BESIDE) for s in healthy(where)],
        [],
    ),
    "all is well in two clusters": (healthy(EAST) + healthy(WEST), []),
    "prod has no verifier, staging has one": (
        healthy(PROD, verifiers_ready=flat(0), ready=flat(0)) + healthy(STAGING),
        [
            firing("LLM42NoVerifier", PROD, "critical", **APP),
            firing("LLM42VerifiersMissing", PROD, "warning", model="m"),
        ],
    ),
    "another release in the same namespace": sick("LLM42NoVerifier", PROD, BESIDE),
    "prod's series end": (ending(PROD) + healthy(STAGING), [firing("LLM42Gone", PROD, "critical")]),
    "east's series end": (ending(EAST) + healthy(WEST), [firing("LLM42Gone", EAST, "critical")]),
    "staging's surplus does not make up for what prod lacks": (
        healthy(PROD, verifiers_wanted=flat(2)) + healthy(STAGING, verifiers_wanted=flat(0)),
        [firing("LLM42VerifiersMissing", PROD, "warning", model="m")],
    ),
    "west's surplus does not make up for what east lacks": (
        healthy(EAST, replicas_wanted=flat(2)) + healthy(WEST, replicas_wanted=flat(0)),
        [firing("LLM42ReplicasMissing", EAST, "warning", **APP)],
    ),
    "prod has two fingerprints, staging another": (
        [*healthy(PROD), SECOND, *healthy(STAGING)],
        [firing("LLM42FingerprintMixed", PROD, "warning", model="m")],
    ),
    "prod rolls back, staging's traffic is a hundred times as much": (
        healthy(PROD, rollbacks_total=rising(60)) + healthy(STAGING, committed_tokens_total=rising(60000)),
        [firing("LLM42RollbackRateHigh", PROD, "warning", **APP)],
    ),
    **{f"{alert} in staging": sick(alert, STAGING, PROD, BESIDE) for alert in FIRES},
    **{f"{alert} in west": sick(alert, WEST, EAST) for alert in FIRES},
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


@pytest.mark.parametrize("case", sweep(list(CASES), quick=list(CASES)[:9]))
def test_one_set_of_rules_for_all(tmp_path: Path, case: str) -> None:
    """The file as it is, over every release's series."""
    assert check(tmp_path, [RULES], case, []) == ""


def absent(case: str) -> list[dict[str, str]]:
    """Releases with rules of the chart and without series."""
    pair = re.compile(r'namespace="(\w+)", release="(\w+)"')
    there = {found.groups() for s in CASES[case][0] if (found := pair.search(s["series"]))}
    return [w for w in (PROD, STAGING, BESIDE) if (w["namespace"], w["release"]) not in there]


@pytest.mark.parametrize("case", sweep(list(CASES), quick=list(CASES)[:9]))
def test_the_rules_of_each_release(tmp_path: Path, of_the_chart: list[Path], case: str) -> None:
    """As the chart installs them: each sees its own release only, and a release without series is gone."""
    assert check(tmp_path, of_the_chart, case, absent(case)) == ""


def test_rules_of_the_chart_that_see_every_release_are_noticed(
    tmp_path: Path, of_the_chart: list[Path]
) -> None:
    """The control: without their selectors each alert comes three times."""
    blind = []
    for file in of_the_chart:
        blind.append(tmp_path / file.name)
        blind[-1].write_text(re.sub(r'namespace="\w+",release="\w+",?', "", file.read_text()))
    case = "another release in the same namespace"
    assert check(tmp_path, of_the_chart, case, absent(case)) == ""
    assert check(tmp_path, blind, case, absent(case)) != ""


@pytest.mark.parametrize(
    ("label", "case"),
    [
        ("cluster", "LLM42NoVerifier in west"),
        ("cluster", "west's surplus does not make up for what east lacks"),
        ("cluster", "east's series end"),
        ("namespace", "LLM42NoVerifier in staging"),
        ("namespace", "prod's series end"),
        ("release", "another release in the same namespace"),
    ],
)
def test_rules_that_do_not_name_where_are_noticed(tmp_path: Path, label: str, case: str) -> None:
    """The control."""
    left = ", ".join(name for name in ("cluster", "namespace", "release") if name != label)
    text = RULES.read_text()
    assert text.count("cluster, namespace, release") > 30
    (tmp_path / "rules.yaml").write_text(text.replace("cluster, namespace, release", left))
    assert check(tmp_path, [tmp_path / "rules.yaml"], case, []) != ""


def test_every_alert_is_tried_with_one_release_that_is_sick() -> None:
    """But one, which needs days (rules.test.yaml)."""
    tried = {found["alertname"] for _, expected in CASES.values() for found in expected}
    assert set(ALERTS) - tried == {"LLM42FingerprintChanged"}


def test_every_query_keeps_releases_apart() -> None:
    """In the rules every sum names the release; every query of the dashboard is of those that are chosen."""
    where = {"cluster", "namespace", "release"}
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            for part in rule["expr"].split(" by (")[1:]:
                named = {label.strip() for label in part.partition(")")[0].split(",")}
                assert where <= named, rule
    document = json.loads(DASHBOARD.read_text())
    assert where <= {v["name"] for v in document["templating"]["list"]}
    for panel in panels():
        for target in panel["targets"]:
            selectors = target["expr"].count("{")
            for name in where:
                assert target["expr"].count(f'{name}=~"${name}"') == selectors, target["expr"]


def test_the_monitor_names_the_release() -> None:
    monitor = helm.one(helm.render(values="podMonitor: {enabled: true}"), "PodMonitor")["spec"]
    for endpoint in monitor["podMetricsEndpoints"]:
        sources = {r["targetLabel"]: r["sourceLabels"] for r in endpoint["relabelings"]}
        assert sources["release"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"]
    labels = helm.pod_templates(helm.render())["head"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == helm.RELEASE

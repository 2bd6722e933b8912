"""The smaller templates: what each renders, and what switches it off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart import helm
from tests.chart.helm import container

PLUS_ONE, LOCKED, MULTI = (helm.example(n) for n in ("gpu-4-plus-1", "locked-down", "multi-node"))
SELECTOR = {"app.kubernetes.io/part-of": "llm42", "app.kubernetes.io/instance": helm.RELEASE}


def kinds(example: Path | None = None, values: str = "") -> list[str]:
    return [m.kind for m in helm.render(example, values=values)]


def test_by_default_there_is_nothing_but_the_service_and_its_needs() -> None:
    assert sorted(kinds()) == ["ConfigMap", "PodDisruptionBudget", "RayService", "ServiceAccount"]


def test_service_account() -> None:
    account = helm.one(helm.render(LOCKED), "ServiceAccount")
    assert account["metadata"]["name"] == "llm42-prod"
    assert account["automountServiceAccountToken"] is False
    own = "serviceAccount: {create: false, name: theirs}"
    assert "ServiceAccount" not in kinds(values=own)
    for template in helm.pod_templates(helm.render(values=own)).values():
        assert template["spec"]["serviceAccountName"] == "theirs"


def test_only_a_head_that_scales_gets_a_kubernetes_token() -> None:
    scaling = helm.pod_templates(helm.render(PLUS_ONE))
    tokens = {c: t["spec"]["automountServiceAccountToken"] for c, t in scaling.items()}
    assert tokens == {"head": True, "fast-path": False, "verifier": False}
    assert not helm.pod_templates(helm.render())["head"]["spec"]["automountServiceAccountToken"]


def budgets(example: Path | None = None, values: str = "") -> dict[str, dict[str, Any]]:
    """Their specs by component."""
    found = [m.body for m in helm.render(example, values=values) if m.kind == "PodDisruptionBudget"]
    return {b["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: b["spec"] for b in found}


def test_budgets_leave_all_but_one() -> None:
    """Integers only: for a RayCluster's pods, percentages and maxUnavailable allow no eviction at all."""
    fast = budgets(PLUS_ONE)["fast-path"]
    assert fast == {
        "minAvailable": 3,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": SELECTOR | {"app.kubernetes.io/component": "fast-path"}},
    }
    assert set(budgets()) == {"head"}, "a worker that may never go would block every drain"
    assert set(budgets(MULTI)) == {"head", "fast-path"}, "two pods of a replica; one verifier"
    off = "{enabled: false}"
    told = f"podDisruptionBudget: {{fastPath: {off}, verifier: {{minAvailable: 1}}, head: {off}}}"
    assert budgets(PLUS_ONE, told) == {}, "they are never ready: all might go in any case"
    ready = f"{told}\nverifier: {{ingress: true}}"
    assert {c: b["minAvailable"] for c, b in budgets(PLUS_ONE, ready).items()} == {"verifier": 1}


def test_a_head_that_the_service_needs_is_protected() -> None:
    assert budgets()["head"]["minAvailable"] == 1
    assert "head" not in budgets(LOCKED), "with Redis it may go"
    told = budgets(LOCKED, "podDisruptionBudget: {head: {minAvailable: 1}}")
    assert told["head"]["minAvailable"] == 1


def test_pods_that_serve_nobody_never_block_a_drain() -> None:
    for example in (None, PLUS_ONE, LOCKED, MULTI):
        for component, budget in budgets(example).items():
            assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow", component


def selected(selector: dict[str, str], template: dict[str, Any]) -> bool:
    return selector.items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("example", [PLUS_ONE, LOCKED], ids=["gpu-4-plus-1", "locked-down"])
def test_selectors_find_our_pods_and_no_others(example: Path) -> None:
    templates = helm.pod_templates(helm.render(example))
    for manifest in helm.render(example):
        spec = manifest.body.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector", {})).get("matchLabels")
        if manifest.kind in ("PodDisruptionBudget", "PodMonitor", "NetworkPolicy"):
            assert any(selected(selector, t) for t in templates.values()), manifest.body["metadata"]["name"]
            assert "app.kubernetes.io/instance" in selector, "another release's pods are not ours"
            assert not any(key.startswith("ray.io/") for key in selector), "names that KubeRay makes up"
    for template in templates.values():
        assert "app.kubernetes.io/name" not in template["metadata"]["labels"], (
            "KubeRay's services need theirs"
        )


def test_pod_monitor_reads_ports_that_pods_have() -> None:
    for example, expected in (
        (PLUS_ONE, {"metrics", "as-metrics", "dash-metrics"}),
        (LOCKED, {"metrics", "as-metrics", "dash-metrics", "proxy-metrics"}),
    ):
        rendered = helm.render(example)
        endpoints = helm.one(rendered, "PodMonitor")["spec"]["podMetricsEndpoints"]
        assert {e["port"] for e in endpoints} == expected
        named = {p["name"] for t in helm.pod_templates(rendered).values() for p in container(t)["ports"]}
        assert expected <= named
    assert helm.one(helm.render(PLUS_ONE), "PodMonitor")["metadata"]["labels"]["release"] == "prometheus"


def test_rules_and_dashboards_are_the_files(tmp_path: Path) -> None:
    chart = helm.copy_chart(tmp_path)
    for folder in ("rules", "dashboards"):
        for file in (chart / folder).iterdir():
            file.unlink()
    assert not {"PrometheusRule"} & {m.kind for m in helm.render(PLUS_ONE, chart=chart)}, "without any"
    rule = {
        "groups": [
            {"name": "g", "rules": [{"alert": "A", "expr": "1", "annotations": {"x": "{{ $value }}"}}]}
        ]
    }
    board = {"title": "{{mode}}", "panels": [{"legendFormat": "{{ instance }}"}]}
    (chart / "rules" / "one.yaml").write_text(yaml.safe_dump(rule))
    (chart / "dashboards" / "two.json").write_text(json.dumps(board, indent=1))
    rendered = helm.render(PLUS_ONE, values="common: {labels: {a: b}}", chart=chart)
    assert helm.one(rendered, "PrometheusRule", "-one")["spec"] == rule, "templates in them are Prometheus's"
    dashboard = helm.one(rendered, "ConfigMap", "-dashboard-two")
    assert json.loads(dashboard["data"]["two.json"]) == board
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_runbooks_have_an_address_when_one_is_given() -> None:
    plain = json.dumps(helm.one(helm.render(PLUS_ONE), "PrometheusRule")["spec"])
    assert "runbook_url" not in plain
    values = "prometheusRule: {runbookPrefix: 'https://git.example/llm42/'}"
    linked = json.dumps(helm.one(helm.render(PLUS_ONE, values=values), "PrometheusRule")["spec"])
    assert linked == plain.replace('"runbook": "', '"runbook_url": "https://git.example/llm42/')


def test_our_rules_and_dashboards_name_metrics_that_exist() -> None:
    from llm42.telemetry.metrics import CATALOGUE

    known = {m.name for m in CATALOGUE}
    texts = [f.read_text() for d in ("rules", "dashboards") for f in (helm.CHART / d).glob("*.*")]
    used = {name for text in texts for name in re.findall(r"\bray_(llm42_[a-z0-9_]+)", text)}
    bare = {name if name in known else re.sub(r"_(total|bucket|sum|count)$", "", name) for name in used}
    assert bare <= known, f"unknown: {bare - known}"
    assert bare, "the search finds some"


def test_scripts_are_the_files() -> None:
    data = helm.one(helm.render(), "ConfigMap", "-scripts")["data"]
    files = {f.name: f.read_text() for f in (helm.CHART / "files").glob("*.*")}
    assert files
    assert {name: text.rstrip() for name, text in data.items()} == {n: t.rstrip() for n, t in files.items()}
    for name, text in data.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


def test_routes_lead_to_the_service_that_kuberay_keeps() -> None:
    """KubeRay points this one service at the active cluster; a service of ours would mix two."""
    locked = helm.render(LOCKED)
    name = helm.service(locked)["serveService"]["metadata"]["name"]
    assert name == "llm42-prod-serve-svc"
    (rule,) = helm.one(locked, "Ingress")["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert (rule["host"], backend) == ("llm.example.com", {"name": name, "port": {"number": 8000}})
    assert helm.one(locked, "Ingress")["spec"]["tls"][0]["secretName"] == "llm-example-com"
    routed = helm.render(PLUS_ONE)
    route = helm.one(routed, "HTTPRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert set(route["spec"]) == {"parentRefs", "hostnames", "rules"}
    (rule,) = route["spec"]["rules"]
    assert set(rule) == {"matches", "timeouts", "backendRefs"}
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}, "a long stream is not ended"
    told = "httpRoute: {requestTimeout: 30m, backendRequestTimeout: 10m}"
    (rule_told,) = helm.one(helm.render(PLUS_ONE, values=told), "HTTPRoute")["spec"]["rules"]
    assert rule_told["timeouts"] == {"request": "30m", "backendRequest": "10m"}
    assert rule["backendRefs"] == [{"name": "rel-llm42-serve-svc", "port": 8000}]
    assert helm.service(routed)["serveService"]["metadata"]["name"] == "rel-llm42-serve-svc"
    assert "Service" not in kinds(LOCKED) + kinds(PLUS_ONE)


def test_long_names_stay_within_kuberays_limits() -> None:
    done = helm.run("template", "a-release-with-a-name-of-fifty-three-characters-x-y-z", helm.CHART)
    (spec,) = [d for d in yaml.load_all(done.stdout, yaml.CSafeLoader) if d and d["kind"] == "RayService"]
    assert len(spec["metadata"]["name"]) <= 40
    assert len(spec["spec"]["serveService"]["metadata"]["name"]) <= 50


def test_service_monitor_reads_the_same_through_a_service_of_its_own() -> None:
    on = "podMonitor: {enabled: false}\nserviceMonitor: {enabled: true, labels: {release: prometheus}}"
    for example in (PLUS_ONE, LOCKED):
        pods = helm.one(helm.render(example), "PodMonitor")["spec"]["podMetricsEndpoints"]
        rendered = helm.render(example, values=on)
        monitor, service = helm.one(rendered, "ServiceMonitor"), helm.one(rendered, "Service")
        assert monitor["spec"]["endpoints"] == pods
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert {p["name"] for p in service["spec"]["ports"]} == {e["port"] for e in pods}
        assert service["spec"]["selector"] == SELECTOR
        assert service["spec"]["clusterIP"] == "None", "an address would be one for clients"
        assert service["spec"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("kind", ["podMonitor", "serviceMonitor"])
def test_monitors_take_time_outs_and_relabelings(kind: str) -> None:
    own = "[{targetLabel: cluster, replacement: eu}]"
    drop = "[{action: drop, sourceLabels: [__name__], regex: 'ray_gcs.*'}]"
    values = f"{kind}: {{enabled: true, scrapeTimeout: 9s, relabelings: {own}, metricRelabelings: {drop}}}"
    monitor = helm.one(helm.render(values=values), kind[0].upper() + kind[1:])["spec"]
    for endpoint in monitor.get("podMetricsEndpoints") or monitor["endpoints"]:
        assert endpoint["scrapeTimeout"] == "9s"
        assert [r["targetLabel"] for r in endpoint["relabelings"]] == [
            "ray_io_cluster",
            "release",
            "component",
            "cluster",
        ]
        assert endpoint["metricRelabelings"] == yaml.safe_load(drop)
    plain = helm.one(helm.render(values=f"{kind}: {{enabled: true}}"), kind[0].upper() + kind[1:])["spec"]
    for endpoint in plain.get("podMetricsEndpoints") or plain["endpoints"]:
        assert set(endpoint) == {"port", "interval", "relabelings"}


def test_there_is_nothing_for_keda_to_scale() -> None:
    """Its ScaledObject needs the target's scale subresource. When KubeRay's kinds get one, look again."""
    from tests.chart import schemas

    if not schemas.crd_there():
        pytest.skip(f"KubeRay's CRD is not at {schemas.CRD}")
    for version in schemas.ray_service_crd()["spec"]["versions"]:
        assert "scale" not in version.get("subresources", {}), version["name"]


def test_an_ingress_lets_streams_and_long_prompts_through() -> None:
    annotations = helm.one(helm.render(LOCKED), "Ingress")["metadata"]["annotations"]
    told = {name.rpartition("/")[2]: value for name, value in annotations.items()}
    assert told["proxy-buffering"] == told["proxy-request-buffering"] == "off"
    assert int(told["proxy-read-timeout"]) == int(told["proxy-send-timeout"]) == 3600
    assert told["proxy-body-size"] == "64m"


def test_examples_name_the_objects_that_they_take_for_granted() -> None:
    """Secrets, claims and classes that are not the chart's stand in the example's head, with a command."""
    for example in (*helm.EXAMPLES, helm.SEVERAL):
        text, rendered = example.read_text(), helm.render(example)
        made = {m.body["metadata"]["name"] for m in rendered}
        named = set(
            re.findall(
                r"(?:claimName|secretName|runtimeClassName): (\S+)",
                yaml.safe_dump_all(m.body for m in rendered),
            )
        )
        named |= {x for m in rendered for x in secrets(m.body)}
        comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
        for name in named - made:
            assert re.search(rf"kubectl .*\b{name}\b|\"{name}\"", comments), f"{example.name}: {name}"
        assert "priorityClassName" not in text, example.name


def secrets(node: Any) -> set[str]:
    """Names of the secrets that an object refers to."""
    if isinstance(node, dict):
        own = {node[k]["name"] for k in ("secretKeyRef", "secretRef") if k in node}
        own |= {p["name"] for p in node.get("imagePullSecrets") or []}
        return own.union(*(secrets(v) for v in node.values()))
    return set[str]().union(*(secrets(v) for v in node)) if isinstance(node, list) else set()

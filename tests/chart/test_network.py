"""Network policies: who reaches which port. Evaluated here the way Kubernetes does, rule by rule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart import helm

LOCKED = helm.example("locked-down")
INSIDE = (6379, 10001, 52365, 8404, 30000, 30500, 40000)
"""GCS, client, agent, HAProxy's statistics, replicas' HTTP and gRPC ports."""


def allowed(
    manifests: tuple[helm.Manifest, ...], component: str, port: int, peer: dict[str, Any] | None
) -> bool:
    """Whether a peer (an entry of `from`, compared as written; None: any other pod) reaches a pod's port."""
    labels = helm.pod_templates(manifests)[component]["metadata"]["labels"]
    policies = [m.body["spec"] for m in manifests if m.kind == "NetworkPolicy"]
    chosen = [p for p in policies if "Ingress" in p["policyTypes"] and selects(p["podSelector"], labels)]
    if not chosen:
        return True
    rules = [r for p in chosen for r in p.get("ingress", [])]
    return any(
        ("from" not in r or peer in r["from"])
        and ("ports" not in r or port in [p["port"] for p in r["ports"]])
        for r in rules
    )


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        e["operator"] == "In" and labels.get(e["key"]) in e["values"]
        for e in selector.get("matchExpressions", [])
    )


@pytest.fixture(scope="module")
def locked() -> tuple[helm.Manifest, ...]:
    return helm.render(LOCKED)


def peers(manifests: tuple[helm.Manifest, ...]) -> dict[str, dict[str, Any]]:
    own = {"app.kubernetes.io/part-of": "llm42", "app.kubernetes.io/instance": helm.RELEASE}

    def space(name: str) -> dict[str, Any]:
        return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}

    operator = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    return {
        "own": {"podSelector": {"matchLabels": own}},
        "clients": space("ingress-nginx"),
        "prometheus": space("monitoring"),
        "operator": space("kuberay-system") | operator,
    }


def test_our_pods_reach_each_other_on_all_ports(locked: tuple[helm.Manifest, ...]) -> None:
    for component in ("head", "fast-path"):
        assert all(allowed(locked, component, port, peers(locked)["own"]) for port in (8000, 8265, *INSIDE))


def test_nobody_else_reaches_rays_and_haproxys_ports(locked: tuple[helm.Manifest, ...]) -> None:
    for who in ("clients", "prometheus", "operator", None):
        peer = peers(locked)[who] if who else None
        for component in ("head", "fast-path"):
            assert not any(allowed(locked, component, port, peer) for port in INSIDE), (who, component)
    # the control: without policies everybody does
    assert all(allowed(helm.render(), "head", port, None) for port in INSIDE)


@pytest.mark.parametrize(
    ("who", "component", "ports"),
    [
        ("clients", "fast-path", {8000}),
        ("clients", "head", set()),
        ("prometheus", "fast-path", {8080, 9101, 44217, 44227}),
        ("prometheus", "head", {8080, 9101, 44217, 44227}),
        ("operator", "head", {8265}),
        ("operator", "fast-path", set()),
        (None, "fast-path", set()),
    ],
)
def test_each_peer_reaches_its_ports_and_no_more(
    locked: tuple[helm.Manifest, ...], who: str | None, component: str, ports: set[int]
) -> None:
    asked = {80, 8000, 8080, 8265, 9101, 44217, 44227, *INSIDE}
    peer = peers(locked)[who] if who else None
    assert {p for p in asked if allowed(locked, component, p, peer)} == ports


def test_clients_default_to_the_namespace_and_haproxys_metrics_need_haproxy() -> None:
    rendered = helm.render(values="networkPolicy: {enabled: true, prometheus: [{podSelector: {}}]}")
    assert allowed(rendered, "fast-path", 8000, {"podSelector": {}})
    assert allowed(rendered, "fast-path", 8080, {"podSelector": {}})
    assert not allowed(rendered, "fast-path", 9101, {"podSelector": {}})


def egress(manifests: tuple[helm.Manifest, ...]) -> list[dict[str, Any]]:
    policy = helm.one(manifests, "NetworkPolicy", "llm42-prod")["spec"]
    assert "Egress" in policy["policyTypes"]
    rules: list[dict[str, Any]] = policy["egress"]
    return rules


def test_egress_is_what_the_pods_need(locked: tuple[helm.Manifest, ...]) -> None:
    inside, names, redis = egress(locked)
    assert inside == {"to": [peers(locked)["own"]]}
    assert {(p["protocol"], p["port"]) for p in names["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert names["to"][0]["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}
    anywhere = egress(helm.render(LOCKED, values="networkPolicy: {egress: {dns: []}}"))[1]
    assert set(anywhere) == {"ports"}
    assert redis["ports"] == [{"protocol": "TCP", "port": 6379}]
    extra = "networkPolicy: {egress: {extra: [{to: [{ipBlock: {cidr: 10.0.0.0/8}}]}]}}"
    assert egress(helm.render(LOCKED, values=extra))[-1] == {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}


API = "networkPolicy: {egress: {kubernetesApi: [{ipBlock: {cidr: 10.1.0.1/32}}]}}"
SCALES = "fastPath: {autoscaling: {enabled: true}}"


def test_only_the_head_reaches_the_kubernetes_api() -> None:
    scaled = helm.render(LOCKED, values=f"{API}\n{SCALES}")
    policy = helm.one(scaled, "NetworkPolicy", "-api")["spec"]
    assert policy["policyTypes"] == ["Egress"]
    (rule,) = policy["egress"]
    assert rule["to"] == [{"ipBlock": {"cidr": "10.1.0.1/32"}}]
    assert [p["port"] for p in rule["ports"]] == [443, 6443], "Ray's autoscaler asks it"
    labels = {c: t["metadata"]["labels"] for c, t in helm.pod_templates(scaled).items()}
    assert {c for c in labels if selects(policy["podSelector"], labels[c])} == {"head"}
    for rule in egress(scaled):
        assert 443 not in [p["port"] for p in rule.get("ports", [])], "nobody else's policy has it"
    assert not any(m.body["metadata"]["name"].endswith("-api") for m in helm.render(LOCKED, values=API))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (SCALES, "networkPolicy.egress.kubernetesApi"),
        ("config: {telemetry: {traces: otlp}}", "allow the way to the collector"),
        (
            f"model: {{source: huggingface, path: '', huggingface: {{repo: a/b, revision: '{0:040x}'}}}}",
            "allow the way to the Hub",
        ),
    ],
)
def test_a_way_out_that_pods_need_and_do_not_have_is_refused(values: str, message: str) -> None:
    assert message in helm.refusal(values, LOCKED)
    peer = "[{ipBlock: {cidr: 10.0.0.0/8}}]"
    out = f"networkPolicy: {{egress: {{extra: [{{to: {peer}}}], kubernetesApi: {peer}}}}}"
    assert helm.render(LOCKED, values=f"{values}\n{out}")


def test_haproxy_asks_for_a_policy() -> None:
    said = helm.refusal("serve: {haProxy: {enabled: true}}")
    assert "networkPolicy.enabled" in said
    assert "8404" in said

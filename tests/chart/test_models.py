"""Several models in one release: each is what a release of its own would be."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.chart import helm

VALUES: dict[str, Any] = yaml.safe_load(helm.SEVERAL.read_text())


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As helm merges values: maps by key, the rest replaced."""
    made = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = merged(made[key], value) if both else value
    return made


def by_name(manifests: tuple[helm.Manifest, ...]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(m.kind, m.body["metadata"]["name"]): m.body for m in manifests}


def test_each_model_is_what_a_release_of_its_own_renders() -> None:
    together = by_name(helm.render(helm.SEVERAL, release="team"))
    (board,) = [key for key in together if "dashboard" in key[1]]
    del together[board]
    for name, own in VALUES["models"].items():
        base = {k: v for k, v in VALUES.items() if k not in ("models", "dashboard")}
        alone = by_name(helm.render(values=yaml.safe_dump(merged(base, own)), release=f"team-{name}"))
        assert len(alone) > 3
        for key, body in alone.items():
            assert together.pop(key) == body, key
    assert not together, "objects of no model"


def test_values_of_an_entry_win_also_when_they_switch_off() -> None:
    rendered = helm.render(helm.SEVERAL, release="team")
    kinds = [(m.kind, m.body["metadata"]["name"]) for m in rendered]
    assert ("PrometheusRule", "team-small-llm42-llm42") in kinds
    assert ("PrometheusRule", "team-large-llm42-llm42") not in kinds
    services = [m.body["spec"] for m in rendered if m.kind == "RayService"]
    paths = {yaml.safe_load(s["serveConfigV2"])["applications"][0]["args"]["model"]["path"] for s in services}
    assert paths == {"/models/Qwen3-8B", "/models/Qwen3-32B"}


def test_no_selector_of_one_model_finds_anothers_pods() -> None:
    rendered = helm.render(helm.SEVERAL, release="team")
    owners = {
        m.body["metadata"]["labels"]["app.kubernetes.io/instance"] for m in rendered if m.kind == "RayService"
    }
    assert owners == {"team-small", "team-large"}
    for manifest in rendered:
        spec = manifest.body.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector", {})).get("matchLabels")
        if selector is not None:
            assert selector["app.kubernetes.io/instance"] in owners, manifest.kind


def test_the_notes_tell_of_each_model() -> None:
    done = helm.run("install", "team", helm.CHART, "--dry-run=client", "-f", helm.SEVERAL)
    assert done.returncode == 0, done.stderr
    for name in ("small", "large"):
        assert f"get rayservice team-{name}-llm42 -w" in done.stdout.partition("\nNOTES:\n")[2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("models: {a: {imgae: x}}", "at '/models/a': additional properties 'imgae'"),
        ("models: {A: {}}", "at '/models': additional properties 'A'"),
        ("models: {a: {fastPath: {replicas: 0}}}", "at '/models/a/fastPath/replicas': minimum"),
        ("models: {a: {models: {b: {}}}}", "an entry has no models of its own"),
        ("models: {a: {dashboard: {enabled: true}}}", "one dashboard shows all"),
        ("{fullnameOverride: x, models: {a: {}}}", "would give all of them one name"),
        ("{serviceAccount: {name: s}, models: {a: {}}}", "would be made once a model"),
        (
            "{ingress: {enabled: true, host: h}, models: {a: {}, b: {}}}",
            "models.a and models.b have the address",
        ),
        (
            "{httpRoute: {enabled: true, parentRefs: [{name: x}]}, models: {a: {}, b: {}}}",
            "models.a and models.b have the address * (httpRoute.hostnames)",
        ),
        ("models: {a: {fullnameOverride: x}, b: {fullnameOverride: x}}", "have the name x both"),
        ("models: {a: {config: {engine: {threads: 0}}}}", "config.engine.threads: give a number"),
    ],
)
def test_what_models_cannot_share_is_refused(values: str, message: str) -> None:
    assert message in helm.refusal(values)

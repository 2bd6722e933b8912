"""Every example, and the defaults: lint, and every object valid against a cluster's schemas."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.chart import helm, schemas

CASES = (None, *helm.EXAMPLES)
NAMES = ["defaults", *(e.stem for e in helm.EXAMPLES)]
every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)
with_several = pytest.mark.parametrize("case", [*CASES, helm.SEVERAL], ids=[*NAMES, helm.SEVERAL.stem])


@with_several
def test_lint(case: Path | None) -> None:
    done = helm.run("lint", helm.CHART, "--strict", *(["-f", case] if case else []))
    assert done.returncode == 0, done.stdout + done.stderr


@with_several
def test_every_object_is_valid(case: Path | None) -> None:
    manifests = helm.render(case)
    assert {"RayService", "ConfigMap"} <= {m.kind for m in manifests}
    for manifest in manifests:
        schemas.check(manifest.body)


@every_case
def test_pod_templates_are_valid_pods(case: Path | None) -> None:
    for component, template in helm.pod_templates(helm.render(case)).items():
        metadata = template["metadata"] | {"name": component}
        schemas.check_core({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata})


@pytest.mark.skipif(not schemas.crd_there(), reason=f"KubeRay's CRD is not at {schemas.CRD}")
@every_case
def test_the_ray_service_fits_kuberays_crd(case: Path | None) -> None:
    schemas.check_ray_service(helm.one(helm.render(case), "RayService"))


@with_several
def test_names_and_namespace(case: Path | None) -> None:
    bodies = [m.body for m in helm.render(case)]
    assert {b["metadata"]["namespace"] for b in bodies} == {"serving"}
    keys = [(b["kind"], b["metadata"]["name"]) for b in bodies]
    assert len(set(keys)) == len(keys), "two objects of one name"
    for body in bodies:
        release = body["metadata"]["labels"]["app.kubernetes.io/instance"]
        assert release.startswith(helm.RELEASE) if case == helm.SEVERAL else release == helm.RELEASE


def test_every_template_is_rendered_by_some_example() -> None:
    rendered = {m.template for case in CASES for m in helm.render(case)}
    rendered.add("extra.yaml")  # objects of the user's own: test_operations.py
    assert rendered == {f.name for f in (helm.CHART / "templates").glob("*.yaml")}


@every_case
def test_dry_run_prints_the_notes(case: Path | None) -> None:
    done = helm.run("install", helm.RELEASE, helm.CHART, "--dry-run=client", *(["-f", case] if case else []))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("\nNOTES:\n")[2]
    name = helm.one(helm.render(case), "RayService")["metadata"]["name"]
    assert f"get rayservice {name} -w" in notes
    assert f"svc/{name}-serve-svc 8000:8000" in notes
    assert "%!" not in notes, "a format without its value"


# What follows shows that the checks above can fail.


def broken(change: str) -> dict[str, Any]:
    body = helm.one(helm.render(helm.example("locked-down")), "RayService")
    spec = body["spec"]
    group = spec["rayClusterConfig"]["workerGroupSpecs"][0]
    container = group["template"]["spec"]["containers"][0]
    changes: dict[str, Any] = {
        "unknown": spec | {"serveConfigV3": ""},
        "missing": {k: v for k, v in spec.items() if k != "rayClusterConfig"},
        "type": spec | {"excludeHeadPodFromServeSvc": "yes"},
        "enum": spec | {"rayClusterConfig": spec["rayClusterConfig"] | {"authOptions": {"mode": "basic"}}},
        "twice": spec
        | {
            "rayClusterConfig": spec["rayClusterConfig"]
            | {"workerGroupSpecs": [group | {"template": {"spec": {"containers": [container, container]}}}]}
        },
    }
    return body | {"spec": changes[change]}


@pytest.mark.skipif(not schemas.crd_there(), reason=f"KubeRay's CRD is not at {schemas.CRD}")
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("unknown", "serveConfigV3"),
        ("missing", "rayClusterConfig"),
        ("type", "excludeHeadPodFromServeSvc"),
        ("enum", "basic"),
        ("twice", "stands there twice"),
    ],
)
def test_the_crd_check_can_fail(change: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        schemas.check_ray_service(broken(change))


MISSPELT = [
    ("PodDisruptionBudget", ("spec", "minAvailible")),
    ("NetworkPolicy", ("spec", "egres")),
    ("Ingress", ("spec", "ingressClass")),
    ("PodMonitor", ("spec", "podMetricsEndpoint")),
    ("PrometheusRule", ("spec", "group")),
    ("ServiceMonitor", ("spec", "endpoints", 0, "scrapeTimeOut")),
    ("Service", ("spec", "ports", 0, "targetport")),
    ("HTTPRoute", ("spec", "rules", 0, "timeouts", "backend")),
    ("Job", ("spec", "template", "spec", "containers", 0, "resource")),
    ("PersistentVolumeClaim", ("spec", "storageClass")),
    ("ServiceAccount", ("automountToken",)),
    ("ConfigMap", ("datum",)),
    ("RayService", ("spec", "serveConfigV3")),
]


def test_the_examples_render_every_kind_that_is_checked() -> None:
    kinds = {m.kind for case in CASES for m in helm.render(case)}
    assert kinds == {kind for kind, _ in MISSPELT}


@pytest.mark.parametrize(("kind", "path"), MISSPELT, ids=[kind for kind, _ in MISSPELT])
def test_a_misspelt_field_is_found(kind: str, path: tuple[str | int, ...]) -> None:
    if kind == "RayService" and not schemas.crd_there():
        pytest.skip(f"KubeRay's CRD is not at {schemas.CRD}")
    body = next(m.body for case in CASES for m in helm.render(case) if m.kind == kind)
    schemas.check(body)
    wrong = copy.deepcopy(body)
    place: Any = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "5s"
    with pytest.raises((kubernetes_validate.ValidationError, AssertionError, ValueError)):
        schemas.check(wrong)

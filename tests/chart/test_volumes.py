"""Where the model and the cache are kept, and how the model gets there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart import helm
from tests.chart.helm import container

PLUS_ONE, COLOCATED, LOCKED = (helm.example(n) for n in ("gpu-4-plus-1", "gpu-colocated", "locked-down"))
ALONE = "model: {huggingface: {job: {enabled: false}}}"


def volume(template: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [v for v in template["spec"]["volumes"] if v["name"] == name]
    return {k: v for k, v in found.items() if k != "name"}


def fetching(values: str = "") -> dict[str, Any]:
    """The init container that downloads."""
    told = yaml.safe_load(values) or {}
    told.setdefault("model", {}).setdefault("huggingface", {})["job"] = {"enabled": False}
    templates = helm.pod_templates(helm.render(PLUS_ONE, values=yaml.safe_dump(told)))
    (found,) = templates["fast-path"]["spec"]["initContainers"]
    assert found["name"] == "fetch-model"
    return dict(found)


def test_a_claim_of_the_chart_is_what_pods_mount() -> None:
    rendered = helm.render(PLUS_ONE)
    claims = {m.body["metadata"]["name"]: m.body for m in rendered if m.kind == "PersistentVolumeClaim"}
    assert set(claims) == {"rel-llm42-model", "rel-llm42-cache"}
    for claim in claims.values():
        assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "pods on several nodes write"
        assert claim["spec"]["storageClassName"] == "shared"
    for component in ("fast-path", "verifier"):
        template = helm.pod_templates(rendered)[component]
        for name in ("model", "cache"):
            assert volume(template, name) == {"persistentVolumeClaim": {"claimName": f"rel-llm42-{name}"}}
    assert volume(helm.pod_templates(rendered)["head"], "cache") == {"emptyDir": {}}


def test_a_pod_that_is_added_finds_what_the_others_made() -> None:
    """Certificates, exports and compiled kernels are all in the cache, which outlives the pod."""
    rendered = helm.render(PLUS_ONE)
    args = helm.serve_config(rendered)["applications"][0]["args"]
    env = {e["name"]: e.get("value") for e in container(helm.pod_templates(rendered)["verifier"])["env"]}
    kept = [args["verifier"]["certificate_dir"], args["engine"]["vllm"]["export_dir"]]
    kept += [env[n] for n in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")]
    mounts = {m["mountPath"]: m for m in container(helm.pod_templates(rendered)["verifier"])["volumeMounts"]}
    assert mounts["/var/cache/llm42"]["name"] == "cache"
    assert all(str(place).startswith("/var/cache/llm42/") for place in kept)


def test_one_pod_that_is_never_beside_its_successor_may_have_a_claim_alone() -> None:
    """The control to what test_values.py sees refused."""
    once = "claim: {create: true, accessModes: [ReadWriteOnce]}"
    for values in (
        f"{{cache: {{{once}}}, upgrade: {{strategy: None}}}}",
        f"model: {{huggingface: {{{once}}}}}",  # not where the model comes from
        "cache: {claim: {create: true, accessModes: [ReadOnlyMany, ReadWriteOnce]}}",
    ):
        assert helm.service(helm.render(values=values))


def test_a_volume_of_the_users_or_none() -> None:
    own = "cache: {volume: {hostPath: {path: /c}}}\nmodel: {source: image}"
    assert volume(helm.pod_templates(helm.render(values=own))["fast-path"], "cache") == {
        "hostPath": {"path": "/c"}
    }
    assert volume(helm.pod_templates(helm.render())["fast-path"], "cache") == {"emptyDir": {}}
    assert "PersistentVolumeClaim" not in {m.kind for m in helm.render()}


def test_no_example_takes_a_directory_of_the_node() -> None:
    """Pod Security forbids it, and nobody makes the directory: examples show it in a comment."""
    for example in (*helm.EXAMPLES, helm.SEVERAL):
        assert "hostPath" not in str(yaml.safe_load(example.read_text())), example.name
        for line in example.read_text().splitlines():
            if "hostPath" in line:
                assert "DirectoryOrCreate" in line
                assert "chown" in example.read_text()


def test_one_job_downloads_and_pods_wait_for_its_mark() -> None:
    rendered = helm.render(PLUS_ONE)
    pod = helm.one(rendered, "Job")["spec"]["template"]
    (job,) = pod["spec"]["containers"]
    assert pod["spec"]["restartPolicy"] == "OnFailure"
    for component in ("fast-path", "verifier"):
        template = helm.pod_templates(rendered)[component]
        (wait,) = template["spec"]["initContainers"]
        assert wait["args"] == [*job["args"], "--wait"], "the same mark"
        assert volume(template, "model") == volume(pod, "model")
        assert {m["name"]: m.get("readOnly") for m in wait["volumeMounts"]}["model"] is True
        assert {e["name"] for e in wait["env"]} == {"HOME"}, "it asks nobody"
    assert {m["name"]: m.get("readOnly") for m in job["volumeMounts"]}["model"] is None
    assert "HF_TOKEN" in {e["name"] for e in job["env"]}
    assert "Job" not in {m.kind for m in helm.render(PLUS_ONE, values=ALONE)}


def test_the_job_is_placed_as_the_other_pods_are() -> None:
    values = """
common:
  dnsConfig: {options: [{name: ndots, value: "2"}]}
  dnsPolicy: Default
  hostAliases: [{ip: 10.0.0.1, hostnames: [mirror]}]
  priorityClassName: serving
  schedulerName: other
  nodeSelector: {pool: serving, kind: a}
  tolerations: [{key: common, operator: Exists}]
model: {huggingface: {job: {nodeSelector: {kind: b}, tolerations: [{key: mine, operator: Exists}]}}}
"""
    spec = helm.one(helm.render(PLUS_ONE, values=values), "Job")["spec"]["template"]["spec"]
    head = helm.pod_templates(helm.render(PLUS_ONE, values=values))["head"]["spec"]
    for name in ("dnsConfig", "dnsPolicy", "hostAliases", "priorityClassName", "schedulerName"):
        assert spec[name] == head[name], name
    assert spec["nodeSelector"] == {"pool": "serving", "kind": "b"}
    assert {"common", "mine"} <= {t["key"] for t in spec["tolerations"]}
    plain = helm.one(helm.render(PLUS_ONE), "Job")["spec"]["template"]["spec"]
    assert not {"dnsConfig", "dnsPolicy", "hostAliases", "schedulerName"} & set(plain), "the control"


def test_another_commit_is_another_job_and_the_same_values_are_the_same() -> None:
    def name(values: str = "") -> str:
        return str(helm.one(helm.render(PLUS_ONE, values=values), "Job")["metadata"]["name"])

    assert name() == name("fastPath: {autoscaling: {maxReplicas: 9}}")
    assert name() != name(f"model: {{huggingface: {{revision: '{7:040x}'}}}}")


def test_the_download_has_memory_and_can_be_configured() -> None:
    plain = fetching()
    assert plain["resources"]["limits"]["memory"] == "8Gi"
    env = {e["name"]: e.get("value") for e in plain["env"]}
    assert env["HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT"] == "1gb"
    values = """
common:
  env: [{name: HTTPS_PROXY, value: "http://proxy:3128"}, {name: HF_ENDPOINT, value: common}]
  envFrom: [{configMapRef: {name: proxies}}]
  volumes: [{name: ca, configMap: {name: ca}}]
  volumeMounts: [{name: ca, mountPath: /etc/ssl/own}]
model:
  huggingface:
    resources: {limits: {memory: 3Gi}}
    env: [{name: HF_ENDPOINT, value: mine}, {name: HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT, value: 2gb}]
    envFrom: [{secretRef: {name: hub}}]
"""
    told = fetching(values)
    assert told["resources"]["limits"]["memory"] == "3Gi"
    env = {e["name"]: e.get("value") for e in told["env"]}
    assert (env["HTTPS_PROXY"], env["HF_ENDPOINT"]) == ("http://proxy:3128", "mine")
    assert env["HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT"] == "2gb"
    assert len(env) == len(told["env"]), "a name twice is refused by the API server"
    assert told["envFrom"] == [{"configMapRef": {"name": "proxies"}}, {"secretRef": {"name": "hub"}}]
    assert {"name": "ca", "mountPath": "/etc/ssl/own"} in told["volumeMounts"]
    job = helm.one(helm.render(PLUS_ONE, values=values), "Job")["spec"]["template"]["spec"]
    assert job["containers"][0]["envFrom"] == told["envFrom"]
    assert {"name": "ca", "configMap": {"name": "ca"}} in job["volumes"]


def test_the_download_is_not_offline_where_the_service_is() -> None:
    offline = "[{name: HF_HUB_OFFLINE, value: '1'}]"
    for values, expected in (
        ("", "0"),
        (f"common: {{env: {offline}}}", "0"),
        (f"model: {{huggingface: {{env: {offline}}}}}", "1"),
    ):
        (told,) = [e for e in fetching(values)["env"] if e["name"] == "HF_HUB_OFFLINE"]
        assert told["value"] == expected, values
    ray = container(helm.pod_templates(helm.render(PLUS_ONE))["fast-path"])
    assert {e["name"]: e.get("value") for e in ray["env"]}["HF_HUB_OFFLINE"] == "1", "the control"


@pytest.mark.parametrize(
    ("values", "new"),
    [
        (f"model: {{huggingface: {{revision: '{7:040x}'}}}}", True),
        ("model: {huggingface: {allowPatterns: ['*']}}", True),
        ("model: {huggingface: {claim: {size: 1Ti}}}", False),
        ("model: {huggingface: {job: {backoffLimit: 1}, resources: {limits: {memory: 9Gi}}}}", False),
    ],
)
def test_how_a_model_is_fetched_makes_no_new_cluster(values: str, new: bool) -> None:
    def inputs(more: str = "") -> str:
        head = helm.pod_templates(helm.render(PLUS_ONE, values=more))["head"]
        return str(head["metadata"]["annotations"]["llm42/fingerprint-inputs"])

    assert (inputs(values) != inputs()) is new


@pytest.mark.parametrize("example", [None, LOCKED, PLUS_ONE], ids=["defaults", "locked-down", "gpu-4-plus-1"])
def test_the_head_needs_no_object_of_the_release(example: Path | None) -> None:
    """KubeRay's job that cleans Redis up is a copy of the head, and starts when Helm has deleted ours."""
    rendered = helm.render(example)
    head = helm.pod_templates(rendered)["head"]
    made = {(m.kind, m.body["metadata"]["name"]) for m in rendered}
    assert not [v for v in head["spec"]["volumes"] if "configMap" in v or "persistentVolumeClaim" in v]
    assert "ConfigMap" in {kind for kind, _ in made}
    if example == LOCKED:
        assert ("ServiceAccount", head["spec"]["serviceAccountName"]) not in made
        workers = helm.pod_templates(rendered)["fast-path"]["spec"]
        assert ("ServiceAccount", workers["serviceAccountName"]) in made, "the control"

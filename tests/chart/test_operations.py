"""What a running cluster is told: sizes, tolerations, the end of a pod, probes, labels, caches."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ray._private import ray_constants

from llm42.api.keys import KeyProblem, configured_keys
from llm42.config import Settings
from llm42.config.server import ServerSettings
from tests.chart import helm
from tests.chart.helm import container

PLUS_ONE, COLOCATED, MULTI = (helm.example(n) for n in ("gpu-4-plus-1", "gpu-colocated", "multi-node"))


def spec_that_decides(values: str) -> dict[str, Any]:
    """The cluster as KubeRay 1.7 compares it: without numbers of pods and tolerations."""
    cluster: dict[str, Any] = helm.service(helm.render(PLUS_ONE, values=values))["rayClusterConfig"]
    groups = cluster["workerGroupSpecs"]
    kept = [{k: v for k, v in g.items() if "eplicas" not in k} for g in groups]
    templates = {}
    for name, template in helm.pod_templates(helm.render(PLUS_ONE, values=values)).items():
        templates[name] = template | {"spec": template["spec"] | {"tolerations": None}}
    for group in kept:
        group["template"] = templates[group["groupName"]]
    head = cluster["headGroupSpec"] | {"template": templates["head"]}
    return cluster | {"headGroupSpec": head, "workerGroupSpecs": kept}


@pytest.mark.parametrize(
    "values",
    [
        "verifier: {tolerations: [{key: x, operator: Exists}]}",
        "head: {tolerations: [{key: x, operator: Exists}]}",
    ],
)
def test_sizes_and_tolerations_reach_a_running_release(values: str) -> None:
    assert spec_that_decides(values) != spec_that_decides("")


FIXED = "fastPath: {replicas: %d, autoscaling: {enabled: false}}"


def test_a_fixed_number_makes_a_new_cluster_and_the_bounds_of_a_group_that_scales_do_not() -> None:
    assert spec_that_decides(FIXED % 5) != spec_that_decides(FIXED % 4)
    assert spec_that_decides(FIXED % 4) != spec_that_decides(""), "scaling or not"
    for values in (
        "fastPath: {autoscaling: {minReplicas: 5}}",
        "fastPath: {autoscaling: {maxReplicas: 9}}",
        "verifier: {autoscaling: {maxReplicas: 3}}",
    ):
        assert spec_that_decides(values) == spec_that_decides(""), values


def test_sizes_may_be_left_to_the_operator_of_the_cluster() -> None:
    off = "upgrade: {newClusterOnScale: false}\n"
    assert spec_that_decides(off + FIXED % 5) == spec_that_decides(off + FIXED % 4)
    tolerated = off + "verifier: {tolerations: [{key: x, operator: Exists}]}"
    assert spec_that_decides(tolerated) != spec_that_decides(off)


def test_a_group_that_scales_leaves_its_size_to_ray() -> None:
    groups = helm.service(helm.render(PLUS_ONE))["rayClusterConfig"]["workerGroupSpecs"]
    assert not any("replicas" in g for g in groups)
    (fixed,) = helm.service(helm.render(COLOCATED))["rayClusterConfig"]["workerGroupSpecs"]
    assert (fixed["replicas"], fixed["minReplicas"], fixed["maxReplicas"]) == (1, 1, 1)


# The end of a pod.


def end_of(values: str) -> dict[str, tuple[int, int, int]]:
    """Seconds of preStop, of Ray's drain, and until the kill, by component."""
    found = {}
    for component, template in helm.pod_templates(helm.render(PLUS_ONE, values=values)).items():
        ray = container(template)
        env = {e["name"]: e.get("value") for e in ray["env"]}
        slept = int(ray["lifecycle"]["preStop"]["exec"]["command"][1])
        drain = int(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        found[component] = (slept, drain, template["spec"]["terminationGracePeriodSeconds"])
    return found


@pytest.mark.parametrize(
    ("values", "drain_s"),
    [("", Settings().server.drain_s), ("config: {server: {drain_s: 7.5}}", 7.5)],
)
def test_workers_drain_before_they_are_killed_and_the_head_stays(values: str, drain_s: float) -> None:
    ends = end_of(values)
    for component in ("fast-path", "verifier"):
        slept, drain, grace = ends[component]
        assert slept == 10, "endpoints have heard, and no more: Serve does not know yet"
        assert drain_s + 30 <= drain < drain_s + 31
        assert grace >= slept + drain + 30
    slept, drain, grace = ends["head"]
    assert slept > sum(ends["fast-path"][:2])
    assert drain == 0, "nothing moves from the head: it would only wait"
    assert grace > slept


def test_ray_reads_the_variable_of_its_drain() -> None:
    assert isinstance(ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, float)


def test_the_end_is_a_value_of_each_group() -> None:
    values = """
common: {terminationGracePeriodSeconds: 99, preStop: {exec: {command: [a]}}}
verifier: {terminationGracePeriodSeconds: 7, preStop: {sleep: {seconds: 3}}}
"""
    templates = helm.pod_templates(helm.render(PLUS_ONE, values=values))
    got = {
        name: (t["spec"]["terminationGracePeriodSeconds"], container(t)["lifecycle"]["preStop"])
        for name, t in templates.items()
    }
    assert got["head"] == got["fast-path"] == (99, {"exec": {"command": ["a"]}})
    assert got["verifier"] == (7, {"sleep": {"seconds": 3}})


@pytest.mark.parametrize(
    "values",
    [
        "fastPath: {terminationGracePeriodSeconds: 160}",
        "head: {terminationGracePeriodSeconds: 170}",
        "verifier: {terminationGracePeriodSeconds: 1}",  # of a group that is not there
        "{fastPath: {terminationGracePeriodSeconds: 60}, config: {server: {drain_s: 20}}}",
        "fastPath: {terminationGracePeriodSeconds: 9,"
        " env: [{name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: '1'}]}",
    ],
)
def test_a_short_end_that_fits_or_is_meant_is_taken(values: str) -> None:
    """The control to what test_values.py sees refused."""
    assert helm.render(values=values)


# Probes, networks, labels.


def test_probes_and_networks_are_values() -> None:
    values = """
readiness: {initialDelaySeconds: 77}
common:
  livenessProbe: {exec: {command: [x]}, periodSeconds: 9}
  hostNetwork: true
  dnsConfig: {options: [{name: ndots, value: "2"}]}
  hostAliases: [{ip: 10.0.0.1, hostnames: [a]}]
  priorityClassName: serving
"""
    for component, template in helm.pod_templates(helm.render(values=values)).items():
        spec, ray = template["spec"], container(template)
        assert ray["livenessProbe"]["periodSeconds"] == 9
        assert spec["hostNetwork"] is True
        assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        assert spec["dnsConfig"]["options"] == [{"name": "ndots", "value": "2"}]
        assert spec["hostAliases"][0]["ip"] == "10.0.0.1"
        assert spec["priorityClassName"] == "serving"
        if component != "head":
            assert ray["readinessProbe"]["initialDelaySeconds"] == 77
    for template in helm.pod_templates(helm.render()).values():
        assert "livenessProbe" not in container(template), "KubeRay's own asks the raylet"
        assert not {"hostNetwork", "dnsPolicy", "dnsConfig", "hostAliases"} & set(template["spec"])


def test_labels_and_annotations_of_the_service_object() -> None:
    values = (
        "rayService: {labels: {kueue.x-k8s.io/queue-name: q}, annotations: {ray.io/initializing-timeout: 2h}}"
    )
    metadata = helm.one(helm.render(values=values), "RayService")["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert metadata["labels"]["app.kubernetes.io/instance"] == helm.RELEASE
    assert metadata["annotations"] == {"ray.io/initializing-timeout": "2h"}


def test_the_head_has_no_gpu() -> None:
    rendered = helm.render(COLOCATED)
    params = helm.service(rendered)["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")
    seen = {
        name: [e["value"] for e in container(t)["env"] if e["name"] == "NVIDIA_VISIBLE_DEVICES"]
        for name, t in helm.pod_templates(rendered).items()
    }
    assert seen == {"head": ["void"], "fast-path": []}


def test_caches_outlive_a_container_and_scratch_is_bounded() -> None:
    for template in helm.pod_templates(helm.render(COLOCATED)).values():
        ray = container(template)
        places = [m["mountPath"] for m in ray["volumeMounts"] if m["name"] == "cache"]
        env = {e["name"]: e.get("value", "") for e in ray["env"]}
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH")
        for name in (*caches, "FLASHINFER_WORKSPACE_BASE"):
            assert env[name].startswith(f"{places[0]}/"), name
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        assert volumes["tmp"]["emptyDir"]["sizeLimit"] == "20Gi"
        assert volumes["home"]["emptyDir"]["sizeLimit"] == "10Gi"
        assert "ephemeral-storage" in ray["resources"]["requests"]


# The canonical layout.


def test_the_canonical_layout_is_one_value() -> None:
    def configured(values: str) -> Any:
        rendered = helm.render(values=values)
        args = helm.serve_config(rendered)["applications"][0]["args"]
        groups = helm.service(rendered)["rayClusterConfig"]["workerGroupSpecs"]
        return args["engine"].get("kind"), [g["groupName"] for g in groups]

    assert configured("layout: canonical") == ("canonical", ["fast-path"])
    gpu = "config: {model: {device: cuda}}"
    assert configured(f"{{layout: canonical, {gpu}}}") == ("canonical", ["fast-path", "verifier"])
    assert configured("") == (None, ["fast-path"]), "the control"
    example = helm.example("gpu-canonical")
    short = example.read_text().replace("    kind: canonical\n", "    threads: 1\n")
    short = short.replace("  dedicated: true\n", "").replace("  gpu: {count: 1}\n", "")
    whole = [m.body for m in helm.render(example, values="config: {engine: {threads: 1}}")]
    assert [m.body for m in helm.render(values=f"layout: canonical\n{short}")] == whole


# Keys and other objects.


def test_api_keys_come_from_a_secret() -> None:
    rendered = helm.render(helm.example("locked-down"))
    server = helm.serve_config(rendered)["applications"][0]["args"]["server"]
    templates = helm.pod_templates(rendered)
    (mount,) = [m for m in container(templates["fast-path"])["volumeMounts"] if m["name"] == "api-keys"]
    folder, _, name = server["api_keys_file"].rpartition("/")
    assert (mount["mountPath"], mount["readOnly"]) == (folder, True)
    (volume,) = [v for v in templates["fast-path"]["spec"]["volumes"] if v["name"] == "api-keys"]
    assert volume["secret"]["secretName"] == "llm42-api-keys"
    assert f"--from-file={name}\n" in helm.example("locked-down").read_text()
    assert "api-keys" not in {v["name"] for v in templates["head"]["spec"]["volumes"]}
    assert "api_keys_file" not in helm.serve_config(helm.render())["applications"][0]["args"]["server"]


def test_another_file_of_keys_restarts_ingresses_in_place() -> None:
    def told(values: str) -> tuple[Any, Any]:
        rendered = helm.render(helm.example("locked-down"), values=values)
        return helm.serve_config(rendered), helm.pod_templates(rendered)

    (config, pods), (other, same) = told(""), told("apiKeys: {key: api_keys-2.yaml}")
    server = other["applications"][0]["args"]["server"]
    assert server["api_keys_file"] == "/etc/llm42/keys/api_keys-2.yaml"
    assert (config != other, pods == same) == (True, True), "Serve acts, KubeRay does not"
    assert told("apiKeys: {secretName: other}")[1] != pods, "the control: a new cluster"


HASH = re.compile(r"\bsha256: +[\"']?[0-9a-f]{64}\b")


def test_no_example_brings_a_key_that_works() -> None:
    """Whoever installs an example as it is would let in everybody who has read it."""
    pages = (*(helm.ROOT / "docs").rglob("*.md"), helm.ROOT / "README.md", helm.CHART / "README.md")
    for file in (*helm.EXAMPLES, helm.SEVERAL, helm.CHART / "values.yaml", *pages):
        assert not HASH.search(file.read_text()), file
    for example in (*helm.EXAMPLES, helm.SEVERAL):
        assert "Secret" not in {m.kind for m in helm.render(example)}, example
    assert HASH.search(f"{{name: a, sha256: {hashlib.sha256(b'test').hexdigest()}}}"), "the control"


def test_the_secret_of_the_example_is_one_that_the_service_reads(tmp_path: Path) -> None:
    """The commands in its head make it; kubectl itself is left out."""
    lines = helm.example("locked-down").read_text().splitlines()
    text = "\n".join(line.removeprefix("#   ") for line in lines if line.startswith("#   "))
    made = text[text.index("KEY=") : text.index("kubectl -n serving create secret generic llm42-api-keys")]
    made = made.replace("    the client's; the cluster gets its hash alone", "")
    made = made.replace("$(openssl rand -hex 32)", "abc")
    subprocess.run(["bash", "-euc", made], cwd=tmp_path, check=True, capture_output=True)
    (key,) = configured_keys(ServerSettings(api_keys_file=str(tmp_path / "api_keys.yaml")))
    assert (key.name, key.sha256) == ("evaluation", hashlib.sha256(b"abc").hexdigest())
    with pytest.raises(KeyProblem):
        configured_keys(ServerSettings(api_keys_file=str(tmp_path / "none.yaml")))  # the control


def test_objects_of_ones_own() -> None:
    values = """
extraObjects:
  - {apiVersion: v1, kind: ConfigMap, metadata: {name: one, namespace: serving}, data: {a: b}}
  - "{apiVersion: v1, kind: ConfigMap, metadata: {name: {{ .Release.Name }}-two}}"
"""
    names = [m.body["metadata"]["name"] for m in helm.render(values=values) if m.template == "extra.yaml"]
    assert names == ["one", f"{helm.RELEASE}-two"]


def test_templates_of_others_in_a_map_are_left_alone() -> None:
    """An alert's text has actions of Prometheus, which Helm does not know."""
    told = {"metadata": {"name": "a"}, "data": {"summary": "{{ $labels.x }} is {{ .Release.Name }}"}}
    told |= {"apiVersion": "v1", "kind": "ConfigMap"}
    assert told in [m.body for m in helm.render(values=json.dumps({"extraObjects": [told]}))]
    assert "labels" in helm.refusal(json.dumps({"extraObjects": [json.dumps(told)]})), "the control: a text"


def notes(values: str) -> str:
    done = helm.run("install", helm.RELEASE, helm.CHART, "--dry-run=client", "-f", PLUS_ONE, values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


def test_the_first_hour_waits_for_the_service_before_it_waits_for_pods() -> None:
    """A wait for pods ends at once with an error while the operator has made none."""

    def waited(text: str) -> list[str]:
        return re.findall(r"wait --for=condition=Ready (\S+)", text)

    name = helm.one(helm.render(release="llm"), "RayService")["metadata"]["name"]
    page = (helm.ROOT / "docs" / "first-hour.md").read_text()
    assert waited(page) == [f"rayservice/{name}", "pod"]
    assert waited("kubectl wait --for=condition=Ready pod -l a=b") == ["pod"], "the control"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("", "asks nobody for a key: see apiKeys and"),
        ("apiKeys: {secretName: k}", "asks for a key:"),
        (f"config: {{server: {{api_keys: [{{name: a, sha256: '{7:064x}'}}]}}}}", "asks for a key:"),
    ],
)
def test_the_notes_say_whether_a_key_is_asked_for(values: str, said: str) -> None:
    assert said in notes(values)


def test_the_notes_say_what_a_scale_and_an_incremental_upgrade_do() -> None:
    usual = notes("")
    assert "4 fast-path pods and 1 verifier pod," in usual
    assert "is a new cluster" in usual
    assert "helm rollback" in usual
    assert "feature gate" not in usual
    assert "Verifier pods stay" in usual
    values = """
upgrade:
  newClusterOnScale: false
  strategy: NewClusterWithIncrementalUpgrade
  incremental: {gatewayClassName: x}
httpRoute: {enabled: false}
verifier: {ingress: true}
"""
    other = notes(values)
    assert "reaches the next cluster only" in other
    assert "feature gate RayServiceIncrementalUpgrade" in other
    assert "Verifier pods stay" not in other

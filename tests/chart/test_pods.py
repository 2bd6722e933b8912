"""rayservice.yaml: pods, placement, models, security, and what makes a new cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chart import helm
from tests.chart.helm import container

PLUS_ONE, LOCKED, MULTI = (helm.example(n) for n in ("gpu-4-plus-1", "locked-down", "multi-node"))
SELECTOR = {"app.kubernetes.io/part-of": "llm42", "app.kubernetes.io/instance": helm.RELEASE}


def test_the_head_takes_no_traffic_and_keeps_kuberays_probes() -> None:
    """KubeRay deploys the application once the head is ready: a head that waits for it never would be."""
    spec = helm.service(helm.render())
    assert spec["excludeHeadPodFromServeSvc"] is True
    assert spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "readinessProbe" not in container(helm.pod_templates(helm.render())["head"])


def test_workers_are_ready_when_the_script_says_so() -> None:
    for require in ("certified", "serving"):
        rendered = helm.render(PLUS_ONE, values=f"readiness: {{require: {require}}}\nserve: {{port: 8123}}")
        for component in ("fast-path", "verifier"):
            ray = container(helm.pod_templates(rendered)[component])
            script, *options = ray["readinessProbe"]["exec"]["command"][1:]
            assert options == ["--port=8123", f"--require={require}"]
            mounts = {m["name"]: m["mountPath"] for m in ray["volumeMounts"]}
            assert Path(script).parent == Path(mounts["scripts"])
            assert Path(script).name in helm.one(rendered, "ConfigMap", "-scripts")["data"]
            assert {"name": "serve", "containerPort": 8123} in ray["ports"]
        assert helm.serve_config(rendered)["http_options"]["port"] == 8123


def test_common_and_role_are_joined() -> None:
    values = """
common:
  env: [{name: A, value: common}, {name: RAY_worker_niceness, value: "5"}]
  nodeSelector: {zone: a, kind: x}
  tolerations: [{key: common, operator: Exists}]
  labels: {team: serving}
  rayStartParams: {object-store-memory: "1"}
fastPath:
  env: [{name: A, value: mine}]
  nodeSelector: {kind: b}
  tolerations: [{key: mine, operator: Exists}]
  volumes: [{name: extra, emptyDir: {}}]
  volumeMounts: [{name: extra, mountPath: /extra}]
  initContainers: [{name: first, image: busybox}]
  sidecars: [{name: beside, image: busybox}]
  priorityClassName: high
  schedulerName: other
  rayStartParams: {object-store-memory: "2"}
"""
    rendered = helm.render(values=values)
    fast, head = (helm.pod_templates(rendered)[name] for name in ("fast-path", "head"))
    env = {e["name"]: e["value"] for e in container(fast)["env"]}
    assert (env["A"], env["RAY_worker_niceness"]) == ("mine", "5")
    assert len(env) == len(container(fast)["env"]), "a name twice is refused by the API server"
    assert {e["name"]: e["value"] for e in container(head)["env"]}["A"] == "common"
    assert fast["spec"]["nodeSelector"] == {"zone": "a", "kind": "b"}
    assert [t["key"] for t in fast["spec"]["tolerations"]] == ["common", "mine"]
    assert head["spec"]["nodeSelector"] == {"zone": "a", "kind": "x"}
    assert fast["metadata"]["labels"]["team"] == "serving"
    assert {"name": "extra", "mountPath": "/extra"} in container(fast)["volumeMounts"]
    assert {"name": "extra", "emptyDir": {}} in fast["spec"]["volumes"]
    assert [c["name"] for c in fast["spec"]["initContainers"]] == ["first"]
    assert [c["name"] for c in fast["spec"]["containers"]] == ["ray-worker", "beside"]
    assert (fast["spec"]["priorityClassName"], fast["spec"]["schedulerName"]) == ("high", "other")
    groups = helm.service(rendered)["rayClusterConfig"]["workerGroupSpecs"]
    assert groups[0]["rayStartParams"]["object-store-memory"] == "2"


def test_vllms_sampler_that_needs_nvcc_is_off_and_can_be_switched_on() -> None:
    for values, expected in (
        ("", "0"),
        ('fastPath: {env: [{name: VLLM_USE_FLASHINFER_SAMPLER, value: "1"}]}', "1"),
    ):
        env = container(helm.pod_templates(helm.render(values=values))["fast-path"])["env"]
        assert {e["name"]: e.get("value") for e in env}["VLLM_USE_FLASHINFER_SAMPLER"] == expected


def test_spread_uses_the_groups_own_labels_unless_told_otherwise() -> None:
    for component, template in helm.pod_templates(helm.render(PLUS_ONE)).items():
        zone, host = template["spec"]["topologySpreadConstraints"]
        assert [zone["topologyKey"], host["topologyKey"]] == [
            "topology.kubernetes.io/zone",
            "kubernetes.io/hostname",
        ]
        for spread in (zone, host):
            assert spread["labelSelector"]["matchLabels"] == SELECTOR | {
                "app.kubernetes.io/component": component
            }
    own = (
        "common: {topologySpreadConstraints: [{maxSkew: 1, topologyKey: z, whenUnsatisfiable: DoNotSchedule,"
    )
    told = helm.render(values=f"{own} labelSelector: {{matchLabels: {{a: b}}}}}}]}}")
    (spread,) = helm.pod_templates(told)["head"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == {"a": "b"}


def test_gpus_are_limits_of_workers() -> None:
    templates = helm.pod_templates(helm.render(MULTI))
    counts = {
        name: container(t)["resources"]["limits"].get("nvidia.com/gpu") for name, t in templates.items()
    }
    assert counts == {"head": None, "fast-path": 4, "verifier": 1}
    groups = helm.service(helm.render(MULTI))["rayClusterConfig"]["workerGroupSpecs"]
    assert groups[0]["numOfHosts"] == 2
    mig = "fastPath: {gpu: {count: 1, resourceName: nvidia.com/mig-7g.141gb}}"
    shared = helm.render(helm.example("gpu-colocated"), values=mig)
    assert container(helm.pod_templates(shared)["fast-path"])["resources"]["limits"][
        "nvidia.com/mig-7g.141gb"
    ]


def model_mount(values: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The model's volume, its mount in a worker, and the path in the settings; none of it on the head."""
    rendered = helm.render(values=values)
    templates = helm.pod_templates(rendered)
    assert "model" not in {v["name"] for v in templates["head"]["spec"]["volumes"]}
    (volume,) = [v for v in templates["fast-path"]["spec"]["volumes"] if v["name"] == "model"]
    (mount,) = [m for m in container(templates["fast-path"])["volumeMounts"] if m["name"] == "model"]
    assert mount["readOnly"] is True
    return volume, mount, helm.serve_config(rendered)["applications"][0]["args"]["model"]["path"]


def test_the_model_comes_from_a_claim_or_the_node() -> None:
    claim = "model: {source: pvc, path: llama, pvc: {claimName: models, subPath: v1}}"
    volume, mount, path = model_mount(claim)
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert (mount["mountPath"], mount["subPath"], path) == ("/models", "v1", "/models/llama")
    volume, mount, path = model_mount('model: {source: hostPath, path: "", hostPath: {path: /data}}')
    assert volume["hostPath"] == {"path": "/data", "type": "Directory"}
    assert (mount["mountPath"], path) == ("/models", "/models")


def test_the_model_comes_from_hugging_face_at_a_commit() -> None:
    rendered = helm.render(PLUS_ONE, values="model: {huggingface: {job: {enabled: false}}}")
    args = helm.serve_config(rendered)["applications"][0]["args"]
    templates = helm.pod_templates(rendered)
    assert "initContainers" not in templates["head"]["spec"]
    for component in ("fast-path", "verifier"):
        (fetch,) = templates[component]["spec"]["initContainers"]
        options = dict(a.removeprefix("--").split("=", 1) for a in fetch["args"][1:])
        assert options["directory"] == args["model"]["path"] == f"/models/{options['revision']}"
        (token,) = [e for e in fetch["env"] if e["name"] == "HF_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "huggingface", "key": "token"}
        assert "HF_TOKEN" not in {e["name"] for e in container(templates[component])["env"]}
        assert fetch["image"] == container(templates[component])["image"]


def test_security_contexts_reach_every_container() -> None:
    api = "networkPolicy: {egress: {kubernetesApi: [{ipBlock: {cidr: 10.1.0.1/32}}]}}"
    scaled = helm.render(LOCKED, values=f"fastPath: {{autoscaling: {{enabled: true}}}}\n{api}")
    autoscaler = helm.service(scaled)["rayClusterConfig"]["autoscalerOptions"]
    contexts = [autoscaler["securityContext"]]
    for template in helm.pod_templates(scaled).values():
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        contexts += [c["securityContext"] for c in template["spec"]["containers"]]
        written = {m["mountPath"] for m in container(template)["volumeMounts"] if not m.get("readOnly")}
        assert {"/tmp", "/home/llm42", "/var/cache/llm42"} <= written, "where a read-only root needs room"
    read_only = "containerSecurityContext: {readOnlyRootFilesystem: true}"
    contexts += [
        c["securityContext"]
        for t in helm.pod_templates(helm.render(PLUS_ONE, values=read_only)).values()
        for c in t["spec"].get("initContainers", [])
    ]
    job = helm.one(helm.render(PLUS_ONE, values=read_only), "Job")["spec"]["template"]["spec"]
    contexts += [c["securityContext"] for c in job["containers"]]
    assert len(contexts) > 3
    for context in contexts:
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_image_digest_goes_before_the_tag() -> None:
    image = container(helm.pod_templates(helm.render(LOCKED))["head"])["image"]
    assert "@sha256:" in image
    assert container(helm.pod_templates(helm.render())["head"])["image"] == "llm42:0.1.0"
    pulls = helm.pod_templates(helm.render(PLUS_ONE))["head"]["spec"]["imagePullSecrets"]
    assert pulls == [{"name": "registry"}]


def test_token_authentication() -> None:
    assert helm.service(helm.render())["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    locked = helm.service(helm.render(LOCKED))["rayClusterConfig"]["authOptions"]
    assert locked == {"mode": "token", "secretName": "llm42-ray-token"}
    off = helm.service(helm.render(values="auth: {mode: disabled}"))["rayClusterConfig"]
    assert "authOptions" not in off


def test_redis_keeps_the_heads_state() -> None:
    options = helm.service(helm.render(LOCKED))["rayClusterConfig"]["gcsFaultToleranceOptions"]
    secret = {"secretKeyRef": {"name": "llm42-redis", "key": "password"}}
    assert options["redisPassword"] == {"valueFrom": secret}
    assert options["redisAddress"] == "redis.data.svc:6379"
    assert "externalStorageNamespace" not in options, "old and new cluster would share it"
    assert "gcsFaultToleranceOptions" not in helm.service(helm.render())["rayClusterConfig"]


def pods_hash(values: str, example: Path | None = None) -> str:
    """What KubeRay compares to decide on a new cluster, as far as the chart makes it differ."""
    templates = helm.pod_templates(helm.render(example, values=values))
    return json.dumps(templates, sort_keys=True)


@pytest.mark.parametrize(
    "values",
    [
        "image: {tag: other}",
        "model: {path: /other.gguf}",
        "config: {model: {max_model_len: 1024}}",
        "config: {verifier: {buckets: [64]}}",
    ],
)
def test_what_bits_depend_on_makes_a_new_cluster(values: str) -> None:
    assert pods_hash(values) != pods_hash("")
    without = "upgrade: {newClusterOnFingerprintChange: false}\n"
    if "image" not in values:
        assert pods_hash(without + values) == pods_hash(without), (
            "the annotation is what makes the difference"
        )


@pytest.mark.parametrize(
    "values",
    [
        "config: {session: {lookahead: 99}}",
        "config: {server: {max_queued: 1}}",
        "config: {engine: {max_batch: 2}}",
    ],
)
def test_other_settings_are_updated_in_place(values: str) -> None:
    assert pods_hash(values) == pods_hash("")
    assert helm.serve_config(helm.render(values=values)) != helm.serve_config(helm.render())


def test_incremental_upgrades() -> None:
    values = """
upgrade: {strategy: NewClusterWithIncrementalUpgrade, incremental: {gatewayClassName: istio}}
fastPath: {autoscaling: {enabled: true, maxReplicas: 1}}
"""
    strategy = helm.service(helm.render(values=values))["upgradeStrategy"]
    assert strategy["clusterUpgradeOptions"]["gatewayClassName"] == "istio"
    assert helm.service(helm.render())["upgradeStrategy"] == {"type": "NewCluster"}

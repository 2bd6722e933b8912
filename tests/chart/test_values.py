"""Wrong values are refused before anything reaches a cluster, by a message that names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.chart import helm

COLOCATED, PLUS_ONE, MULTI, LOCKED, CANONICAL = (
    helm.example(n) for n in ("gpu-colocated", "gpu-4-plus-1", "multi-node", "locked-down", "gpu-canonical")
)


@pytest.mark.parametrize(
    ("values", "where", "what"),
    [
        ("imgae: {tag: x}", "''", "additional properties 'imgae' not allowed"),
        ("config: {server: {prot: 1}}", "/config/server", "additional properties 'prot' not allowed"),
        ("config: {engine: {kind: tgi}}", "/config/engine/kind", "'torch', 'vllm'"),
        ("config: {verifier: {threads: 0}}", "/config/verifier/threads", "minimum: got 0, want 1"),
        ("config: {model: {max_model_len: 4k}}", "/config/model/max_model_len", "want integer"),
        ("config: {server: {default_seed: 9007199254740993}}", "/config/server/default_seed", "maximum"),
        ("model: {source: s3}", "/model/source", "'image', 'pvc', 'hostPath', 'huggingface'"),
        ("image: {digest: sha256:12}", "/image/digest", "does not match pattern"),
        ("rayVersion: 2.6", "/rayVersion", "want string"),
        ("fastPath: {replicas: 0}", "/fastPath/replicas", "minimum"),
        ("fastPath: {resources: {limit: {}}}", "/fastPath/resources", "'limit' not allowed"),
        ("common: {env: [{name: A, value: 1}]}", "/common/env/0/value", "got number, want string"),
        ("podDisruptionBudget: {fastPath: {minAvailable: 50%}}", "/podDisruptionBudget", "null or integer"),
        ("upgrade: {strategy: Recreate}", "/upgrade/strategy", "'NewCluster'"),
        ("upgrade: {incremental: {intervalSeconds: 0}}", "/upgrade/incremental/intervalSeconds", "minimum"),
        ("layout: dense", "/layout", "'canonical'"),
        ("common: {preStop: {exec: {}, sleep: {}}}", "/common/preStop", "maxProperties"),
        ("readiness: {require: maybe}", "/readiness/require", "'certified', 'serving'"),
        ("cache: {volume: {emptyDir: {}, hostPath: {path: /x}}}", "/cache/volume", "maxProperties"),
        ("serve: {deployments: [{name: Verifier}]}", "/serve/deployments/0/name", "'Ingress', 'FastPath'"),
        ("auth: {mode: none}", "/auth/mode", "'token', 'disabled'"),
        ("fullnameOverride: Has_Capitals", "/fullnameOverride", "does not match pattern"),
        ("networkPolicy: {clients: [{}]}", "/networkPolicy/clients/0", "minProperties"),
    ],
)
def test_the_schema_refuses(values: str, where: str, what: str) -> None:
    said = helm.refusal(values)
    assert f"at '{where}" in said or f"at {where}" in said
    assert what in said


ONCE = "{create: true, accessModes: [ReadWriteOnce]}"
TAKEN = (6379, 8080, 8265, 44217, 44227, 52365)
REVISION = "model: {source: huggingface, path: '', huggingface: {repo: a/b, revision: main}}"


@pytest.mark.parametrize(
    ("example", "values", "message"),
    [
        (None, "config: {model: {path: /x}}", "set model.source and model.path instead"),
        (None, "config: {engine: {threads: 0}}", "give a number"),
        (None, "config: {server: {port: 8001}}", "set serve.port"),
        (None, "config: {telemetry: {metrics_port: 9}}", "pods show their metrics on port 8080"),
        *((None, f"serve: {{port: {port}}}", f"serve.port: {port} is the port of") for port in TAKEN),
        (LOCKED, "serve: {port: 9101}", "HAProxy's metrics"),
        (None, "ingress: {enabled: true, host: a, path: '/llm(/|$)(.*)'}", "is a pattern"),
        (None, "config: {engine: {kind: vllm}}", "needs config.model.device: cuda"),
        (None, "config: {model: {device: cuda}}", "fastPath.gpu.count is 0"),
        (CANONICAL, "verifier: {dedicated: false}", "fastPath.gpu.count is 0"),
        (CANONICAL, "fastPath: {gpu: {count: 1}}", "replicas take no GPU"),
        (
            CANONICAL,
            "{verifier: {dedicated: false}, fastPath: {gpu: {count: 1}}, config: {verifier: {gpus: 2}}}",
            "its replica and verifier take 2",
        ),
        (CANONICAL, "config: {engine: {kind: torch}}", "fastPath.gpu.count is 0"),
        (None, "fastPath: {gpu: {count: 1}}", "set it to cuda"),
        (None, "model: {path: relative}", "absolute path inside the image"),
        (None, "model: {source: pvc, path: x}", "model.pvc.claimName"),
        (None, "model: {source: pvc, path: /x, pvc: {claimName: c}}", "relative to the volume"),
        (None, "model: {source: hostPath, path: x, hostPath: {path: here}}", "absolute directory"),
        (None, "model: {source: huggingface, path: '', huggingface: {repo: x}}", "owner/name"),
        (None, REVISION, "a branch can move"),
        (None, "gcsFaultTolerance: {enabled: true}", "gcsFaultTolerance.redis.address"),
        (None, "upgrade: {strategy: NewClusterWithIncrementalUpgrade}", "gatewayClassName"),
        (
            None,
            "upgrade: {strategy: NewClusterWithIncrementalUpgrade, incremental: {gatewayClassName: x}}",
            "refuses it without Ray's autoscaler",
        ),
        (None, "upgrade: {incremental: {stepSizePercent: 50, maxSurgePercent: 40}}", "above maxSurgePercent"),
        (None, "verifier: {ingress: true}", "verifier.ingress is of dedicated verifiers"),
        (None, "{layout: canonical, config: {engine: {kind: torch}}}", "leave one of the two out"),
        (COLOCATED, "fastPath: {gpu: {count: 8}}", "the rest would be idle"),
        (PLUS_ONE, "fastPath: {gpu: {count: 2}}", "the rest would be idle"),
        (PLUS_ONE, "verifier: {gpu: {count: 2}}", "verifier.gpu.count is 2"),
        (None, "ingress: {enabled: true}", "ingress.host"),
        (None, "httpRoute: {enabled: true}", "name the Gateway"),
        (
            None,
            "fastPath: {autoscaling: {enabled: true, minReplicas: 9}}",
            "minReplicas is above maxReplicas",
        ),
        (COLOCATED, "config: {engine: {gpus: 1}}", "its replica and verifier take 1.1"),
        (COLOCATED, "fastPath: {hosts: 2}", "distributed_executor_backend"),
        (
            COLOCATED,
            "config: {engine: {vllm: {tensor_parallel_size: 2}}}",
            "its replica and verifier take 1.9",
        ),
        (PLUS_ONE, "verifier: {gpu: {count: 0}}", "a dedicated verifier needs a GPU"),
        (PLUS_ONE, "config: {engine: {vllm: {tensor_parallel_size: 2}}}", "its replica takes 2"),
        (MULTI, "config: {engine: {kind: torch}}", "only vLLM spans nodes"),
        (MULTI, "fastPath: {gpu: {count: 2}}", "fastPath.hosts x fastPath.gpu.count is 4"),
        (MULTI, "verifier: {dedicated: false}", "a GPU of its own"),
        (MULTI, "fastPath: {replicas: 2}", "with more than one replica"),
        (MULTI, "fastPath: {autoscaling: {enabled: true}}", "with more than one replica"),
        (None, "cache: {volume: {emptyDir: {}}, claim: {create: true}}", "leave one of them"),
        (COLOCATED, f"cache: {{claim: {ONCE}}}", "waits for a volume that the old one's keeps"),
        (
            COLOCATED,
            f"{{cache: {{claim: {ONCE}}}, fastPath: {{replicas: 3}}, upgrade: {{strategy: None}}}}",
            "cache.claim.accessModes: up to 3 pods",
        ),
        (
            PLUS_ONE,
            f"model: {{huggingface: {{claim: {ONCE}}}}}",
            "huggingface.claim.accessModes: up to",
        ),
        (PLUS_ONE, "model: {huggingface: {volume: {emptyDir: {}}}}", "leave one of them"),
        (PLUS_ONE, "model: {huggingface: {claim: {create: false}}}", "needs a claim that they share"),
        (None, "common: {terminationGracePeriodSeconds: 159}", "fastPath.terminationGracePeriodSeconds"),
        (None, "head: {terminationGracePeriodSeconds: 169}", "less than the 170 that preStop"),
        (PLUS_ONE, "verifier: {terminationGracePeriodSeconds: 30}", "less than the 160 that preStop"),
        (PLUS_ONE, "serviceMonitor: {enabled: true}", "each series would come twice"),
        (LOCKED, "networkPolicy: {egress: {redis: []}}", "say where Redis is"),
        (
            LOCKED,
            "{upgrade: {strategy: NewClusterWithIncrementalUpgrade, incremental: {gatewayClassName: x}},"
            " fastPath: {autoscaling: {enabled: true}}}",
            "disable ingress and httpRoute",
        ),
    ],
)
def test_wrong_combinations_are_refused(example: Path | None, values: str, message: str) -> None:
    assert message in helm.refusal(values, example)


def test_ports_that_pods_show_are_among_those_refused_and_others_are_not() -> None:
    shown = {
        port["containerPort"]
        for template in helm.pod_templates(helm.render()).values()
        for port in helm.container(template)["ports"]
        if port["name"] != "serve"
    }
    assert shown <= set(TAKEN)
    for port in (80, 8000, 9101):  # 9101 is HAProxy's, which is off
        assert (
            helm.serve_config(helm.render(values=f"serve: {{port: {port}}}"))["http_options"]["port"] == port
        )


def test_one_way_to_be_refused_in_each_check() -> None:
    """Every `fail` of the templates is reached by a case above."""
    text = (helm.CHART / "templates" / "_validate.tpl").read_text()
    marks = test_wrong_combinations_are_refused.pytestmark  # type: ignore[attr-defined]
    cases = [case for mark in marks for case in mark.args[1]]
    network = 1  # serve.haProxy: test_network.py
    assert text.count("{{- fail ") <= len(cases) + network


def test_the_defaults_are_complete() -> None:
    """values.yaml and the schema know the same values: what is only in one is a mistake in either."""
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text())
    schema = json.loads((helm.CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    free = {"common", "head", "fastPath", "verifier", "config"}
    for name in set(values) - free:
        properties = schema["properties"][name].get("properties")
        if properties:
            assert set(properties) == set(values[name]), name
    group = set(values["common"])
    for role, own in (
        ("head", {"resources"}),
        ("fastPath", set(values["fastPath"])),
        ("verifier", set(values["verifier"])),
    ):
        assert set(schema["properties"][role]["properties"]) == group | own, role

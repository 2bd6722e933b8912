"""serveConfigV2: one settings tree, never a second copy of serve_config.yaml; and what Ray makes of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.serve.schema import ServeDeploySchema

from llm42.config import Settings
from llm42_serve import launch
from llm42_serve.app import build
from tests.chart import helm

FILE = yaml.safe_load((helm.ROOT / "serve_config.yaml").read_text())
DIFFERENCES: dict[str, Any] = {
    # where the image and the volumes keep things
    "model.path": "/opt/llm42/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "engine.vllm.export_dir": "/var/cache/llm42/exports",
    "verifier.certificate_dir": "/var/cache/llm42/certificates",
    # a pod sees all cores of its node, so half of them (0) would be wrong
    "engine.threads": 1,
    # one of each a pod, whatever number of pods there is
    "engine.resources.llm42_fast_path": 1,
    "verifier.resources.llm42_verifier": 1,
    "server.ingress_resources.llm42_ingress": 1,
}
"""All that the CPU demonstration's settings have of their own, with the value."""


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """All settings of a Serve configuration, defaults filled in, by dotted name."""
    return leaves(Settings.load(config["applications"][0]["args"]).model_dump(mode="json"))


@pytest.mark.parametrize("example", [None, helm.example("cpu-demo")], ids=["defaults", "cpu-demo"])
@pytest.mark.usefixtures("shipped_defaults")
def test_the_demonstration_is_serve_config_yaml(example: Path | None) -> None:
    ours, theirs = settings(helm.serve_config(helm.render(example))), settings(FILE)
    assert {k: v for k, v in ours.items() if v != theirs.get(k)} == DIFFERENCES


def test_apart_from_the_settings_too() -> None:
    ours = helm.serve_config(helm.render(helm.example("cpu-demo")))
    (app,), (filed,) = ours.pop("applications"), FILE["applications"]
    filed = filed | {"args": app["args"], "deployments": app["deployments"]}
    assert app == filed
    assert ours["http_options"].pop("host") == "0.0.0.0", "behind a service, pods are reached from outside"
    assert ours == {"proxy_location": "EveryNode", "http_options": {"port": FILE["http_options"]["port"]}}


@pytest.mark.usefixtures("shipped_defaults")
def test_a_setting_that_differs_is_noticed() -> None:
    rendered = helm.render(helm.example("cpu-demo"), values="config: {session: {lookahead: 256}}")
    ours, theirs = settings(helm.serve_config(rendered)), settings(FILE)
    assert {k for k, v in ours.items() if v != theirs.get(k)} == {*DIFFERENCES, "session.lookahead"}


def test_settings_are_passed_through_without_knowing_them(tmp_path: Path) -> None:
    """A setting of tomorrow needs no template: only the schema knows names, so here it is taken away."""
    chart = helm.copy_chart(tmp_path)
    (chart / "values.schema.json").unlink()
    values = "config: {router: {shares: [1, 0.125], spill: true, nested: {deep: yes please}}}"
    args = helm.serve_config(helm.render(values=values, chart=chart))["applications"][0]["args"]
    assert args["router"] == {"shares": [1, 0.125], "spill": True, "nested": {"deep": "yes please"}}


def test_numbers_arrive_as_they_are() -> None:
    values = "config: {server: {default_seed: -9007199254740991}, verifier: {kv_tokens: 13107200}}"
    args = helm.serve_config(helm.render(values=values))["applications"][0]["args"]
    assert args["server"]["default_seed"] == -(2**53) + 1
    assert args["verifier"]["kv_tokens"] == 13107200


@pytest.mark.parametrize("example", helm.EXAMPLES, ids=lambda e: e.stem)
def test_ray_serve_and_the_application_take_it(example: Path) -> None:
    (app,) = ServeDeploySchema.model_validate(helm.serve_config(helm.render(example))).applications
    assert app.import_path == "llm42_serve.app:build"
    built = build(app.args)
    names = {built._bound_deployment.name, *(d.name for d in _inner(built))}
    assert {d.name for d in app.deployments} <= names, "an override for a deployment that does not exist"


def _inner(app: Any) -> list[Any]:
    return [a._bound_deployment for a in app._bound_deployment.init_args if hasattr(a, "_bound_deployment")]


def test_there_are_as_many_processes_as_places() -> None:
    def server(example: str) -> dict[str, int]:
        args = helm.serve_config(helm.render(helm.example(example)))["applications"][0]["args"]
        return dict(args["server"])

    one = {"ingress_resources": {"llm42_ingress": 1}}
    assert server("gpu-colocated") == one | {"ingress_replicas": 1, "fastpath_replicas": 1, "verifiers": 1}
    assert server("multi-node") == one | {"ingress_replicas": 2, "fastpath_replicas": 1, "verifiers": 1}
    assert server("gpu-4-plus-1") == one | {
        "ingress_replicas": 4,
        "fastpath_replicas": 4,
        "max_fastpath_replicas": 8,
        "target_ongoing_requests": 64,
        "verifiers": 1,
        "max_verifiers": 2,
    }
    told = helm.render(helm.example("gpu-colocated"), values="config: {server: {verifiers: 3}}")
    assert helm.serve_config(told)["applications"][0]["args"]["server"]["verifiers"] == 3


# Placement, as Ray's own autoscaler reads it: what a pod announces, and what the roles ask for.


def announced(example: str) -> dict[str, dict[str, Any]]:
    """Ray's resources of a pod, by group."""
    cluster = helm.service(helm.render(helm.example(example)))["rayClusterConfig"]
    spec = {"metadata": {"name": "x", "namespace": "serving"}, "spec": cluster}
    types = _derive_autoscaling_config_from_ray_cr(spec)["available_node_types"]
    return {name: kind["resources"] for name, kind in types.items()}


def fits(demand: dict[str, float], pod: dict[str, Any]) -> bool:
    return all(pod.get(name, 0) >= amount for name, amount in demand.items())


def demands(example: str) -> tuple[dict[str, float], dict[str, float]]:
    """What one fast-path replica (without a placement group) and one verifier ask for."""
    config = helm.serve_config(helm.render(helm.example(example)))
    s = Settings.load(config["applications"][0]["args"])
    gpu = s.model.device == "cuda"
    fast = {"GPU": s.engine.gpus if gpu and s.engine.gpus_per_replica else 0, **s.engine.resources}
    return fast, {"GPU": s.verifier.gpus if gpu else 0, **s.verifier.resources}


def test_dedicated_roles_fit_their_own_pods_only() -> None:
    pods, (fast, verifier) = announced("gpu-4-plus-1"), demands("gpu-4-plus-1")
    assert fits(fast, pods["fast-path"])
    assert fits(verifier, pods["verifier"])
    assert not fits(fast, pods["verifier"])
    assert not fits(verifier, pods["fast-path"])
    assert not fits({"CPU": 0.1}, pods["headgroup"]), "no replica on the head"


def test_replicas_without_an_engine_have_pods_without_a_gpu() -> None:
    pods, (fast, verifier) = announced("gpu-canonical"), demands("gpu-canonical")
    assert (fast["GPU"], pods["fast-path"].get("GPU", 0)) == (0, 0)
    assert (verifier["GPU"], pods["verifier"]["GPU"]) == (1, 1), "a verifier has its GPU to itself"
    assert fits(fast, pods["fast-path"])
    assert fits(verifier, pods["verifier"])
    assert not fits(fast, pods["verifier"]), "no replica takes a verifier's place"
    args = helm.serve_config(helm.render(helm.example("gpu-canonical")))["applications"][0]["args"]
    (replica,) = _inner(build(args))
    assert "num_gpus" not in replica.ray_actor_options
    assert args["server"]["verifiers"] == 2


@pytest.mark.parametrize(
    ("path", "config", "name"),
    [
        ("''", "", "Qwen3-8B"),
        ("Qwen3-8B-Q4_K_M.gguf", "", "Qwen3-8B"),
        ("other", "", "other"),
        ("''", "model: {name: mine}", "mine"),
    ],
)
def test_a_model_of_the_hub_has_its_name_and_not_the_commits(path: str, config: str, name: str) -> None:
    hub = f"{{repo: Qwen/Qwen3-8B, revision: {'a' * 40}}}"
    values = f"model: {{source: huggingface, path: {path}, huggingface: {hub}}}\nconfig: {{{config}}}"
    assert settings(helm.serve_config(helm.render(values=values)))["model.name"] == name


def test_colocated_roles_fit_one_pod_together() -> None:
    pods, (fast, verifier) = announced("gpu-colocated"), demands("gpu-colocated")
    both = {name: fast.get(name, 0) + verifier.get(name, 0) for name in {*fast, *verifier}}
    assert fits(both, pods["fast-path"])
    for role in (fast, verifier):
        more = {name: both[name] + role.get(name, 0) for name in both}
        assert not fits(more, pods["fast-path"]), "one of each a pod"
        without = {name: amount for name, amount in role.items() if not name.startswith("llm42_")}
        assert fits(without, {**pods["fast-path"], "GPU": 1}), "the control: the GPU alone would not say so"


@pytest.mark.parametrize("example", ["cpu-demo", "locked-down"])
def test_without_gpus_it_is_one_of_each_a_pod_too(example: str) -> None:
    pods, (fast, verifier) = announced(example), demands(example)
    assert fits({**fast, **verifier}, pods["fast-path"])
    for role in (fast, verifier):
        assert not fits({name: 2 * amount for name, amount in role.items() if amount}, pods["fast-path"])


@pytest.mark.parametrize("example", helm.EXAMPLES, ids=lambda e: e.stem)
def test_ingresses_wait_for_no_verifier(example: Path) -> None:
    """Serve's application runs once all of them have a place."""
    if example.stem == "two-models":
        return
    pods = announced(example.stem)
    args = helm.serve_config(helm.render(example))["applications"][0]["args"]
    place = args["server"]["ingress_resources"]
    assert fits(place, pods["fast-path"])
    assert not fits({name: 2 * amount for name, amount in place.items()}, pods["fast-path"])
    if "verifier" not in pods:
        return
    assert not fits(place, pods["verifier"])
    told = helm.render(example, values="verifier: {ingress: true}")
    args, all_of = helm.serve_config(told)["applications"][0]["args"], helm.service(told)["rayClusterConfig"]
    least = sum(g["minReplicas"] * g.get("numOfHosts", 1) for g in all_of["workerGroupSpecs"])
    assert args["server"]["ingress_replicas"] == least
    assert all("llm42_ingress" in g["rayStartParams"]["resources"] for g in all_of["workerGroupSpecs"])


def test_a_replica_across_nodes_takes_no_gpu_of_a_verifier() -> None:
    config = helm.serve_config(helm.render(helm.example("multi-node")))
    (fast,) = [d for d in config["applications"][0]["deployments"] if d["name"] == "FastPath"]
    pods, bundles = announced("multi-node"), fast["placement_group_bundles"]
    assert sum(b.get("GPU", 0) for b in bundles) == 8 == 2 * pods["fast-path"]["GPU"]
    assert all(fits(b, pods["fast-path"]) and not fits(b, pods["verifier"]) for b in bundles)
    assert sum(b["llm42_fast_path"] for b in bundles) <= 2 * pods["fast-path"]["llm42_fast_path"]


def test_groups_scale_as_far_as_the_application_does() -> None:
    groups = helm.service(helm.render(helm.example("gpu-4-plus-1")))["rayClusterConfig"]
    sizes = {g["groupName"]: (g["minReplicas"], g["maxReplicas"]) for g in groups["workerGroupSpecs"]}
    assert sizes == {"fast-path": (4, 8), "verifier": (1, 2)}
    assert groups["enableInTreeAutoscaling"] is True
    fixed = helm.service(helm.render(helm.example("locked-down")))["rayClusterConfig"]
    assert "enableInTreeAutoscaling" not in fixed


def test_rays_switches_are_those_of_llm42_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RAY_AUTH_MODE": "token"}
    monkeypatch.setattr(os, "environ", environment)
    launch.prepare_environment()
    del environment["RAY_AUTH_MODE"]  # here KubeRay sets it, from authOptions
    monkeypatch.undo()
    for component, template in helm.pod_templates(helm.render()).items():
        container = template["spec"]["containers"][0]
        ours = {e["name"]: e["value"] for e in container["env"]}
        assert environment.items() <= ours.items(), component
    params = helm.service(helm.render())["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]
    assert int(params["object-store-memory"]) == launch.OBJECT_STORE_BYTES


def test_haproxy_is_one_switch() -> None:
    for component, template in helm.pod_templates(helm.render(helm.example("locked-down"))).items():
        env = {e["name"]: e["value"] for e in template["spec"]["containers"][0]["env"]}
        assert env["RAY_SERVE_ENABLE_HA_PROXY"] == env["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "1", component


def test_the_schema_and_the_table_are_up_to_date(tmp_path: Path) -> None:
    from tests.chart.generate import load

    generate = load()
    assert (helm.CHART / "values.schema.json").read_text() == generate.schema(), "run python helm/generate.py"
    assert (helm.CHART / "README.md").read_text() == generate.readme(), "run python helm/generate.py"
    # the control: a value more, and a schema that lost a setting
    shutil.copytree(helm.CHART, tmp_path / "llm42")
    generate.CHART = tmp_path / "llm42"
    (generate.CHART / "values.yaml").open("a").write("\n# -- New.\nanother: 1\n")
    assert "| `another` | `1` | New. |" in generate.readme()
    schema = (generate.CHART / "values.schema.json").read_text()
    (generate.CHART / "values.schema.json").write_text(schema.replace('"max_batch"', '"maximal_batch"'))
    assert generate.schema() == schema

"""Pods behind a proxy, a path of an ingress, and settings that a pod would not honour."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from llm42.api.app import create_app
from llm42.config import Settings
from llm42.host.direct import LOOPBACK, NO_GRPC_PROXY
from tests.chart import helm
from tests.chart.helm import container
from tests.support import Lab

PLUS_ONE = helm.example("gpu-4-plus-1")
HERE = ",".join(LOOPBACK)


def environments(values: str) -> list[dict[str, Any]]:
    """Of the Ray container of every kind of pod."""
    templates = helm.pod_templates(helm.render(PLUS_ONE, values=values)).values()
    assert len(templates) == 3
    found = [{e["name"]: e.get("value", e) for e in container(t)["env"]} for t in templates]
    assert all(len(env) == len(container(t)["env"]) for env, t in zip(found, templates, strict=True))
    return found


def test_pods_talk_past_a_proxy() -> None:
    """Head, fast path and verifier; what the proxy's own exceptions are stays."""
    for env in environments(""):
        assert (env["no_grpc_proxy"], env["no_proxy"], env["NO_PROXY"]) == (NO_GRPC_PROXY, HERE, HERE)
    values = """
common:
  env:
    - {name: https_proxy, value: "http://proxy.example:3128"}
    - {name: no_proxy, value: .svc}
    - {name: no_grpc_proxy, value: grpc.example}
    - {name: NO_PROXY, valueFrom: {configMapKeyRef: {name: net, key: none}}}
"""
    for env in environments(values):
        assert env["https_proxy"] == "http://proxy.example:3128"
        assert env["no_proxy"] == f".svc,{HERE}"
        assert env["no_grpc_proxy"] == f"grpc.example,{NO_GRPC_PROXY}"
        assert "valueFrom" in env["NO_PROXY"]


def test_an_environment_from_elsewhere_keeps_its_exceptions() -> None:
    """A variable of the container hides one that `envFrom` brings."""
    for env in environments("common: {envFrom: [{configMapRef: {name: proxy}}]}"):
        assert env["no_grpc_proxy"] == NO_GRPC_PROXY
        assert not {"no_proxy", "NO_PROXY"} & set(env)


def test_the_head_asks_nobody_what_cloud_it_is_in() -> None:
    """Ray reads its own description of the cluster in the home directory first; statistics go nowhere."""
    rendered = helm.render()
    for component, template in helm.pod_templates(rendered).items():
        ray = container(template)
        places = {m["mountPath"]: m for m in ray["volumeMounts"]}
        env = {e["name"]: e.get("value") for e in ray["env"]}
        file = f"{env['HOME']}/ray_bootstrap_config.yaml"
        assert (file in places) is (component == "head")
        if component == "head":
            assert bootstrap_config(template, places[file]) == {}
        assert env["RAY_USAGE_STATS_REPORT_URL"].startswith("http://127.0.0.1:")


def bootstrap_config(head: dict[str, Any], mount: dict[str, Any]) -> Any:
    """What the mounted file holds: an annotation of the pod."""
    (volume,) = [v for v in head["spec"]["volumes"] if v["name"] == mount["name"]]
    (item,) = volume["downwardAPI"]["items"]
    assert item["path"] == mount["subPath"]
    name = item["fieldRef"]["fieldPath"].removeprefix("metadata.annotations['").removesuffix("']")
    return yaml.safe_load(head["metadata"]["annotations"][name])


def test_rays_usage_module_is_content_with_that_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the file it asks."""
    from ray._common.usage import usage_lib

    asked: list[str] = []

    def get(url: str, **_: Any) -> Any:
        asked.append(url)
        raise usage_lib.requests.exceptions.ConnectionError

    monkeypatch.setattr(usage_lib.requests, "get", get)
    file = tmp_path / "ray_bootstrap_config.yaml"
    usage_lib.get_cluster_config_to_report(str(file))
    assert any("169.254.169.254" in url for url in asked)
    asked.clear()
    head = helm.pod_templates(helm.render())["head"]
    file.write_text(head["metadata"]["annotations"]["llm42/ray-bootstrap-config"])
    usage_lib.get_cluster_config_to_report(str(file))
    assert asked == []


def root_path(ingress: str) -> str | None:
    rendered = helm.render(values=f"ingress: {{enabled: true, host: a.example, {ingress}}}")
    args = helm.serve_config(rendered)["applications"][0]["args"]
    found: str | None = args["server"].get("root_path")
    return found


def test_a_path_of_the_ingress_is_the_applications_too() -> None:
    assert root_path("path: /llm") == "/llm"
    assert root_path("path: /team/llm/") == "/team/llm"
    assert root_path("path: /") is None
    rewritten = "annotations: {nginx.ingress.kubernetes.io/rewrite-target: /$2}"
    assert root_path(f"path: '/llm(/|$)(.*)', pathType: ImplementationSpecific, {rewritten}") is None
    assert root_path(f"path: /llm, {rewritten}") == "/llm"
    assert root_path("path: /v1") == "/v1"
    off = helm.render(values="ingress: {path: /llm}")
    assert "root_path" not in helm.serve_config(off)["applications"][0]["args"]["server"]


@pytest.mark.parametrize("root", ["", "/llm", "/team/llm"])
async def test_the_application_answers_with_and_without_it(root: str, tiny: Lab) -> None:
    import httpx

    key = {"name": "k", "sha256": "0" * 64}
    settings = Settings.load({"server": {"root_path": root, "api_keys": [key]}})
    app = create_app(settings, tiny.tokenizer, None)  # type: ignore[arg-type]  # it is not asked here
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
        for path in ("/version", f"{root}/version", f"{root}/version/"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get(f"{root}/v1/models")).status_code == 401, "the path is no way around keys"
        for path in ("/other/version", f"{root}x/version", f"{root}{root or '/no'}/version"):
            assert (await client.get(path)).status_code in (401, 404), path


async def test_a_path_of_the_api_that_alone_is_published_stays(tiny: Lab) -> None:
    """`ingress.path: /v1` publishes the OpenAI routes alone; whoever strips it sends what lies behind."""
    import httpx

    settings = Settings.load({"server": {"root_path": root_path("path: /v1")}})
    app = create_app(settings, tiny.tokenizer, None)  # type: ignore[arg-type]  # it is not asked here
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
        models = await client.get("/v1/models")
        assert models.status_code == 200 and models.json()["object"] == "list"
        for path in ("/v1/models/", "/v1/v1/models", "//v1//models"):
            reply = await client.get(f"http://a{path}")
            assert (reply.status_code, reply.content) == (200, models.content), path
        assert (await client.get("/v1/completions")).status_code == 405
        assert (await client.get("/v1/nothing")).status_code == 404
        assert (await client.get("/v1/version")).json() == (await client.get("/version")).json()

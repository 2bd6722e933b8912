"""/metrics as gateways read it: names, values, who may ask, what it costs, and which replica it is of."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from llm42.api import gateway_metrics
from llm42.api.app import create_app
from llm42.api.backend import Status
from llm42.api.gateway_metrics import FRESH_S, page
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer
from llm42_serve.ingress import router
from tests.metrics_page import PrometheusMetrics
from tests.service.scripted import MODEL, SETTINGS, Scripted, assert_error, client, hello
from tests.support import Clock

NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
}


class Loaded(Scripted):
    """Has this load; counts who asks."""

    def __init__(self, **load: Any) -> None:
        super().__init__(hello)
        self.load: dict[str, Any] = {"serving": True, **load}
        self.asked: list[bool] = []

    async def status(self, near: bool = False) -> Status:
        self.asked.append(near)
        await asyncio.sleep(0)
        return Status(**self.load)


def http_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def values(text: str) -> dict[str, float]:
    """Name -> value, as Prometheus' own parser reads a page; one series each, of this model."""
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert len(samples) == len({s.name for s in samples})
    assert all(s.labels == {"model_name": MODEL} for s in samples)
    return {s.name: s.value for s in samples}


async def test_names_and_values(tokenizer: Tokenizer) -> None:
    backend = Loaded(running=3, waiting=2, queued=5, kv_used=250, kv_total=1000)
    async with http_of(create_app(SETTINGS, tokenizer, backend)) as http:
        reply = await http.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = values(reply.text)
    assert found.keys() == NAMES
    assert [found[f"vllm:num_requests_{name}"] for name in ("running", "waiting")] == [3, 7]
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == 0.25
    assert backend.asked == [True], "of this machine's replica"


def test_without_a_kv_cache_nothing_of_it_is_used() -> None:
    assert values(page(Status(serving=True), MODEL))["vllm:kv_cache_usage_perc"] == 0


def test_any_name_of_a_model_can_be_read() -> None:
    name = 'a "b" \\ c\nd'
    (sample,) = next(iter(text_string_to_metric_families(page(Status(serving=True), name)))).samples
    assert sample.labels == {"model_name": name}


async def test_without_a_replica_it_is_unavailable_and_no_error_is_counted(tokenizer: Tokenizer) -> None:
    metrics = PrometheusMetrics(MODEL)
    app = create_app(SETTINGS, tokenizer, Loaded(serving=False), metrics)  # type: ignore[arg-type]
    async with http_of(app) as http:
        reply = await http.get("/metrics")
        assert assert_error(reply, 503, None)["code"] == "service_unavailable"
        assert reply.headers["retry-after"]

        def rejects() -> float:
            samples = [s for family in metrics.registry.collect() for s in family.samples]
            return sum(s.value for s in samples if s.name == "llm42_rejects_total")

        assert rejects() == 0
        await http.get("/v1/models/another")
        assert rejects() == 1, "the control"


async def test_as_open_as_health(tokenizer: Tokenizer) -> None:
    keyed = Settings.load({"server": {"api_keys": [{"name": "k", "sha256": "0" * 64}], "root_path": "/llm"}})
    async with client(tokenizer, settings=keyed) as (http, _):
        for path in ("/metrics", "/health", "/llm/metrics"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401


async def test_many_who_ask_are_answered_by_one_look(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(gateway_metrics, "time", clock)
    backend = Loaded(running=1)
    async with http_of(create_app(SETTINGS, tokenizer, backend)) as http:
        await asyncio.gather(*(http.get("/metrics") for _ in range(20)))
        assert len(backend.asked) == 1
        backend.load["running"] = 2
        clock.now += FRESH_S / 2
        assert values((await http.get("/metrics")).text)["vllm:num_requests_running"] == 1
        clock.now += FRESH_S
        assert values((await http.get("/metrics")).text)["vllm:num_requests_running"] == 2
        assert len(backend.asked) == 2


@pytest.mark.parametrize(
    ("method", "here", "chosen"),
    [
        (router.NEAR, "b", {"b"}),
        (router.NEAR, "of a verifier alone", {"a", "b", "c"}),
        ("status", "b", {"a", "b", "c"}),
    ],
)
async def test_the_replica_of_the_machine_is_asked(
    method: str, here: str, chosen: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is one; /health is of any."""
    context = SimpleNamespace(get_node_id=lambda: here)
    monkeypatch.setattr(router.ray, "get_runtime_context", lambda: context)
    replicas = [SimpleNamespace(node_id=n, replica_id=SimpleNamespace(unique_id=n)) for n in "abc"]
    call = SimpleNamespace(args=[], kwargs={}, metadata=SimpleNamespace(call_method=method))
    choose: Any = router.PrefixRouter.choose_replicas
    made = router.PrefixRouter.__new__(router.PrefixRouter)
    found = set[str]()
    for _ in range(100):
        ((replica,),) = await choose(made, replicas, call)
        found.add(replica.node_id)
    assert found == chosen

"""/metrics of the running service: while requests run and wait, and after."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llm42.config import Settings
from llm42_serve.launch import Service
from tests.service.served import Application, of_one_replica, on_the_tiny_model_only

pytestmark = [pytest.mark.service, on_the_tiny_model_only]
WAIT_S = 300.0


@pytest.fixture(scope="module")
def narrow(service: Service, cluster_settings: Settings) -> Iterator[Service]:
    """An application of one place, so that a second request waits."""
    one = of_one_replica(cluster_settings)
    engine = one.engine.model_copy(update={"max_batch": 1, "kv_tokens": 4096})
    with Application(service, "narrow", one.model_copy(update={"engine": engine})) as running:
        yield running


async def load(http: httpx.AsyncClient) -> dict[str, float]:
    reply = await http.get("/metrics")
    assert reply.status_code == 200, reply.text
    return {s.name: s.value for f in text_string_to_metric_families(reply.text) for s in f.samples}


async def once(http: httpx.AsyncClient, running: float, waiting: float) -> dict[str, float]:
    """The page when it shows this."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await load(http)
            shown = found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]
            if shown == (running, waiting):
                return found
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_running_and_a_waiting_request_and_none(narrow: Service, deterministic: bool) -> None:
    body = {
        "model": narrow.settings.model.name, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True,
        "deterministic": deterministic,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=narrow.url, timeout=WAIT_S) as http:
        await once(http, 0, 0)

        async def asking() -> None:
            while True:  # until it is cancelled: no request is too short for a busy machine
                (await http.post("/v1/completions", json=body)).raise_for_status()

        async with asyncio.TaskGroup() as group:
            askers = [group.create_task(asking()) for _ in range(2)]
            while not (await once(http, 1, 1))["vllm:kv_cache_usage_perc"]:
                await asyncio.sleep(0.1)
            for asker in askers:
                asker.cancel()
        assert (await once(http, 0, 0))["vllm:kv_cache_usage_perc"] == 0

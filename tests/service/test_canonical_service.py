"""The canonical layout through the service: an application whose replicas have no engine, beside one that
decodes on a fast path. Model, verifier and watch are the same, so both ask the same verifiers."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
import ray

from llm42.config import Settings
from llm42_serve.launch import Service
from llm42_serve.verifiers.names import NAMESPACE
from tests.service.conftest import WAIT_S, client_of
from tests.service.served import Application, of_one_replica, on_the_tiny_model_only
from tests.service.test_service import verifier_name
from tests.service.traffic import SAMPLINGS, ask, noise, oracle
from tests.support import Lab, canonical, prompt_of

pytestmark = [pytest.mark.service, pytest.mark.slow, on_the_tiny_model_only]
TOKENS = 48


@pytest.fixture(scope="module")
def alone(service: Service, cluster_settings: Settings) -> Iterator[Service]:
    """The application."""
    with Application(service, "canonical", canonical(of_one_replica(cluster_settings), credit=8)) as running:
        yield running


@pytest.fixture
async def asks(alone: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of it."""
    async with client_of(alone) as made:
        yield made


async def test_answers_under_noise_are_the_oracles(
    asks: openai.AsyncOpenAI, aclient: openai.AsyncOpenAI, served: Lab, settings: Settings
) -> None:
    """Of both classes here, and of deterministic ones there; the noise is decoded here too."""
    model, prompt = settings.model.name, list(prompt_of(5, 20))
    beside = asyncio.create_task(noise(asks, model, 3, 8))
    for fields in SAMPLINGS:
        asked = [(asks, True), (asks, False), (asks, True), (asks, False), (aclient, True)]
        found = await asyncio.gather(
            *(ask(c, model, prompt, TOKENS, deterministic=d, **fields) for c, d in asked)
        )
        assert {answer for answer, _ in found} == {oracle(served, prompt, fields, TOKENS)}
        for (client, deterministic), (_, evidence) in zip(asked, found, strict=True):
            counts = evidence["direct_tokens"], evidence["candidate_tokens"]
            if client is asks:
                assert counts == (TOKENS if deterministic else 0, 0)
            else:
                assert counts[0] == 0 < counts[1]
    await beside


async def test_a_best_effort_stream_and_its_seed(
    asks: openai.AsyncOpenAI, served: Lab, settings: Settings
) -> None:
    """Unseeded: a seed is drawn and told, and would repeat it."""
    prompt, tokens, seed = list(prompt_of(6, 12)), list[int](), None
    stream = await asks.completions.create(
        model=settings.model.name, prompt=prompt, max_tokens=TOKENS, stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    async for chunk in stream:
        assert chunk.system_fingerprint is None
        for choice in chunk.choices:
            tokens += (choice.model_extra or {})["token_ids"]
        seed = (chunk.model_extra or {}).get("llm42", {}).get("seed", seed)
    assert seed is not None
    assert tuple(tokens) == oracle(served, prompt, {"temperature": 1.0, "seed": seed}, TOKENS).tokens


async def test_the_verifier_killed_under_streams_of_both_classes(
    asks: openai.AsyncOpenAI, served: Lab, settings: Settings
) -> None:
    """It holds all that is being decoded: its successor computes that anew, and no token is lost or twice."""
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    prompts = [list(prompt_of(30 + i, 10 + i)) for i in range(4)]
    begun = [asyncio.Event() for _ in prompts]

    async def read(number: int) -> tuple[int, ...]:
        tokens: list[int] = []
        stream = await asks.completions.create(
            model=settings.model.name, prompt=prompts[number], max_tokens=400, stream=True, **fields,
            extra_body={"deterministic": number % 2 == 0, "return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            begun[number].set()
            for choice in chunk.choices:
                tokens += (choice.model_extra or {})["token_ids"]
        return tuple(tokens)

    streams = [asyncio.create_task(read(i)) for i in range(len(prompts))]
    await asyncio.gather(*(event.wait() for event in begun))
    assert not any(task.done() for task in streams)
    ray.kill(ray.get_actor(verifier_name(settings), namespace=NAMESPACE), no_restart=True)
    assert await asyncio.gather(*streams) == [oracle(served, p, fields, 400).tokens for p in prompts]


def test_one_fingerprint_and_each_audits_the_others_receipts(alone: Service, service: Service) -> None:
    body = {
        "model": service.settings.model.name, "prompt": "The sea", "max_tokens": 12, "deterministic": True,
        "receipt": {"prompt": "tokens", "output": "tokens"},
    }  # fmt: skip
    replies = [_post(x.url + "/v1/completions", body) for x in (alone, service)]
    assert len({r["system_fingerprint"] for r in replies}) == 1
    for where, reply in ((service, replies[0]), (alone, replies[1])):
        found = _post(where.url + "/v1/audit", {"records": [reply["llm42"]["receipt"]]})
        assert [r["verdict"] for r in found["results"]] == ["confirmed"]
    altered = json.loads(json.dumps(replies[0]["llm42"]["receipt"]))
    altered["output"][3] ^= 1
    found = _post(service.url + "/v1/audit", {"records": [altered]})
    assert [r["verdict"] for r in found["results"]] != ["confirmed"], "the control"


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
    return answer


@pytest.mark.parametrize("deterministic", [True, False])
async def test_a_prompt_that_the_context_does_not_hold_is_a_400(
    alone: Service, settings: Settings, deterministic: bool
) -> None:
    body = {"model": settings.model.name, "prompt": list(prompt_of(1, 4000)), "max_tokens": 97}
    async with httpx.AsyncClient(base_url=alone.url, timeout=WAIT_S) as http:
        reply = await http.post("/v1/completions", json=body | {"deterministic": deterministic})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        health = (await http.get("/health")).json()
        assert (health["status"], health["kv_total"]) == ("ok", 0)

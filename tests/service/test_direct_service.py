"""Requests that verifiers decode by themselves (session.mode direct), through the service: an application
beside the one that decodes on a fast path. Model, verifier and watch are the same, so both ask the same
verifiers."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import ray

from llm42.config import Settings
from llm42_serve.launch import Service
from llm42_serve.verifiers.names import NAMESPACE
from tests.service.conftest import WAIT_S, client_of
from tests.service.served import Application, of_one_replica, on_the_tiny_model_only
from tests.service.test_service import verifier_name
from tests.service.traffic import SAMPLINGS, Answer, ask, noise, oracle
from tests.support import Lab, prompt_of

pytestmark = [pytest.mark.service, pytest.mark.slow, on_the_tiny_model_only]
TOKENS = 48


@pytest.fixture(scope="module")
def direct(service: Service, cluster_settings: Settings) -> Iterator[Service]:
    """The application."""
    session = cluster_settings.session.model_copy(update={"mode": "direct", "credit": 8})
    settings = of_one_replica(cluster_settings).model_copy(update={"session": session})
    with Application(service, "direct", settings) as running:
        yield running


@pytest.fixture
async def asks(direct: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of it."""
    async with client_of(direct) as made:
        yield made


async def test_answers_under_noise_are_the_oracles(
    asks: openai.AsyncOpenAI, aclient: openai.AsyncOpenAI, served: Lab, settings: Settings
) -> None:
    """Of both applications, at once: no window, no candidate, no rollback in the one; one answer in all."""
    model, prompt = settings.model.name, list(prompt_of(5, 20))
    beside = asyncio.create_task(noise(aclient, model, 3, 6))
    for fields in SAMPLINGS:
        both = (asks, asks, asks, asks, aclient, aclient)
        found = await asyncio.gather(
            *(ask(c, model, prompt, TOKENS, deterministic=True, **fields) for c in both)
        )
        assert {answer for answer, _ in found} == {oracle(served, prompt, fields, TOKENS)}
        for _, evidence in found[:4]:
            assert evidence["candidate_tokens"] == evidence["rollbacks"] == 0
    await beside


async def test_stop_strings_choices_and_streams(
    asks: openai.AsyncOpenAI, aclient: openai.AsyncOpenAI, settings: Settings
) -> None:
    """What one application says in one piece the other says in pieces."""
    body: dict[str, Any] = {
        "model": settings.model.name, "prompt": list(prompt_of(6, 12)), "max_tokens": 40, "n": 2, "seed": 5,
        "temperature": 1.0, "logprobs": 3,
        "extra_body": {"deterministic": True, "return_token_ids": True, "ignore_eos": True},
    }  # fmt: skip
    free = await aclient.completions.create(**body)
    stop = free.choices[1].text[8:11]
    want = (await aclient.completions.create(**body, stop=[stop])).choices
    got = (await asks.completions.create(**body, stop=[stop])).choices
    assert [c.model_dump() for c in got] == [c.model_dump() for c in want]
    assert want[1].finish_reason == "stop"
    texts = ["", ""]
    async for chunk in await asks.completions.create(**body, stop=[stop], stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in want]


def test_one_fingerprint_and_each_audits_the_others_receipts(direct: Service, service: Service) -> None:
    body = {
        "model": service.settings.model.name, "prompt": "The sea", "max_tokens": 12, "deterministic": True,
        "receipt": {"prompt": "tokens", "output": "tokens"},
    }  # fmt: skip
    replies = [_post(x.url + "/v1/completions", body) for x in (direct, service)]
    assert len({r["system_fingerprint"] for r in replies}) == 1
    for where, reply in ((service, replies[0]), (direct, replies[1])):
        found = _post(where.url + "/v1/audit", {"records": [reply["llm42"]["receipt"]]})
        assert [r["verdict"] for r in found["results"]] == ["confirmed"]


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
    return answer


async def test_the_verifier_killed_under_streams(
    asks: openai.AsyncOpenAI, served: Lab, settings: Settings
) -> None:
    """It holds all that is being decoded: its successor computes that anew, and no token is lost or twice."""
    model, long = settings.model.name, 400
    prompts = [list(prompt_of(20 + i, 10 + i)) for i in range(4)]
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    begun = [asyncio.Event() for _ in prompts]

    async def read(number: int) -> Answer:
        tokens: list[int] = []
        logprobs: list[float] = []
        stream = await asks.completions.create(
            model=model, prompt=prompts[number], max_tokens=long, stream=True, logprobs=0, **fields,
            extra_body={"deterministic": True, "return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            begun[number].set()
            for choice in chunk.choices:
                tokens += (choice.model_extra or {})["token_ids"]
                logprobs += (choice.logprobs and choice.logprobs.token_logprobs) or []
        return Answer(tuple(tokens), tuple(logprobs))

    streams = [asyncio.create_task(read(i)) for i in range(len(prompts))]
    await asyncio.gather(*(event.wait() for event in begun))
    assert not any(task.done() for task in streams)
    ray.kill(ray.get_actor(verifier_name(settings), namespace=NAMESPACE), no_restart=True)
    found = await asyncio.gather(*streams)
    assert found == [oracle(served, prompt, fields, long) for prompt in prompts]

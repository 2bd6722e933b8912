"""The service as it is shipped, with session.mode auto: both classes at once, decoded wherever the policy
says, which goes by the times of this machine. The answers are the oracle's all the same, and what the policy
expects of each way is published."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import ray

from llm42.config import SessionSettings, Settings
from llm42_serve.launch import Service
from tests.service.conftest import WAIT_S, client_of
from tests.service.served import Application, of_one_replica, on_the_tiny_model_only
from tests.service.traffic import SAMPLINGS, Answer, ask, noise, oracle
from tests.support import Lab, prompt_of

pytestmark = [pytest.mark.service, pytest.mark.slow, on_the_tiny_model_only]
NAME, TOKENS = "auto", 160


@pytest.fixture(scope="module")
def auto(service: Service, cluster_settings: Settings) -> Iterator[Service]:
    """The application, with all else of the session as it is by default."""
    settings = of_one_replica(cluster_settings).model_copy(update={"session": SessionSettings(mode="auto")})
    with Application(service, NAME, settings) as running:
        yield running


@pytest.fixture
async def asks(auto: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of it."""
    async with client_of(auto) as made:
        yield made


def published(metric: str) -> dict[str, float]:
    """What the node's metrics endpoint has of the application, by way."""
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as reply:
        lines = reply.read().decode().splitlines()
    mine = [x for x in lines if x.startswith(f"ray_llm42_{metric}{{") and f'application="{NAME}"' in x]
    return {x.split('way="')[1].split('"')[0]: float(x.rsplit(" ", 1)[1]) for x in mine}


async def test_both_classes_together_are_answered_right_and_the_policy_is_seen(
    asks: openai.AsyncOpenAI, served: Lab, settings: Settings
) -> None:
    model, prompts = settings.model.name, [list(prompt_of(40 + i, 10 + 5 * i)) for i in range(3)]
    each = [(prompt, fields) for prompt in prompts for fields in SAMPLINGS]
    want = [oracle(served, prompt, fields, TOKENS) for prompt, fields in each]

    async def round_of_both() -> list[Answer]:
        beside = asyncio.create_task(noise(asks, model, 3, 6))
        asked = (ask(asks, model, p, TOKENS, deterministic=True, **fields) for p, fields in each)
        answers = [answer for answer, _ in await asyncio.gather(*asked)]
        await beside
        return answers

    deadline, expected = time.monotonic() + WAIT_S, dict[str, float]()
    while len([x for x in expected.values() if x > 0]) < 2:  # as long as there is traffic
        assert time.monotonic() < deadline, f"expected of each way: {expected}"
        asked = asyncio.create_task(round_of_both())
        while not asked.done() and not all(expected.get(way) for way in ("verify", "direct")):
            await asyncio.sleep(0.5)
            expected = await asyncio.to_thread(published, "way_expected_tokens_per_second")
        assert await asked == want
    committed: dict[str, Any] = await asyncio.to_thread(published, "committed_tokens_total")
    assert set(committed) == {"verify", "direct"}
    assert sum(committed.values()) > 0

"""The whole service on a GPU: Ray Serve, the torch engine and a verifier actor side by side on one device."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
openai = pytest.importorskip("openai")

from llm42.checkpoint.load import load_for, sampled_identity  # noqa: E402
from llm42.config import Settings  # noqa: E402
from llm42.config.serve_file import absolute  # noqa: E402
from llm42.protocol import Request, SamplingParams  # noqa: E402
from llm42.verifier.build import build_verifier  # noqa: E402
from llm42_serve.launch import Service  # noqa: E402
from llm42_serve.verifiers.names import NAMESPACE, verifier_names  # noqa: E402
from tests.conftest import free_port  # noqa: E402
from tests.service.traffic import Answer, ask, noise  # noqa: E402
from tests.support import decode_alone  # noqa: E402

TOKENS, COPIES = 96, 32
PROMPT = [1, 4093, 198, 23007, 260, 3025, 563, 260, 2644, 338, 6032, 260, 4030, 30, 2, 198]


@pytest.fixture(scope="module")
def settings() -> Settings:
    path = Settings().model.path
    if not Path(path).exists():
        pytest.skip(f"no model at {path}")
    tree = {
        "model": {"device": "cuda"},
        "engine": {"kv_tokens": 65536, "max_batch": 64, "corrupt_share": 0.02},
        "verifier": {"kv_tokens": 65536, "certificate_dir": None},
        "session": {"mode": "verify"},
        "server": {"port": free_port()},
    }
    return absolute(Settings.load(tree))


@pytest.fixture(scope="module")
def service(settings: Settings) -> Iterator[Service]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    began = time.monotonic()
    with Service(settings, print) as running:
        running.wait_deterministic()
        print(f"ready after {time.monotonic() - began:.1f} s: {running.health()}")
        yield running


@pytest.fixture(scope="module")
def oracle(settings: Settings, service: Service) -> Callable[[SamplingParams], Any]:
    """What must come: the verifier decoding alone, in this process."""
    model, tokenizer = load_for(settings)
    verifier = build_verifier(settings, model, tokenizer)
    assert verifier.fingerprint == service.health()["fingerprint"], "another process, another fingerprint"

    def decode(sampling: SamplingParams) -> Any:
        request = Request("oracle", tuple(PROMPT), TOKENS, sampling, True, num_logprobs=0)
        return decode_alone(verifier, tokenizer, request).sent

    return decode


async def _copies(service: Service, settings: Settings, kill: bool, **body: Any) -> tuple[set[Answer], int]:
    url, model = f"{service.url}/v1", settings.model.name
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        load = asyncio.create_task(noise(client, model, 1, 48))
        asked = [asyncio.create_task(ask(client, model, PROMPT, TOKENS, **body)) for _ in range(COPIES)]
        if kill:
            await asyncio.sleep(1.0)
            name = verifier_names(settings, sampled_identity(settings.model.path), 1)[0]
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        answers = await asyncio.gather(*asked)
        await load
    return {a for a, _ in answers}, sum(int(str(e.get("rollbacks", 0))) for _, e in answers)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_copies_under_noise_are_the_oracles(
    service: Service, settings: Settings, oracle: Callable[[SamplingParams], Any], temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=7)
    expected = oracle(sampling)
    body = {"temperature": temperature, "seed": 7}
    distinct, rollbacks = asyncio.run(_copies(service, settings, False, deterministic=True, **body))
    print(f"temperature {temperature}: {rollbacks} rollbacks in {COPIES * TOKENS} tokens")
    assert distinct == {expected}
    assert rollbacks > 0, "the planted wrong candidates were not met"


def test_a_verifier_killed_under_load_changes_nothing(
    service: Service, settings: Settings, oracle: Callable[[SamplingParams], Any]
) -> None:
    expected = oracle(SamplingParams())
    distinct, _ = asyncio.run(_copies(service, settings, True, deterministic=True, temperature=0.0))
    assert distinct == {expected}


def test_best_effort_under_noise_differs(service: Service, settings: Settings) -> None:
    """The control: without verification the copies' log-probabilities are not one."""
    distinct, _ = asyncio.run(_copies(service, settings, False, temperature=0.0))
    assert len(distinct) > 1

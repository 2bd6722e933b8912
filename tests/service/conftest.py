"""Clients of the session's service (tests/conftest.py), which has two fast-path replicas; and the same tests
once more on a real model, as a second application of its cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from llm42.config import Settings
from llm42.config.serve_file import absolute
from llm42.text.tokenizer import Tokenizer
from llm42_serve.launch import Service
from tests.conftest import SERVED
from tests.service.served import Application
from tests.support import Lab, smollm2_file

WAIT_S = 900.0
"""How long a test's client waits: a slow machine is no failure."""


@pytest.fixture(scope="session", params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def served_name(request: pytest.FixtureRequest) -> str:
    """Which model. Not a parameter of `service`: pytest would give it to the cluster's fixture of that name
    too, and start a cluster for each."""
    return str(request.param)


@pytest.fixture(scope="session")
def service(request: pytest.FixtureRequest, service: Service, served_name: str) -> Iterator[Service]:
    """The service with the tiny model; among the slow tests, and where a test asks for it (served.py), one
    with SmolLM2."""
    if served_name == "tiny":
        yield service
        return
    lab: Lab = request.getfixturevalue("smollm2")
    real = SERVED | {"verifier": {"certificate_dir": lab.settings.verifier.certificate_dir}}
    with Application(service, "smollm2", absolute(Settings.load(real))) as running:
        yield running


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, service: Service) -> Lab:
    """The served model in this process: what its answers are compared with."""
    if service.settings.model.name != "tiny":
        return request.getfixturevalue("smollm2")  # type: ignore[no-any-return]
    return Lab.load(service.settings)


@pytest.fixture(scope="session")
def settings(service: Service) -> Settings:
    """What the service runs with."""
    return service.settings


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    """An OpenAI client that does not hide errors behind retries."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as made:
        yield made


def client_of(service: Service) -> openai.AsyncOpenAI:
    """An asynchronous client of an application, which does not hide errors either."""
    return openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


@pytest.fixture
async def aclient(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    """The asynchronous one."""
    async with client_of(service) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The default model's."""
    return Tokenizer.load(smollm2_file())

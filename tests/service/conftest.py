"""One Ray cluster for the session: the service as `llm42 serve` starts it, with two fast-path replicas."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from deployments.launch import Service, absolute
from llm42.config import Settings


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def settings() -> Settings:
    """The defaults, but replicas make 5 % of their candidates wrong: every run has rollbacks to survive."""
    return absolute(
        Settings.load(
            {
                "engine": {"threads": 1, "corrupt_share": 0.05},
                "server": {"port": free_port(), "fastpath_replicas": 2, "max_queued": 64},
            }
        )
    )


@pytest.fixture(scope="session")
def service(settings: Settings) -> Iterator[Service]:
    """The running service, certified."""
    with Service(settings) as running:
        running.wait_deterministic()
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    """An OpenAI client that does not hide errors behind retries."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
async def aclient(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    """The asynchronous one."""
    made = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=120)
    async with made:
        yield made

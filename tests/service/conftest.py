"""Clients of the session's service (tests/conftest.py), which has two fast-path replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest

from deployments.launch import Service
from llm42.config import Settings
from llm42.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def settings(cluster_settings: Settings) -> Settings:
    """What the service runs with."""
    return cluster_settings


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


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The default model's."""
    path = Settings().model.path
    if not Path(path).is_file():
        pytest.fail("the default model is missing: python -m llm42.models.fetch")
    return Tokenizer.load(path)

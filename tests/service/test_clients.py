"""The openai client over the scripted application: synchronous and asynchronous, streams, errors by type."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from llm42.api.app import create_app
from llm42.config import Settings
from llm42.errors import Overloaded, VerifierUnavailable
from llm42.protocol import Delta, Request
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import MODEL, SETTINGS, Script, Scripted, hello

TALK: Any = [{"role": "user", "content": "Hi"}]
DETERMINISTIC = {"deterministic": True}


@asynccontextmanager
async def openai_client(
    tokenizer: Tokenizer, script: Script = hello, settings: Settings = SETTINGS, key: str = "none"
) -> AsyncIterator[openai.AsyncOpenAI]:
    app = create_app(settings, tokenizer, Scripted(script))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, max_retries=0, http_client=http) as made,
    ):
        yield made


async def test_chat_and_completions(tokenizer: Tokenizer) -> None:
    async with openai_client(tokenizer) as api:
        chat = await api.chat.completions.create(
            model=MODEL, messages=TALK, logprobs=True, top_logprobs=1, extra_body=DETERMINISTIC
        )
        assert chat.choices[0].message.content == "Hello, world"
        assert chat.choices[0].finish_reason == "stop"
        assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
        assert chat.usage and chat.usage.prompt_tokens_details
        assert chat.usage.prompt_tokens_details.cached_tokens == 0
        assert chat.system_fingerprint == "f00d"
        assert chat._request_id
        text = await api.completions.create(model=MODEL, prompt="Hi", echo=True, logprobs=1)
        assert text.choices[0].text == "HiHello, world"
        header = {"X-LLM42-Deterministic": "true"}
        again = await api.completions.create(model=MODEL, prompt="Hi", extra_headers=header)
        assert again.system_fingerprint == "f00d"
        assert [m.id async for m in api.models.list()] == [MODEL]
        assert (await api.models.retrieve(MODEL)).id == MODEL


async def test_streams(tokenizer: Tokenizer) -> None:
    """Every chunk parses with the client's types; the reason is null until the last."""
    async with openai_client(tokenizer) as api:
        chunks = [
            c
            async for c in await api.chat.completions.create(
                model=MODEL, messages=TALK, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world"
        assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, "stop"]
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 3
        parts = [c async for c in await api.completions.create(model=MODEL, prompt="Hi", stream=True)]
        assert "".join(c.choices[0].text for c in parts) == "Hello, world"


async def broken(request: Request) -> AsyncGenerator[Delta, None]:
    yield Delta((7,), "begun")
    raise VerifierUnavailable("it died")


def failing(error: Exception) -> Script:
    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        raise error
        yield

    return script


async def test_errors_by_type(tokenizer: Tokenizer) -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    key = {"name": "k", "sha256": digest, "deterministic_share": 0}
    keyed = Settings.load({"server": {"api_keys": [key]}})
    cases: list[tuple[Any, type[Exception], dict[str, Any]]] = [
        ({}, openai.BadRequestError, {"temperature": -1}),
        ({}, openai.NotFoundError, {"model": "other"}),
        ({"settings": keyed}, openai.AuthenticationError, {}),
        ({"settings": keyed, "key": "right"}, openai.PermissionDeniedError, {"extra_body": DETERMINISTIC}),
        ({"script": failing(Overloaded("full"))}, openai.RateLimitError, {}),
        ({"script": failing(VerifierUnavailable("none"))}, openai.InternalServerError, {}),
        ({"script": failing(RuntimeError("bug"))}, openai.InternalServerError, {}),
    ]
    for parts, kind, fields in cases:
        async with openai_client(tokenizer, **parts) as api:
            for stream in (False, True):
                with pytest.raises(kind) as caught:
                    await api.completions.create(
                        **{"model": MODEL, "prompt": "x", "stream": stream, **fields}
                    )
                assert isinstance(caught.value, openai.APIStatusError)
                assert caught.value.request_id


async def test_an_error_inside_a_stream_is_raised(tokenizer: Tokenizer) -> None:
    async with openai_client(tokenizer, broken) as api:
        stream = await api.chat.completions.create(model=MODEL, messages=TALK, stream=True)
        assert (await anext(stream)).choices[0].delta.content == "begun"
        with pytest.raises(openai.APIError, match="it died"):
            await anext(stream)

"""Requests made from our own OpenAPI document, right and wrong ones: no answer may be a server error, and
every error has OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from llm42.api.app import create_app
from llm42.config import Settings
from llm42.protocol import Delta, Request
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import SETTINGS, Scripted, hello

schemathesis: Any = pytest.importorskip("schemathesis", reason="pip install schemathesis to run this")
EXAMPLES = 40


def app_of(script: Any = hello) -> Any:
    assert Path(SETTINGS.model.path).is_file(), (
        "the default model is missing: python -m llm42.checkpoint.fetch"
    )
    return create_app(Settings(), Tokenizer.load(SETTINGS.model.path), Scripted(script))


schema = schemathesis.openapi.from_asgi("/openapi.json", app_of())


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_a_server_error(case: Any) -> None:
    reply = case.call()
    assert reply.status_code < 500, reply.text[:500]
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_control_a_handler_that_fails_is_noticed() -> None:
    async def broken(request: Request) -> AsyncGenerator[Delta, None]:
        raise RuntimeError("planted")
        yield

    found = schemathesis.openapi.from_asgi("/openapi.json", app_of(broken))
    body = {"model": SETTINGS.model.name, "prompt": "Hi"}
    reply = found["/v1/completions"]["POST"].Case(body=body, media_type="application/json").call()
    assert reply.status_code == 500

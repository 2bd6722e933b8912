"""The lines of the log for requests: each refusal has one, with who asked, and none has a prompt or a key."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from llm42.api.json_bodies import MAX_BYTES
from llm42.config import TelemetrySettings
from llm42.errors import Overloaded
from llm42.protocol import Delta, Request
from llm42.telemetry.logs import LOGGERS, configure, event
from llm42.telemetry.metrics import Metrics
from llm42.telemetry.request_metrics import Observed
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import JSON, chat, client, completion, hello
from tests.service.test_policy import bearer, settings_of

SECRET = "tell nobody"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Where the loggers write JSON lines; they are put back afterwards."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(x.handlers, x.level) for x in loggers]
    stream = io.StringIO()
    configure(TelemetrySettings(log_format="json"), "ingress", stream)
    yield stream
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers = handlers
        logger.setLevel(level)


def read(stream: io.StringIO) -> list[dict[str, Any]]:
    """The lines since the last call."""
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    stream.seek(0)
    stream.truncate()
    return found


async def full(request: Request) -> AsyncGenerator[Delta, None]:
    raise Overloaded("Too many requests wait.")
    yield


REFUSALS: list[tuple[int, str | None, str, dict[str, Any], str]] = [
    (400, "invalid_value", "temperature: ", completion(prompt=SECRET, temperature=-1), "full"),
    (400, "invalid_request_error", "Unknown field 'x'", completion(prompt=SECRET, x=1), "full"),
    (401, "invalid_api_key", "A valid API key", completion(prompt=SECRET), "nobody"),
    (403, "not_allowed", "The key 'never'", completion(prompt=SECRET, deterministic=True), "never"),
    (404, "model_not_found", "The model 'other'", completion(prompt=SECRET, model="other"), "full"),
    (413, "body_too_large", "The body is too long", completion(prompt=SECRET + " " * MAX_BYTES), "full"),
    (429, "overloaded", "Too many requests wait.", completion(prompt=SECRET), "full"),
]


@pytest.mark.parametrize(("status", "code", "reason", "body", "key"), REFUSALS, ids=lambda v: str(v)[:20])
async def test_each_refused_request_has_one_line(
    tokenizer: Tokenizer, lines: io.StringIO, status: int, code: str, reason: str, body: Any, key: str
) -> None:
    async with client(tokenizer, full, settings_of()) as (http, _):
        for own in ({}, {"X-Request-ID": "mine-1"}):
            reply = await http.post("/v1/completions", json=body, headers=bearer(key) | own)
            assert reply.status_code == status
            text = lines.getvalue()
            assert SECRET not in text
            assert f"key-{key}" not in text
            (line,) = read(lines)
            said = {name: line.get(name) for name in ("level", "message", "status", "code", "method", "path")}
            assert said == {
                "level": "info", "message": "refused", "status": status, "code": code,
                "method": "POST", "path": "/v1/completions",
            }  # fmt: skip
            assert line["reason"].startswith(reason)
            assert line.get("key") == (None if key == "nobody" else key)
            assert line.get("client_request_id") == own.get("X-Request-ID")
            if not own:
                assert line["request_id"] == reply.headers["x-request-id"]


async def test_unknown_paths_and_lost_bodies_have_one_too(tokenizer: Tokenizer, lines: io.StringIO) -> None:
    async with client(tokenizer) as (http, _):
        await http.get("/v1/nothing/" + "x" * 1000)
        await http.get("/v1/completions")
        await http.post("/v1/completions", content=b"", headers=JSON)
        assert (await http.get("/health")).status_code == 200
    found = read(lines)
    assert [line["status"] for line in found] == [404, 405, 400]
    assert len(found[0]["path"]) == 200


async def test_a_template_that_quotes_a_message_is_not_logged(
    tokenizer: Tokenizer, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llm42.text.chat_template import ChatTemplate

    template = ChatTemplate("{{ raise_exception('no: ' + messages[0].content) }}", {})
    monkeypatch.setattr(tokenizer, "_templates", {"default": template})
    async with client(tokenizer) as (http, _):
        reply = await http.post(
            "/v1/chat/completions", json=chat(messages=[{"role": "user", "content": SECRET}])
        )
    assert SECRET in reply.json()["error"]["message"]
    assert SECRET not in lines.getvalue()
    assert read(lines)[0]["reason"] == "the model's chat template refused the messages"


async def test_the_clients_id_and_the_keys_name_are_in_each_line(
    tokenizer: Tokenizer, lines: io.StringIO
) -> None:
    """Also in lines that tasks of the request write, in streams, and in no other request's."""

    async def observed(request: Request) -> AsyncGenerator[Delta, None]:
        async for delta in Observed(request, Metrics()).run(hello(request)):
            yield delta

    async with client(tokenizer, observed, settings_of()) as (http, _):
        for stream in (False, True):
            body = completion(n=2, stream=stream)
            await http.post("/v1/completions", json=body, headers=bearer("full") | {"X-Request-ID": "mine-2"})
            found = read(lines)
            assert [(x["message"], x["client_request_id"], x["key"]) for x in found] == [
                ("request", "mine-2", "full")
            ] * 2
        await http.post("/v1/completions", json=completion(), headers=bearer("half"))
        (line,) = read(lines)
        assert line["key"] == "half"
        assert "client_request_id" not in line
    event(logging.getLogger("llm42.x"), "later")
    assert not {"key", "client_request_id"} & set(read(lines)[0])


@pytest.mark.parametrize(
    ("given", "logged"),
    [(b"x" * 5000, "x" * 256), (b"caf\xe9", "caf?"), (b"tab\there", "tab?here"), (b"", None)],
)
async def test_an_id_that_is_none_is_logged_harmlessly(
    tokenizer: Tokenizer, lines: io.StringIO, given: bytes, logged: str | None
) -> None:
    async with client(tokenizer) as (http, _):
        await http.get("/v1/nothing", headers={"X-Request-ID": given})
    assert read(lines)[0].get("client_request_id") == logged

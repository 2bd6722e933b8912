"""What clients and networks do: bodies that end half way, readers that stop, sizes without measure. Every
one gets a clear error or nothing; memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from llm42.api import asgi
from llm42.api.app import create_app
from llm42.api.requests import ChatBody, CompletionBody
from llm42.config import Settings
from llm42.protocol import Delta, FinishReason, Request
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import JSON, SETTINGS, Scripted, assert_error, chat, client, completion, hello
from tests.support import PATIENCE_S, Clock, until


def scope_of(path: str) -> dict[str, Any]:
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "scheme": "http", "server": ("test", 80),
        "client": ("test", 1), "http_version": "1.1", "root_path": "", "asgi": {"version": "3.0"},
    }  # fmt: skip


class Connection:
    """The server's side of one connection, message by message."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages = list(messages)
        self.sent: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        self.reading.set()

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        await self.reading.wait()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent[1:])


HALF = {"type": "http.request", "body": b'{"model": "SmolLM2-', "more_body": True}


async def test_half_a_body_is_waited_for_only_so_long(tokenizer: Tokenizer) -> None:
    """A body that does not come: HTTP 408 after server.body_timeout_s, and the backend has seen nothing."""
    settings = Settings.load({"server": {"body_timeout_s": 0.2}})
    backend, link = Scripted(hello), Connection(HALF)
    app: Any = create_app(settings, tokenizer, backend)
    await asyncio.wait_for(app(scope_of("/v1/completions"), link.receive, link.send), PATIENCE_S)
    assert link.status == 408
    assert json.loads(link.body)["error"]["code"] == "body_timeout"
    assert backend.requests == []


async def test_the_body_s_deadline_does_not_end_an_answer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control for the above: an answer that takes longer than the deadline arrives."""
    monkeypatch.setattr(asgi, "time", Clock())  # the body is there before any time has passed

    async def slow(request: Request) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(0.5)
        yield Delta((7,), "late", finish_reason=FinishReason.STOP)

    settings = Settings.load({"server": {"body_timeout_s": 0.1}})
    async with client(tokenizer, slow, settings) as (http, _):
        for stream in (False, True):
            assert "late" in (await http.post("/v1/completions", json=completion(stream=stream))).text


async def test_a_connection_cut_inside_the_body(tokenizer: Tokenizer) -> None:
    backend, link = Scripted(hello), Connection(HALF, {"type": "http.disconnect"})
    app: Any = create_app(SETTINGS, tokenizer, backend)
    await asyncio.wait_for(app(scope_of("/v1/completions"), link.receive, link.send), PATIENCE_S)
    assert not link.sent or link.status == 400
    assert backend.requests == []


async def test_a_slow_reader_stops_its_stream_not_the_server(tokenizer: Tokenizer) -> None:
    """While a client does not read, its output is not produced without end; then it gets all of it."""
    made = 0

    async def many(request: Request) -> AsyncGenerator[Delta, None]:
        nonlocal made
        for _ in range(1000):
            made += 1
            yield Delta((7,), "x" * 100)
        yield Delta((7,), "end", finish_reason=FinishReason.STOP)

    backend = Scripted(many)
    body = {"type": "http.request", "body": json.dumps(completion(stream=True)).encode(), "more_body": False}
    link = Connection(body)
    link.reading.clear()
    app: Any = create_app(SETTINGS, tokenizer, backend)
    stream = asyncio.create_task(app(scope_of("/v1/completions"), link.receive, link.send))
    await until(lambda: made > 0)
    await asyncio.sleep(0.3)
    assert made < 20, "the output ran ahead of its reader"
    async with client(tokenizer) as (http, _):
        assert (await http.post("/v1/completions", json=completion())).status_code == 200
    link.reading.set()
    await asyncio.wait_for(stream, PATIENCE_S)
    assert link.body.count(b"x" * 100) == 1000
    assert link.body.endswith(b"data: [DONE]\n\n")


async def cost(tokenizer: Tokenizer, path: str, text: str) -> tuple[httpx.Response, float, int]:
    """The reply to a body that is refused, the CPU seconds, and the bytes that Python has allocated at most.
    It is sent twice: what the first one only brings into memory is not its own, and tracing takes time."""
    async with client(tokenizer) as (http, backend):
        began = time.process_time()  # not the clock's: the machine may be busy
        reply = await http.post(path, content=text, headers=JSON)
        seconds = time.process_time() - began
        tracemalloc.start()
        try:
            await http.post(path, content=text, headers=JSON)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert backend.requests == []
    return reply, seconds, peak


def most(text: str) -> int:
    """Bytes that a body may cost: it is held a few times, not hundreds."""
    return 40 * len(text) + (1 << 20)


DEEP = '{"model": "m", "messages": ' + "[" * 200_000 + "]" * 200_000 + "}"
NESTED = json.dumps(chat(chat_template_kwargs=None)).replace("null", '{"a": ' * 900 + "1" + "}" * 900)
BIAS = {str(10**9 + i): 1 for i in range(50_000)}
HUGE: list[tuple[str, str, str | None]] = [
    ("a long prompt", json.dumps(completion(prompt="word " * (1 << 17))), "prompt"),
    ("1 MiB message", json.dumps(chat(messages=[{"role": "user", "content": "a" * (1 << 20)}])), "messages"),
    ("10,000 stop strings", json.dumps(completion(stop=[f"s{i}" for i in range(10_000)])), "stop"),
    ("long stop string", json.dumps(completion(stop="s" * (1 << 20))), "stop"),
    ("300,000 ids", json.dumps(completion(prompt=[1] * 300_000)), "prompt"),
    ("many prompts", json.dumps(completion(prompt=["a"] * 100_000)), "prompt"),
    ("many messages", json.dumps(chat(messages=[{"role": "user", "content": "a"}] * 20_000)), "messages"),
    ("many biases", json.dumps(completion(logit_bias=BIAS)), "logit_bias"),
    ("a long field name", json.dumps(completion(**{"x" * (1 << 20): 1})), "x" * (1 << 20)),
    ("deep JSON", DEEP, None),
    ("a long number", json.dumps(completion()).replace('"Hi"', "1" * 100_000), None),
]  # fmt: skip

# as much as fits a body of this context; more is refused unread (test_bodies.py)
EMPTY: list[Any] = [{}] * 30_000
FIELDS = {f"f{i}": 1 for i in range(20_000)}
MANY = {f"f{i}": 1 for i in range(200)}
"""Within the number of fields that a body may have at all."""
FUNCTION = {"type": "function", "function": {"name": "f"}}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("prompt", completion(prompt=EMPTY), "prompt"),
    ("prompt of texts", completion(prompt=["a", *EMPTY]), "prompt"),
    ("prompt of ids", completion(prompt=[1, *["a"] * 30_000]), "prompt"),
    ("prompt of lists", completion(prompt=[[1], *EMPTY]), "prompt"),
    ("prompt in a list", completion(prompt=[[1, *EMPTY]]), "prompt"),
    ("negative ids", completion(prompt=[-1] * 30_000), "prompt"),
    ("biases", completion(logit_bias=FIELDS), "logit_bias"),
    ("wrong biases", completion(logit_bias=dict.fromkeys(FIELDS, "x")), "logit_bias"),
    ("1025 biases", completion(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
    ("stop", completion(stop=EMPTY), "stop"),
    ("stop_token_ids", completion(stop_token_ids=EMPTY), "stop_token_ids"),
    ("receipt", completion(deterministic=True, receipt=FIELDS), "receipt"),
    ("response_format", completion(response_format=FIELDS), "response_format"),
    ("messages", chat(messages=EMPTY), "messages"),
    ("parts", chat(messages=[{"role": "user", "content": EMPTY}] * 2), "messages"),
    ("tool_calls", chat(messages=[{"role": "assistant", "tool_calls": EMPTY}]), "messages"),
    ("function", chat(messages=[{"role": "assistant", "tool_calls": [{"function": FIELDS}]}]), "messages"),
    ("tools", chat(tools=EMPTY), "tools"),
    ("tool", chat(tools=[FUNCTION | FIELDS]), "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), [pytest.param(b, p, id=name) for name, b, p in WRONG])
async def test_a_wrong_body_costs_a_few_errors(
    tokenizer: Tokenizer, body: dict[str, Any], param: str
) -> None:
    """Not one per element and form: 100 kB of `{}` in a prompt were a hundred megabytes of errors."""
    kind = ChatBody if "messages" in body else CompletionBody
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 8
    text, path = json.dumps(body), "/v1/chat/completions" if kind is ChatBody else "/v1/completions"
    reply, _, peak = await cost(tokenizer, path, text)
    assert_error(reply, 400, param)
    assert peak < most(text)


def test_control_a_plain_model_costs_many() -> None:
    """What a union of the prompt's forms says of the same list."""

    class Plain(BaseModel):
        prompt: str | list[str] | list[int] | list[list[int]]

    tracemalloc.start()
    try:
        with pytest.raises(ValidationError) as caught:
            Plain.model_validate({"prompt": EMPTY})
        assert len(caught.value.errors()) > 3 * len(EMPTY)
        assert tracemalloc.get_traced_memory()[1] > most(json.dumps(EMPTY))
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"messages": EMPTY}, "messages"),
        ("/tokenize", {"prompt": "a", **MANY}, "f0"),
        ("/detokenize", {"tokens": EMPTY}, "tokens"),
        ("/detokenize", {"tokens": [1], **MANY}, "f0"),
    ],
)
async def test_a_wrong_body_of_the_small_endpoints(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str
) -> None:
    reply, _, peak = await cost(tokenizer, path, json.dumps(body))
    assert_error(reply, 400, param)
    assert peak < most(json.dumps(body))


async def test_as_much_as_is_allowed(tokenizer: Tokenizer) -> None:
    """Control for the above: the largest of everything is served."""
    body = completion(prompt=["a"] * 64, logit_bias={str(i): 1 for i in range(1024)}, stop=["s"] * 16)
    async with client(tokenizer) as (http, backend):
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert len(backend.requests) == 64
        assert len(backend.requests[0].sampling.logit_bias) == 1024


@pytest.mark.parametrize(("text", "param"), [pytest.param(t, p, id=name) for name, t, p in HUGE])
async def test_sizes_without_measure(tokenizer: Tokenizer, text: str, param: str | None) -> None:
    """A clear 400, soon, with a message of bounded length."""
    path = "/v1/chat/completions" if '"messages"' in text else "/v1/completions"
    reply, seconds, peak = await cost(tokenizer, path, text)
    assert reply.status_code == 400, reply.text[:300]
    error = reply.json()["error"]
    if param is not None:
        assert error["param"] == param[: len(error["param"])]
    assert len(reply.content) < 4096, "the error repeats what was sent"
    assert seconds < 5, "ten times what the largest takes on a slow core"
    assert peak < most(text)


async def test_deep_values_that_can_be_read_are_no_crash(tokenizer: Tokenizer) -> None:
    """Nine hundred levels inside a template variable: served or refused, never an internal error."""
    async with client(tokenizer) as (http, _):
        reply = await http.post("/v1/chat/completions", content=NESTED, headers=JSON)
        assert reply.status_code in (200, 400), reply.text
        if reply.status_code == 400:
            assert_error(reply, 400, reply.json()["error"]["param"])

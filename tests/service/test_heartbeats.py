"""Streams that have nothing to say yet: the head comes, then comments; what a stream sends stays the same."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from starlette.types import Send

from llm42.api import reply_writer, streams
from llm42.api.app import create_app
from llm42.config import Settings
from llm42.errors import Overloaded, VerifierUnavailable
from llm42.protocol import Delta, FinishReason, Request
from llm42.text.tokenizer import Tokenizer
from tests.service.connection import connect
from tests.service.scripted import MODEL, Script, Scripted, assert_error, chat, client, completion, events
from tests.support import PATIENCE_S, Clock, until

BEAT_S = 0.05


def settings_of(heartbeat_s: float) -> Settings:
    return Settings.load({"server": {"heartbeat_s": heartbeat_s}})


def after(wait: Callable[[], Awaitable[Any]], error: Exception | None = None) -> Script:
    """Waits, then fails, or says two pieces with another wait between them."""

    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        await wait()
        if error:
            raise error
        yield Delta((7,), "one")
        await wait()
        yield Delta((8,), " two", finish_reason=FinishReason.STOP)

    return script


def slow(seconds: float, error: Exception | None = None) -> Script:
    """The same with waits of so many seconds."""
    return after(lambda: asyncio.sleep(seconds), error)


def without_comments(text: str) -> str:
    return "".join(part + "\n\n" for part in text.split("\n\n") if part and not part.startswith(":"))


def comparable(text: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k not in ("id", "created")} for e in events(text)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_head_does_not_wait_for_the_first_token(tokenizer: Tokenizer, path: str) -> None:
    """A place in a queue, a long prompt: the client learns within the heartbeat's time that it is served."""
    body = (chat if "chat" in path else completion)(stream=True)
    link, _, task = connect(tokenizer, slow(600.0), settings_of(BEAT_S), path, body)
    await until(lambda: len(link.sent) > 2, "no head and no byte")
    assert link.sent[0]["status"] == 200
    assert link.text.startswith(reply_writer.HEARTBEAT)
    assert set(link.text.split("\n\n")) == {reply_writer.HEARTBEAT.strip(), ""}
    task.cancel()
    await asyncio.wait([task])


async def streamed(tokenizer: Tokenizer, heartbeat_s: float) -> str:
    """A stream that waits twice: for a while, or with BEAT_S until two comments have come."""

    async def beats() -> None:
        if heartbeat_s == BEAT_S:
            had = link.text.count(reply_writer.HEARTBEAT)
            await until(lambda: link.text.count(reply_writer.HEARTBEAT) >= had + 2)
        else:
            await asyncio.sleep(BEAT_S * 4)

    body = completion(stream=True, seed=1)
    link, _, task = connect(tokenizer, after(beats), settings_of(heartbeat_s), "/v1/completions", body)
    await asyncio.wait_for(task, PATIENCE_S)
    return link.text


async def test_comments_come_between_events_that_stay_the_same(tokenizer: Tokenizer) -> None:
    """Before the first token, and between two; with 0 there are none, and the events are equal."""
    texts = [await streamed(tokenizer, heartbeat_s) for heartbeat_s in (0.0, BEAT_S, 600.0)]
    never, often, seldom = texts
    assert ":" not in {part[0] for part in (never + seldom).split("\n\n") if part}
    assert re.match(r"(: [^\n]*\n\n){2,}data: \{", often)
    assert re.search(r"\}\n\n(: [^\n]*\n\n){2,}data: \{", often)
    assert often.endswith("data: [DONE]\n\n"), "nothing comes after the end"
    assert comparable(without_comments(often)) == comparable(never) == comparable(seldom)


async def test_no_comment_where_events_are_frequent_or_the_client_does_not_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(streams, "time", clock)

    async def steady(request: Request) -> AsyncGenerator[Delta, None]:
        for _ in range(20):
            clock.now += 0.9 * BEAT_S
            await asyncio.sleep(0.02)  # it is looked whether a comment is due
            yield Delta((7,), "x")
        yield Delta((7,), "x", finish_reason=FinishReason.STOP)

    settings, body = settings_of(BEAT_S), completion(stream=True)
    link, _, task = connect(tokenizer, steady, settings, "/v1/completions", body)
    await asyncio.wait_for(task, PATIENCE_S)
    assert reply_writer.HEARTBEAT not in link.text
    ready = asyncio.Event()

    async def two(request: Request) -> AsyncGenerator[Delta, None]:
        yield Delta((7,), "one")
        await ready.wait()
        yield Delta((8,), " two", finish_reason=FinishReason.STOP)

    link, _, task = connect(tokenizer, two, settings, "/v1/completions", body)
    await until(lambda: len(link.sent) == 2)
    link.reading.clear()  # the second event waits for its reader
    ready.set()
    await until(lambda: len(link.sent) == 3)
    clock.now += 100 * BEAT_S
    await asyncio.sleep(BEAT_S * 5)
    link.reading.set()
    await asyncio.wait_for(task, PATIENCE_S)
    assert reply_writer.HEARTBEAT not in link.text
    assert len(events(link.text)) == 2


@pytest.mark.parametrize(("error", "status"), [(Overloaded("full"), 429), (VerifierUnavailable("none"), 503)])
async def test_an_error_has_a_status_while_the_head_is_not_sent_and_is_an_event_after(
    tokenizer: Tokenizer, error: Exception, status: int
) -> None:
    body = completion(stream=True)
    async with client(tokenizer, slow(BEAT_S, error=error), settings_of(60.0)) as (http, _):
        assert_error(await http.post("/v1/completions", json=body), status, None)

    async def begun() -> None:
        await until(lambda: bool(link.sent))

    link, _, task = connect(tokenizer, after(begun, error), settings_of(BEAT_S), "/v1/completions", body)
    await asyncio.wait_for(task, PATIENCE_S)
    assert link.sent[0]["status"] == 200
    (event,) = events(without_comments(link.text))
    assert event["error"]["message"] == str(error)


@pytest.mark.parametrize("heartbeat_s", [60.0, BEAT_S], ids=["before the head", "after it"])
async def test_a_client_that_leaves_before_the_first_token_frees_its_place(
    tokenizer: Tokenizer, heartbeat_s: float
) -> None:
    body = completion(stream=True)
    link, backend, task = connect(tokenizer, slow(600.0), settings_of(heartbeat_s), "/v1/completions", body)
    await until(lambda: bool(backend.requests and (link.sent or heartbeat_s > 1)), "no request, or no head")
    assert bool(link.sent) == (heartbeat_s < 1)
    link.leave()
    await asyncio.wait_for(backend.closed.wait(), PATIENCE_S)
    await asyncio.wait_for(task, PATIENCE_S)


async def test_a_connection_that_breaks_at_the_head_frees_its_place(tokenizer: Tokenizer) -> None:
    """The stream has not begun then: closing it would not reach what it is made of."""
    link, backend, task = connect(
        tokenizer, slow(600.0), settings_of(BEAT_S), "/v1/completions", completion(stream=True)
    )
    link.broken = True
    await asyncio.wait_for(backend.closed.wait(), PATIENCE_S)
    await asyncio.wait_for(task, PATIENCE_S)


async def test_a_whole_reply_has_one_status_and_no_comments(tokenizer: Tokenizer) -> None:
    async with client(tokenizer, slow(BEAT_S * 4), settings_of(BEAT_S)) as (http, _):
        reply = await http.post("/v1/completions", json=completion())
        assert reply.text == json.dumps(reply.json(), ensure_ascii=False)
    late = slow(BEAT_S * 4, error=Overloaded("full"))
    async with client(tokenizer, late, settings_of(BEAT_S)) as (http, _):
        assert_error(await http.post("/v1/completions", json=completion()), 429, None)


async def test_clients_skip_the_comments(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The openai client and httpx over a real connection."""
    put, comments = streams.EventStream._put, list[str]()

    async def noted(self: streams.EventStream, send: Send, text: str) -> None:
        await put(self, send, text)
        if text == reply_writer.HEARTBEAT:
            comments.append(text)

    async def beats() -> None:
        had = len(comments)
        await until(lambda: len(comments) >= had + 2)

    monkeypatch.setattr(streams.EventStream, "_put", noted)
    app = create_app(settings_of(BEAT_S), tokenizer, Scripted(after(beats)))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            stream = await api.completions.create(model=MODEL, prompt="Hi", stream=True)
            assert "".join([c.choices[0].text async for c in stream]) == "one two"
        async with (
            httpx.AsyncClient(timeout=PATIENCE_S) as http,
            http.stream("POST", f"{url}/v1/completions", json=completion(stream=True)) as reply,
        ):
            lines = [line async for line in reply.aiter_lines() if line]
        assert sum(line.startswith(":") for line in lines) >= 2
        assert [x[:5] for x in lines if not x.startswith(":")] == ["data:"] * 3
    finally:
        server.should_exit = True
        await serving

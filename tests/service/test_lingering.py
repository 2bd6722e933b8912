"""Bodies that are too long, over a real server: whoever sends all of one before reading can read the 413."""

from __future__ import annotations

import asyncio
import http.client
import json
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm42.api.app import create_app
from llm42.text.tokenizer import Tokenizer
from llm42_serve.ingress import lingering
from llm42_serve.ingress.lingering import Lingering
from llm42_serve.ingress.proxy_replies import ProxyReplies, middlewares
from tests.service.scripted import SETTINGS, Scripted, hello
from tests.support import PATIENCE_S

HUGE = b'{"model": "' + b"x" * (20 << 20)
"""More than all buffers between two sockets hold."""
TIMES = 5
Reply = tuple[int, dict[str, Any]]


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[int]:
    """The port of an HTTP server as Serve's proxy runs one; it may be asked from threads."""
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="critical", lifespan="off"))
    running = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await running


def by_urllib(port: int, body: bytes = HUGE) -> Reply:
    """It asks the server to close the connection, and reads after it has sent."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, body), timeout=PATIENCE_S) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def by_http_client(port: int, body: bytes | Iterator[bytes] = HUGE, **headers: str) -> Reply:
    """An iterator's body is sent in chunks, without a length."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        link.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **headers})
        reply = link.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        link.close()


ASK: dict[str, Callable[[int], Reply]] = {
    "urllib": by_urllib,
    "http.client": by_http_client,
    "http.client, which closes": lambda port: by_http_client(port, Connection="close"),
    "no announced length": lambda port: by_http_client(port, iter([HUGE]), Connection="close"),
}


def assert_refused(reply: Reply) -> None:
    status, body = reply
    assert status == 413
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("kind", ASK)
async def test_who_sends_too_much_reads_the_refusal(
    tokenizer: Tokenizer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LINGER_S", "SILENCE_S"):  # however slow this machine is
        monkeypatch.setattr(lingering, name, PATIENCE_S)
    app = Lingering(ProxyReplies(create_app(SETTINGS, tokenizer, Scripted(hello))))
    async with served(app) as port:
        for _ in range(TIMES):
            assert_refused(await asyncio.to_thread(ASK[kind], port))


async def test_control_without_lingering_the_connection_is_reset(tokenizer: Tokenizer) -> None:
    async with served(ProxyReplies(create_app(SETTINGS, tokenizer, Scripted(hello)))) as port:
        for kind in ("urllib", "http.client, which closes"):
            with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
                await asyncio.to_thread(ASK[kind], port)


def test_serve_puts_it_around_everything() -> None:
    """The last one is the outermost: Serve's own replies need it too."""
    assert [middleware.cls for middleware in middlewares()] == [ProxyReplies, Lingering]


async def _read_all(scope: Scope, receive: Receive, send: Send) -> None:
    kept = b""
    while (message := await receive()).get("more_body", False):
        kept += message["body"]
    await _refuse(scope, receive, send)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize(("app", "bounded"), [(_refuse, True), (_read_all, False)], ids=["", "control"])
async def test_what_is_dropped_is_not_kept(app: ASGIApp, bounded: bool) -> None:
    """The control is an application that reads the body."""
    async with served(Lingering(app)) as port:
        tracemalloc.start()
        try:
            assert (await asyncio.to_thread(by_urllib, port))[0] == 413
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (peak < len(HUGE) / 4) == bounded


class Sender:
    """A client that sends `pieces` pieces, and then nothing more."""

    def __init__(self, pieces: int) -> None:
        self.left, self.taken = pieces, 0
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self.left == 0:
            await asyncio.Event().wait()
        self.left, self.taken = self.left - 1, self.taken + 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def ask(self) -> None:
        scope = {"type": "http", "path": "/", "headers": [(b"content-length", b"1000000000")]}
        await asyncio.wait_for(Lingering(_refuse)(scope, self.receive, self.send), PATIENCE_S)
        assert [m.get("more_body") for m in self.sent] == [None, True, False]
        assert self.sent[1]["body"] == b"{}", "the answer is not held back, only its end"


async def test_who_never_ends_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_BYTES", 50_000)
    endless = Sender(10**9)
    await endless.ask()
    assert endless.taken == 50


@pytest.mark.parametrize("limit", ["LINGER_S", "SILENCE_S"])
async def test_who_falls_silent_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Either limit ends it: the other one is longer than the test waits."""
    for name in ("LINGER_S", "SILENCE_S"):
        monkeypatch.setattr(lingering, name, 0.05 if name == limit else 10 * PATIENCE_S)
    silent = Sender(3)
    await silent.ask()
    assert silent.taken == 3


async def test_the_application_gets_nothing_of_the_rest() -> None:
    """Serve's proxy goes on asking for messages, and would keep them. One that was read is not held up."""
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append((await receive())["type"])
        await _refuse(scope, receive, send)
        heard.append((await receive())["type"])

    bodies = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, False)]

    async def receive() -> Message:
        return bodies.pop(0)

    sender = Sender(0)
    scope = {"type": "http", "path": "/", "headers": [(b"content-length", b"2")]}
    await Lingering(app)(scope, receive, sender.send)
    assert (heard, bodies) == (["http.request", "http.disconnect"], [])
    bodies = [{"type": "http.request", "body": b"xx", "more_body": False}]
    heard, sender = [], Sender(0)
    await Lingering(_read_all)(scope, receive, sender.send)
    assert [m.get("more_body") for m in sender.sent] == [None, None], "passed on as it is"

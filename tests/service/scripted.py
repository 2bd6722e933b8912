"""The HTTP application over a backend that answers what a test says: no Ray, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from llm42.api.app import create_app
from llm42.api.backend import Status
from llm42.config import Settings
from llm42.protocol import Commit, Delta, Failure, FinishReason, Request, RequestStats, TokenLogprob, Window
from llm42.text.tokenizer import Tokenizer

SETTINGS = Settings()
MODEL = SETTINGS.model.name
Script = Callable[[Request], AsyncGenerator[Delta, None]]


class Scripted:
    """Answers with what `script` yields; notes the requests and whether each generator was closed."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[Request] = []
        self.closed = asyncio.Event()

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        try:
            async for delta in self._script(request):
                yield delta
        finally:
            self.closed.set()

    async def fingerprint(self, agreed: bool = False) -> tuple[str, Mapping[str, Any]]:
        return "f00d", {"weights": "w"}

    async def verify_cold(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        return [Failure(w.request_id, "scripted", "no verifier here") for w in windows]

    async def status(self, near: bool = False) -> Status:
        return Status(serving=True)


async def hello(request: Request) -> AsyncGenerator[Delta, None]:
    """Three pieces; the first has tokens but no text yet."""
    lp = [TokenLogprob(t, -0.1 * (i + 1) - 1e-9, ((t, -0.25),)) for i, t in enumerate((19556, 28, 905))]
    yield Delta((19556,), "", (lp[0],), fingerprint="f00d" if request.deterministic else None)
    yield Delta((28,), "Hello,", (lp[1],))
    stats = RequestStats(windows=2, verified_tokens=3) if request.deterministic else None
    yield Delta((905,), " world", (lp[2],), finish_reason=FinishReason.STOP, stats=stats)


@asynccontextmanager
async def client(
    tokenizer: Tokenizer, script: Script = hello, settings: Settings = SETTINGS
) -> AsyncIterator[tuple[httpx.AsyncClient, Scripted]]:
    backend = Scripted(script)
    transport = httpx.ASGITransport(create_app(settings, tokenizer, backend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http, backend


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hi", **fields}


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def assert_error(reply: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"}
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    return dict(error)


JSON = {"content-type": "application/json"}

"""Audits over HTTP for tests: the tiny model behind the application instead of Ray."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx

from llm42.api.app import create_app
from llm42.api.backend import Status
from llm42.config import Settings
from llm42.errors import VerifierUnavailable
from llm42.fingerprint import fingerprint
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.session.driver import Generator
from llm42.verifier.scheduler import Verifier
from tests.support import Lab

MANIFEST = {"device": {"threads": 1}}
FINGERPRINT = fingerprint(MANIFEST)
SECRET = b"0123456789abcdef"
ASK: dict[str, Any] = {"model": "tiny", "prompt": "hello there", "max_tokens": 12, "deterministic": True}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 9,
    "deterministic": True,
}


Exchange = dict[str, Any]
Change = Callable[[Exchange], Any]


def changed(kept: Exchange, change: Change) -> Exchange:
    """A copy of a record in which something is altered."""
    copy: Exchange = json.loads(json.dumps(kept))
    change(copy)
    return copy


def choice(record: Exchange) -> dict[str, Any]:
    """The first choice of a stored reply."""
    found: dict[str, Any] = record["response"]["choices"][0]
    return found


@dataclass
class LocalBackend:
    """llm42.api.backend.Backend in one process."""

    generator: Generator
    verifier: Verifier
    up: bool = True

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        async for delta in self.generator.generate(request):
            yield replace(delta, replica="replica-a", verifier="verifier-b" if request.deterministic else "")

    async def fingerprint(self, agreed: bool = False) -> tuple[str, dict[str, Any]]:
        if not self.up:
            raise VerifierUnavailable("No verifier is ready.")
        return FINGERPRINT, MANIFEST

    async def verify_cold(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        return await self.verifier.verify(windows, cold=True)

    async def status(self, near: bool = False) -> Status:
        return Status(serving=True)


@asynccontextmanager
async def client(lab: Lab, settings: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, LocalBackend]]:
    verifier = lab.verifier()
    verifier.fingerprint = FINGERPRINT
    backend = LocalBackend(lab.generator(lab.engine(corrupt_share=0.1), verifier.start()), verifier)
    transport = httpx.ASGITransport(create_app(settings, lab.tokenizer, backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
        yield http, backend


async def post(http: httpx.AsyncClient, path: str, body: Any, status: int = 200) -> Any:
    reply = await http.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def audit(http: httpx.AsyncClient, records: list[Any], **more: Any) -> list[dict[str, Any]]:
    reply = await post(http, "/v1/audit", {"records": records, **more})
    assert reply["fingerprint"] == FINGERPRINT
    results: list[dict[str, Any]] = reply["results"]
    return results

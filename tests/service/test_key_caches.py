"""What one key's requests leave in the caches is not found by another's; `cache_salt` of a client."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from llm42.api.app import create_app
from llm42.api.audit_routes import LimitedAnswers
from llm42.api.keys import KeyPolicy
from llm42.api.plan import plan_request
from llm42.api.requests import CompletionBody
from llm42.config import Settings
from llm42.protocol import Delta, Request
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import Scripted, completion, hello

KEYS = {"first": "key one of sixteen bytes", "second": "key two of sixteen bytes"}
DIGESTS = [hashlib.sha256(key.encode()).hexdigest() for key in KEYS.values()]
TREE = {"server": {"api_keys": [{"name": "same", "sha256": digest} for digest in DIGESTS]}}
KEYED, OPEN = Settings.load(TREE), Settings()


def salts(tokenizer: Tokenizer, settings: Settings, *asked: tuple[str, dict[str, Any]]) -> list[str]:
    """What the backend is given as a salt for each request of (key, more fields)."""

    async def run() -> list[str]:
        backend = Scripted(hello)
        transport = httpx.ASGITransport(create_app(settings, tokenizer, backend))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for key, fields in asked:
                headers = {"Authorization": f"Bearer {KEYS.get(key, '')}"}
                reply = await http.post("/v1/completions", json=completion(**fields), headers=headers)
                assert reply.status_code == 200, reply.text
        return [request.cache_salt for request in backend.requests]

    return asyncio.run(run())


def test_each_key_has_caches_of_its_own(tokenizer: Tokenizer) -> None:
    """Also two keys of one name; a client's salt separates further, and does not reach another key's."""
    salted = {"cache_salt": "s"}
    first, again, second, own, others = salts(
        tokenizer, KEYED, ("first", {}), ("first", {}), ("second", {}), ("first", salted), ("second", salted)
    )
    assert first == again
    assert len({first, second, own, others}) == 4
    assert all((first, second, own, others)), "none of them is the shared one"
    (forged,) = salts(tokenizer, KEYED, ("second", {"cache_salt": first}))
    assert forged not in (first, second)
    assert DIGESTS[0] not in (first, own), "what is configured of a key does not travel"


def test_without_keys_all_share_unless_they_say_otherwise(tokenizer: Tokenizer) -> None:
    plain = ("", {})
    assert salts(tokenizer, OPEN, plain, plain, ("", {"cache_salt": "s"})) == ["", "", "s"]


@pytest.mark.parametrize("wrong", ["", "x" * 1025, 7, ["s"], "\ud800"])
def test_a_wrong_salt_is_refused_by_name(tokenizer: Tokenizer, wrong: Any) -> None:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(OPEN, tokenizer, Scripted(hello)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post("/v1/completions", content=json.dumps(completion(cache_salt=wrong)))

    reply = asyncio.run(run())
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "cache_salt"


def test_the_salt_is_all_that_it_changes(tokenizer: Tokenizer) -> None:
    """Prompt, sampling, seeds: what a request says is the same."""
    fields = completion(n=2, deterministic=True, temperature=0.7)
    with_salt, without = (
        plan_request(CompletionBody.model_validate(fields | more), OPEN, tokenizer).requests
        for more in ({"cache_salt": "s"}, {})
    )
    for a, b in zip(with_salt, without, strict=True):
        different = {name for name in Request.__dataclass_fields__ if getattr(a, name) != getattr(b, name)}
        assert different == {"request_id", "cache_salt"}


def test_an_audit_generates_within_its_keys_caches() -> None:
    """An answer that is generated again is a request of the key like any other."""
    asked: list[Request] = []

    async def note(request: Request) -> AsyncGenerator[Delta, None]:
        asked.append(request)
        yield Delta((1,), "")

    policy = KeyPolicy(KEYED.server.api_keys[0], KEYED)

    async def run() -> None:
        answers = LimitedAnswers(Scripted(note), policy, asyncio.Semaphore(1), asyncio.Semaphore(1))
        async for _ in answers.generate(Request("r", (1, 2), 1)):
            pass

    asyncio.run(run())
    assert [r.cache_salt for r in asked] == [policy.salted(Request("r", (1, 2), 1)).cache_salt]
    assert asked[0].cache_salt

"""API keys, their rights, and the header that asks for determinism: over a scripted backend."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from llm42.api import keys as policy
from llm42.config import Settings
from llm42.protocol import Delta, FinishReason, Request
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import assert_error, chat, client, completion
from tests.support import until

KEYS = {"full": {}, "never": {"deterministic_share": 0}, "half": {"deterministic_share": 0.5},
        "always": {"deterministic_default": True}, "little": {"deterministic_share": 0.06}}  # fmt: skip


def settings_of(**server: Any) -> Settings:
    keys = [
        {"name": name, "sha256": hashlib.sha256(f"key-{name}".encode()).hexdigest(), **more}
        for name, more in KEYS.items()
    ]
    return Settings.load({"server": {"api_keys": keys, **server}, "engine": {"max_batch": 4}})


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-{name}"}


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "key-full"},
     {"Authorization": "Basic key-full"},
     {"Authorization": "Bearer " + hashlib.sha256(b"key-full").hexdigest()}, {"Authorization": "Bearer é"}],
)  # fmt: skip
async def test_without_a_valid_key_only_health_and_version_answer(
    tokenizer: Tokenizer, headers: dict[str, str]
) -> None:
    raw = {k: v.encode() for k, v in headers.items()}
    async with client(tokenizer, settings=settings_of()) as (http, backend):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/audit"):
            reply = await http.post(path, json=completion(), headers=raw)
            assert assert_error(reply, 401, None)["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
        assert (await http.get("/v1/models", headers=raw)).status_code == 401
        assert (await http.get("/health", headers=raw)).status_code == 200
        assert (await http.get("/version", headers=raw)).status_code == 200
        assert backend.requests == []
        assert (await http.get("/v1/models", headers=bearer("full"))).status_code == 200


async def test_no_keys_configured_nobody_is_asked(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, _):
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.get("/v1/models", headers=bearer("any"))).status_code == 200


async def test_keys_are_compared_in_constant_time_and_all_of_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's comparison is called for every key, whether or not one has fitted already."""
    seen: list[bool] = []
    real = policy.hmac.compare_digest
    monkeypatch.setattr(policy.hmac, "compare_digest", lambda a, b: seen.append(real(a, b)) or seen[-1])
    async with client(tokenizer, settings=settings_of()) as (http, _):
        await http.get("/v1/models", headers=bearer("full"))
        assert seen == [True, False, False, False, False]


async def test_who_gets_determinism(tokenizer: Tokenizer) -> None:
    """The body or the header, else the key's default, else the server's."""
    for server_default in (False, True):
        settings = settings_of(deterministic_default=server_default)
        async with client(tokenizer, settings=settings) as (http, backend):

            async def ask(key: str, header: str | None = None, **fields: Any) -> Any:
                headers = bearer(key) | ({} if header is None else {policy.HEADER: header})
                reply = await http.post("/v1/chat/completions", json=chat(**fields), headers=headers)
                return backend.requests[-1].deterministic if reply.status_code == 200 else reply

            assert await ask("full") is server_default
            assert await ask("always") is True
            assert await ask("always", deterministic=False) is False
            assert await ask("full", "true") is True
            assert await ask("full", " 0 ") is False
            assert await ask("full", "True", is_deterministic=True) is True
            assert_error(await ask("full", "false", deterministic=True), 400, policy.HEADER)
            assert_error(await ask("full", "maybe"), 400, policy.HEADER)
            assert_error(await ask("never", deterministic=True), 403, None)
            assert await ask("never", deterministic=False) is False


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_has_its_share_of_the_places(tokenizer: Tokenizer, stream: bool) -> None:
    """Half of four places: a third output waits for nobody and is refused; others' keys, and best effort, are
    not; what has ended, or was left, counts no more."""
    release = asyncio.Event()

    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        yield Delta((7,), "a")
        if request.deterministic:
            await release.wait()
        yield Delta((8,), "b", finish_reason=FinishReason.STOP)

    async with client(tokenizer, script, settings_of()) as (http, backend):

        async def ask(key: str, **fields: Any) -> Any:
            body = chat(stream=stream, **fields)
            return await http.post("/v1/chat/completions", json=body, headers=bearer(key))

        held = asyncio.create_task(ask("half", deterministic=True, n=2))
        while len(backend.requests) < 2:
            await asyncio.sleep(0.01)
        refusal = await ask("half", deterministic=True)
        assert_error(refusal, 429, None)
        assert refusal.headers["retry-after"]
        assert (await ask("half")).status_code == 200
        release.set()
        assert (await ask("full", deterministic=True)).status_code == 200
        assert (await held).status_code == 200
        assert (await ask("half", deterministic=True, n=2)).status_code == 200


async def test_a_request_of_more_outputs_than_the_share_is_told_how_many_it_may_have(
    tokenizer: Tokenizer,
) -> None:
    """No 429: it would be sent again for ever. Half of four places is two outputs, and 0.06 of them one."""
    async with client(tokenizer, settings=settings_of()) as (http, backend):

        async def ask(key: str, **fields: Any) -> Any:
            return await http.post(
                "/v1/completions", json=completion(deterministic=True, **fields), headers=bearer(key)
            )

        for key, most, over in (("half", 2, 3), ("little", 1, 2)):
            refusal = assert_error(await ask(key, n=over), 400, "n")
            assert f"may have {most} at a time" in refusal["message"]
            assert_error(await ask(key, prompt=["a"] * over), 400, "n")
            assert backend.requests == []
            assert (await ask(key, n=most)).status_code == 200
            assert len(backend.requests) == most
            backend.requests.clear()
        assert (await ask("full", n=4)).status_code == 200
        over_all = {"n": 16, "deterministic": False}
        assert (
            await http.post("/v1/completions", json=completion(**over_all), headers=bearer("little"))
        ).is_success


@pytest.mark.parametrize(
    ("share", "most"), [(0.0, 0), (0.06, 1), (1.0, 1), (1.92, 1), (2.0, 2), (0.29 * 100, 29), (32.0, 32)]
)
def test_whole_outputs_of_a_share(share: float, most: int) -> None:
    assert policy._most(share) == most


async def test_control_without_the_count_all_are_let_in(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests as above, all at once, with the share taken as the whole: nothing is refused."""
    release = asyncio.Event()

    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        await release.wait()
        yield Delta((8,), "b", finish_reason=FinishReason.STOP)

    async def refused() -> int:
        release.clear()
        async with client(tokenizer, script, settings_of()) as (http, backend):
            calls = [
                asyncio.create_task(
                    http.post("/v1/completions", json=completion(deterministic=True), headers=bearer("half"))
                )
                for _ in range(4)
            ]
            await until(lambda: len(backend.requests) + sum(c.done() for c in calls) == 4)
            release.set()
            return sum(reply.status_code == 429 for reply in await asyncio.gather(*calls))

    assert await refused() == 2
    monkeypatch.setattr(policy, "_most", lambda _: 10**9)
    assert await refused() == 0

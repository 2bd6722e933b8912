"""Paths with slashes too many, methods beside the meant ones, pages of other origins, compressed bodies, and
the page of the documentation."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from llm42.api.app import create_app
from llm42.api.backend import Status
from llm42.api.json_bodies import most_bytes
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import JSON, MODEL, SETTINGS, Scripted, assert_error, client, completion, hello

GETS = [
    "/health",
    "/metrics",
    "/version",
    "/docs",
    "/openapi.json",
    "/v1/models",
    f"/v1/models/{MODEL}",
    "/v1/fingerprint",
]
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/audit"]
PAGE = "https://chat.example.org"
KEYED: dict[str, Any] = {"api_keys": [{"name": "k", "sha256": hashlib.sha256(b"right").hexdigest()}]}
RIGHT = {"Authorization": "Bearer right"}


def settings_of(**server: Any) -> Settings:
    return Settings.load({"server": server})


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("path", [*GETS, *POSTS])
async def test_slashes_do_not_make_another_path(tokenizer: Tokenizer, path: str, keyed: bool) -> None:
    """At the end, and two for one, as a joined base URL has them: the same answer, whoever asks."""
    wrong: dict[str, Any] = {"nothing": 1}
    async with client(tokenizer, settings=settings_of(**(KEYED if keyed else {}))) as (http, _):

        async def ask(path: str) -> Any:
            url = f"http://test{path}"
            return await (
                http.get(url) if path.rstrip("/").replace("//", "/") in GETS else http.post(url, json=wrong)
            )

        want = await ask(path)
        assert want.status_code != 404
        for other in (f"{path}/", f"{path}//", f"/{path}"):
            got = await ask(other)
            assert (got.status_code, got.content) == (want.status_code, want.content), other


async def test_the_list_of_models_with_a_slash(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, _):
        assert (await http.get("/v1/models/")).json()["data"][0]["id"] == MODEL
        assert (await http.get(f"/v1/models/{MODEL}/")).json()["id"] == MODEL
        assert_error(await http.get("/v1/models/other/"), 404, "model")


@pytest.mark.parametrize("path", GETS)
async def test_head_is_get_without_the_body(tokenizer: Tokenizer, path: str) -> None:
    async with client(tokenizer) as (http, _):
        whole, head = await http.get(path), await http.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
        assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("path", [*GETS, *POSTS])
async def test_other_methods_say_which_there_are(tokenizer: Tokenizer, path: str, keyed: bool) -> None:
    """405 with Allow, and OPTIONS answered with it; a key does not come into it."""
    allowed = "GET, HEAD, OPTIONS" if path in GETS else "POST, OPTIONS"
    async with client(tokenizer, settings=settings_of(**(KEYED if keyed else {}))) as (http, backend):
        for method in ("PUT", "DELETE", "PATCH", "TRACE", "POST" if path in GETS else "GET"):
            reply = await http.request(method, path)
            assert allowed in assert_error(reply, 405, None)["message"]
            assert reply.headers["allow"] == allowed
        if path in POSTS:
            head = await http.head(path)
            assert (head.status_code, head.headers["allow"]) == (405, allowed)
        options = await http.options(path)
        assert (options.status_code, options.headers["allow"], options.content) == (204, allowed, b"")
        assert "access-control-allow-origin" not in options.headers
        assert backend.requests == []


async def test_an_unknown_path_is_one_whatever_the_method(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, _):
        for method in ("GET", "POST", "PUT", "OPTIONS"):
            assert_error(await http.request(method, "/v1/nothing"), 404, None)
    async with client(tokenizer, settings=settings_of(**KEYED)) as (http, _):
        for method in ("GET", "POST", "PUT", "OPTIONS"):
            assert_error(await http.request(method, "/v1/nothing"), 401, None)


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


async def test_pages_of_configured_origins_may_use_the_api(tokenizer: Tokenizer) -> None:
    """The preflight has no key and needs none; answers, refusals and streams carry the headers."""
    async with client(tokenizer, settings=settings_of(cors_origins=[PAGE], **KEYED)) as (http, _):
        asked = await http.options("/v1/completions", headers={"Origin": PAGE, **PREFLIGHT})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert {"GET", "POST"} <= set(asked.headers["access-control-allow-methods"].split(", "))
        assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
        assert asked.headers["x-request-id"]
        for headers, status in ((RIGHT, 200), ({}, 401)):
            for stream in (False, True):
                reply = await http.post(
                    "/v1/completions", json=completion(stream=stream), headers={"Origin": PAGE, **headers}
                )
                assert reply.status_code == status
                assert reply.headers["access-control-allow-origin"] == PAGE
                assert "X-LLM42-Request" in reply.headers["access-control-expose-headers"]
        assert "origin" in reply.headers["vary"].lower()
        lost = await http.get("/v1/nothing", headers={"Origin": PAGE, **RIGHT})
        assert (lost.status_code, lost.headers["access-control-allow-origin"]) == (404, PAGE)


async def test_pages_of_other_origins_may_not(tokenizer: Tokenizer) -> None:
    other = {"Origin": "https://evil.example.org"}
    async with client(tokenizer, settings=settings_of(cors_origins=[PAGE])) as (http, _):
        assert_error(await http.options("/v1/completions", headers={**other, **PREFLIGHT}), 400, "Origin")
        reply = await http.post("/v1/completions", json=completion(), headers=other)
        assert "access-control-allow-origin" not in reply.headers
    async with client(tokenizer) as (http, _):
        reply = await http.options("/v1/completions", headers={"Origin": PAGE, **PREFLIGHT})
        assert not any(name.startswith("access-control") for name in reply.headers)
        reply = await http.get("/v1/models", headers={"Origin": PAGE})
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize(
    "origin", ["chat.example.org", f"{PAGE}/", f"{PAGE}/app", "", "https://*.example.org"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="cors_origins"):
        settings_of(cors_origins=[origin])
    assert settings_of(cors_origins=["*", PAGE, "http://localhost:3000", "app://obsidian.md"])


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "gzip, gzip"])
async def test_a_compressed_body_is_refused_by_name(tokenizer: Tokenizer, encoding: str) -> None:
    data = gzip.compress(json.dumps(completion()).encode())
    async with client(tokenizer) as (http, backend):
        for path in POSTS:
            reply = await http.post(path, content=data, headers={**JSON, "Content-Encoding": encoding})
            assert encoding in assert_error(reply, 415, "Content-Encoding")["message"]
            assert reply.headers["accept-encoding"] == "identity"
        plain = {**JSON, "Content-Encoding": "identity"}
        assert (await http.post("/v1/completions", json=completion(), headers=plain)).status_code == 200
        assert len(backend.requests) == 1


async def test_the_documentation_needs_no_other_host(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, _):
        page = await http.get("/docs")
        document = (await http.get("/openapi.json")).json()
        assert (await http.get("/redoc")).status_code == 404
        assert (await http.get("/docs/oauth2-redirect")).status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page.text) == ["openapi.json"]
    assert not re.search(r"https?://|//[a-z]|<script|<link|<img|@import", page.text)
    for path in document["paths"]:
        assert f" {path}</code>" in page.text
    for field in ("messages", "prompt", "deterministic", "stop_token_ids", "receipt"):
        assert f"<code>{field}</code>" in page.text
    assert "/docs" not in document["paths"]
    assert SETTINGS.model.name not in page.text


@pytest.mark.parametrize("root", ["", "/llm"])
async def test_under_a_route_prefix(tokenizer: Tokenizer, root: str) -> None:
    """A server that mounts the application puts its prefix in front of the path: which pages need no key, and
    how long an audit may be, are the same."""
    app = create_app(settings_of(root_path=root, **KEYED), tokenizer, Scripted(hello))
    transport = httpx.ASGITransport(app, root_path="/prefix")
    most = most_bytes(SETTINGS, tokenizer.longest_token)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://test/prefix{root}") as http:
        for path in ("version", "version/", "docs", "openapi.json"):
            assert (await http.get(path)).status_code == 200, path
        assert (await http.get("v1/models")).status_code == 401
        assert (await http.get("v1/models", headers=RIGHT)).status_code == 200
        long = b'{"records": [{}]}' + b" " * most
        assert (await http.post("v1/audit", content=long, headers={**JSON, **RIGHT})).status_code == 200
        refused = await http.post("v1/completions", content=long, headers={**JSON, **RIGHT})
        assert refused.status_code == 413


@pytest.mark.parametrize("ready", [1, 0], ids=["ready", "control"])
async def test_the_readmes_loop_ends_when_deterministic_answers_are_ready(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, ready: int
) -> None:
    """It looks for words in the reply of /health, as it is sent. The control: best effort only."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (words,) = re.findall(r"^until curl -s \S+/health \| grep -q '([^']+)'; do sleep 1; done$", readme, re.M)

    async def status(_: Scripted, near: bool = False) -> Status:
        return Status(serving=True, verifiers_ready=ready, verifiers=1)

    monkeypatch.setattr(Scripted, "status", status)
    async with client(tokenizer) as (http, _):
        assert (words in (await http.get("/health")).text) == bool(ready)

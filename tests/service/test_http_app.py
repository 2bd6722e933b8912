"""The HTTP application alone: request rules, error shapes, chunk framing. Each test scripts the backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import pytest

from llm42.api import render
from llm42.api.app import create_app
from llm42.api.deltas import merge
from llm42.api.plan import plan_request
from llm42.api.requests import CompletionBody
from llm42.errors import Overloaded, RequestRejected, VerifierUnavailable
from llm42.protocol import Delta, FinishReason, Request
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import (
    JSON,
    MODEL,
    SETTINGS,
    Script,
    Scripted,
    assert_error,
    chat,
    client,
    completion,
    events,
)
from tests.support import PATIENCE_S

LONG = SETTINGS.model.max_model_len
REFUSED = [
    (completion(max_tokens=0), 400, "max_tokens"),
    (completion(max_tokens=-5), 400, "max_tokens"),
    (completion(max_tokens="16"), 400, "max_tokens"),
    (completion(max_tokens=1.5), 400, "max_tokens"),
    (completion(max_tokens=LONG), 400, "max_tokens"),
    (completion(min_tokens=9, max_tokens=8), 400, "min_tokens"),
    (completion(temperature=-0.1), 400, "temperature"),
    (completion(temperature="hot"), 400, "temperature"),
    (completion(top_p=0), 400, "top_p"),
    (completion(top_p=1.01), 400, "top_p"),
    (completion(min_p=-0.1), 400, "min_p"),
    (completion(top_k=-2), 400, "top_k"),
    (completion(n=0), 400, "n"),
    (completion(n=1000), 400, "n"),
    (completion(seed=2**64), 400, "seed"),
    (completion(seed=-(2**63) - 1), 400, "seed"),
    (completion(seed="7"), 400, "seed"),
    (completion(presence_penalty=2.5), 400, "presence_penalty"),
    (completion(logit_bias={"word": 1}), 400, "logit_bias"),
    (completion(logit_bias={"99999999": 1}), 400, "logit_bias"),
    (completion(logit_bias={"5": 1, "05": 2}), 400, "logit_bias"),
    (completion(stop=[""]), 400, "stop"),
    (completion(stop=["x"] * 1000), 400, "stop"),
    (completion(stop_token_ids=[10**9]), 400, "stop_token_ids"),
    (completion(logprobs=1000), 400, "logprobs"),
    (completion(stream="yes"), 400, "stream"),
    (completion(deterministic="true"), 400, "deterministic"),
    (completion(deterministic=True, is_deterministic=False), 400, "is_deterministic"),
    (completion(prompt=""), 400, "prompt"),
    (completion(prompt=[]), 400, "prompt"),
    (completion(prompt=[[]]), 400, "prompt"),
    (completion(prompt=["a", ""]), 400, "prompt"),
    (completion(prompt=[10**6]), 400, "prompt"),
    (completion(prompt=[-1]), 400, "prompt"),
    (completion(prompt=[1] * LONG), 400, "prompt"),
    (completion(prompt={"a": 1}), 400, "prompt"),
    (completion(prompt="\ud800"), 400, "prompt"),
    (completion(prompt=["a"] * 64, n=16), 400, "prompt"),
    (completion(prompt="word " * 10**5), 400, "prompt"),
    (completion(echo="yes"), 400, "echo"),
    (chat(echo=True), 400, "echo"),
    (completion(prompt_logprobs=21), 400, "prompt_logprobs"),
    (completion(suffix="end"), 400, "suffix"),
    (completion(best_of=3), 400, "best_of"),
    (completion(some_new_sampler=0.5), 400, "some_new_sampler"),
    (completion(model="gpt-5"), 404, "model"),
    (completion(model="\ud800"), 404, "model"),
    ({"prompt": "Hi"}, 400, "model"),
    ({"model": MODEL}, 400, "prompt"),
    (chat(messages=[]), 400, "messages"),
    (chat(messages=[{"role": "user", "content": "\ud800"}]), 400, "messages"),
    (chat(messages=[{"role": "wizard", "content": "x"}]), 400, "messages"),
    (chat(messages=[{"role": "user"}]), 400, "messages"),
    (chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), 400, "messages"),
    (chat(messages=[{"role": "user", "content": "word " * LONG}]), 400, "messages"),
    (chat(top_logprobs=3), 400, "top_logprobs"),
    (chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    (chat(response_format={"type": "json_object"}), 400, "response_format"),
    (chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    (chat(max_completion_tokens=LONG), 400, "max_completion_tokens"),
    (chat(messages=[{"role": "user", "content": "x", "name": "\ud800"}]), 400, "messages"),
    (chat(messages=[{"role": "user", "content": "x", "name": "n" * 10**6}]), 400, "messages"),
    (chat(model="gpt-5"), 404, "model"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "status", "param"), REFUSED, ids=lambda v: json.dumps(v)[:60])
async def test_wrong_requests_are_refused_before_any_token(
    tokenizer: Tokenizer, body: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    """A 4xx with OpenAI's error object, also when a stream was asked for; the backend sees nothing."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client(tokenizer) as (http, backend):
        reply = await http.post(path, content=json.dumps({"stream": stream} | body), headers=JSON)
        assert_error(reply, status, param)
        assert backend.requests == []


def test_a_hopelessly_long_text_is_not_encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding megabytes takes seconds; spaces, which a template may strip, are encoded all the same."""
    encoded: list[int] = []
    monkeypatch.setattr(Tokenizer, "encode", lambda _, text, **__: encoded.append(len(text)) or [1])
    with pytest.raises(RequestRejected, match="cannot fit"):
        plan_request(CompletionBody(**completion(prompt="word " * 10**6)), SETTINGS, tokenizer)
    assert encoded == []
    plan_request(CompletionBody(**completion(prompt=" " * 10**6)), SETTINGS, tokenizer)
    assert encoded == [10**6]


@pytest.mark.parametrize("stream", [True, False])
def test_a_replica_is_told_whether_the_client_reads_along(stream: bool, tokenizer: Tokenizer) -> None:
    (request,) = plan_request(CompletionBody(**completion(stream=stream)), SETTINGS, tokenizer).requests
    assert request.stream is stream


@pytest.mark.parametrize("text", ["{", "", "[1]", "null", '"x"', '{"model": NaN', "[" * 5000, b"\xff\xfe"])
async def test_bodies_that_are_no_json_object(tokenizer: Tokenizer, text: str | bytes) -> None:
    async with client(tokenizer) as (http, _):
        reply = await http.post("/v1/chat/completions", content=text, headers=JSON)
        assert reply.status_code == 400, reply.text
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_not_a_number_is_refused(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, _):
        text = json.dumps(completion(temperature=float("nan")))
        assert_error(await http.post("/v1/completions", content=text, headers=JSON), 400, "temperature")


async def test_unknown_paths_and_methods(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, _):
        assert_error(await http.get("/v1/nothing"), 404, None)
        assert_error(await http.get("/v1/completions"), 405, None)
        assert_error(await http.get("/v1/models/other"), 404, "model")
        assert (await http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL


@pytest.mark.parametrize("announced", [True, False])
async def test_bodies_over_the_limit(tokenizer: Tokenizer, announced: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * (1 << 20)

    async with client(tokenizer) as (http, _):
        body = b" " * (9 << 20) if announced else pieces()
        assert_error(await http.post("/v1/completions", content=body, headers=JSON), 413, None)


async def test_harmless_and_neutral_fields_are_ignored(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, backend):
        body = chat(user="me", metadata={"a": "b"}, tools=None, response_format={"type": "text"}, store=True)
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        nulls = dict.fromkeys(
            ("temperature", "top_p", "n", "seed", "stop", "logit_bias", "stream", "max_tokens")
        )
        assert (await http.post("/v1/completions", json=completion(**nulls))).status_code == 200
        assert backend.requests[1].max_tokens == 16
        assert backend.requests[1].sampling.temperature == 1.0


async def test_what_reaches_the_backend(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, backend):
        body = completion(
            prompt=[[1, 2], [3]], n=2, seed=-1, is_deterministic=True, top_k=-1, stop="x", stop_token_ids=[7],
            min_tokens=3, logit_bias={"9": -1, "2": 5}, max_tokens=5, logprobs=0,
        )  # fmt: skip
        reply = await http.post("/v1/completions", json=body)
        assert [c["index"] for c in reply.json()["choices"]] == [0, 1, 2, 3]
        assert reply.json()["llm42"]["seed"] == -1
        a, b, c, d = backend.requests
        assert (a.prompt, b.prompt, c.prompt) == ((1, 2), (1, 2), (3,))
        assert a.sampling.seed == c.sampling.seed == 2**64 - 1
        assert b.sampling.seed == d.sampling.seed != a.sampling.seed
        assert len({r.request_id for r in backend.requests}) == 4
        assert all(r.deterministic and r.stop == ("x",) and r.num_logprobs == 0 for r in backend.requests)
        assert a.sampling.top_k == 0
        assert a.sampling.logit_bias == ((2, 5.0), (9, -1.0))
        assert a.stop_token_ids == (7, *tokenizer.eos_token_ids)
        assert set(a.sampling.min_tokens_banned) == {7, *tokenizer.eos_token_ids}


async def test_seeds(tokenizer: Tokenizer) -> None:
    """Best effort draws a fresh seed, determinism has a documented one; both are echoed."""
    async with client(tokenizer) as (http, backend):
        echoed = []
        for fields in ({"deterministic": True}, {}, {}, {"seed": 0}, {"ignore_eos": True}):
            reply = await http.post("/v1/chat/completions", json=chat(**fields))
            echoed.append(reply.json()["llm42"]["seed"])
        assert echoed == [r.sampling.seed for r in backend.requests]
        assert echoed[0] == SETTINGS.server.default_seed
        assert echoed[1] != echoed[2]
        assert echoed[3] == 0
        assert backend.requests[4].stop_token_ids == ()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_joined_stream_is_the_whole_reply(tokenizer: Tokenizer, path: str) -> None:
    """Text, log-probabilities and ids are the same floats; no empty chunk comes first."""
    is_chat = "chat" in path
    body = chat(logprobs=True, top_logprobs=1) if is_chat else completion(logprobs=1)
    body |= {"return_token_ids": True, "deterministic": True}
    async with client(tokenizer) as (http, _):
        whole = (await http.post(path, json=body)).json()
        streamed = await http.post(
            path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
        assert streamed.headers["content-type"].startswith("text/event-stream")
        chunks = events(streamed.text)
    *parts, usage = chunks
    choices = [p["choices"][0] for p in parts]
    texts = [c["delta"].get("content") if is_chat else c["text"] for c in choices]
    message = whole["choices"][0]
    assert texts[0] == "Hello,"
    assert "".join(texts) == (message["message"]["content"] if is_chat else message["text"]) == "Hello, world"
    assert [c["finish_reason"] for c in choices] == [None, "stop"]
    assert [t for c in choices for t in c["token_ids"]] == message["token_ids"] == [19556, 28, 905]
    if is_chat:
        assert choices[0]["delta"]["role"] == "assistant"
        joined: Any = [e for c in choices for e in c["logprobs"]["content"]]
        assert joined == message["logprobs"]["content"]
        assert joined[0]["logprob"] == -0.1 - 1e-9
    else:
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [e for c in choices for e in c["logprobs"][key]] == message["logprobs"][key]
    assert {c["system_fingerprint"] for c in chunks} == {whole["system_fingerprint"]} == {"f00d"}
    assert "llm42" not in parts[0]
    assert parts[-1]["llm42"] == usage["llm42"] == whole["llm42"]
    assert whole["llm42"]["windows"] == 2
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("wants_ids", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_tokens_without_text_are_sent(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, wants_ids: bool
) -> None:
    """A model that repeats its end token under ignore_eos: chunks come all the same, and joining those that
    wait is linear work."""
    count, merged = 400, 0

    async def silent(request: Request) -> AsyncGenerator[Delta, None]:
        yield Delta((5,), "a")
        for i in range(count):
            yield Delta((i,), "")
        yield Delta((6,), "b", finish_reason=FinishReason.STOP)

    def counted(deltas: Sequence[Delta]) -> Delta:
        nonlocal merged
        merged += len(deltas)
        return merge(deltas)

    monkeypatch.setattr(render, "merge", counted)
    body = (chat if "chat" in path else completion)(
        stream=True, stream_options={"include_usage": True}, return_token_ids=wants_ids, max_tokens=900
    )
    async with client(tokenizer, silent) as (http, _):
        *chunks, usage = events((await http.post(path, json=body)).text)
    choices = [c["choices"][0] for c in chunks]
    texts = [c["delta"].get("content", "") if "chat" in path else c["text"] for c in choices]
    assert texts == ["a", *[""] * (count // render.MAX_WAITING), "b"]
    assert merged == count + 2
    assert usage["usage"]["completion_tokens"] == count + 2
    if wants_ids:
        assert [t for c in choices for t in c["token_ids"]] == [5, *range(count), 6]
    assert [c["finish_reason"] for c in choices] == [*[None] * (len(choices) - 1), "stop"]


def failing(error: Exception, after: int) -> Script:
    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        for i in range(after):
            yield Delta((i,), "a")
        raise error

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (VerifierUnavailable("none is ready"), 503, True),
        (Overloaded("full"), 429, True),
        (RuntimeError("secret internals"), 500, False),
    ],
)
async def test_errors_before_the_first_token_have_a_status(
    tokenizer: Tokenizer, error: Exception, status: int, retry: bool, stream: bool
) -> None:
    async with client(tokenizer, failing(error, 0)) as (http, _):
        reply = await http.post("/v1/chat/completions", json=chat(stream=stream))
        shape = assert_error(reply, status, None)
        assert ("retry-after" in reply.headers) == retry
        assert "secret" not in shape["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_choices_of_one_reply_have_one_fingerprint(tokenizer: Tokenizer, stream: bool) -> None:
    """Two verifiers' fingerprints in one reply: an error, never a reply that names only one of them."""

    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        number = request.request_id.rsplit("-", 1)[1]
        yield Delta((905,), " world", fingerprint=f"llm42-{number}", finish_reason=FinishReason.STOP)

    async with client(tokenizer, script) as (http, _):
        reply = await http.post("/v1/completions", json=completion(n=2, deterministic=True, stream=stream))
        if stream:
            assert "fingerprints" in reply.text
            assert "verifier_unavailable" in reply.text
        else:
            assert reply.status_code == 503
        same = await http.post("/v1/completions", json=completion(n=1, deterministic=True))
        assert same.json()["system_fingerprint"] == "llm42-0"


async def test_errors_in_a_stream_are_an_event(tokenizer: Tokenizer) -> None:
    async with client(tokenizer, failing(VerifierUnavailable("it died"), 2)) as (http, _):
        reply = await http.post("/v1/chat/completions", json=chat(stream=True, n=2))
        assert reply.status_code == 200
        last = events(reply.text)[-1]
        assert last["error"]["message"] == "it died"
        assert last["error"]["code"] == "verifier_unavailable"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 3])
async def test_a_client_that_leaves_ends_its_request(tokenizer: Tokenizer, stream: bool, after: int) -> None:
    """Whether or not a token was sent, the backend's generator is closed."""
    sent, reached = asyncio.Event(), asyncio.Event()

    async def endless(request: Request) -> AsyncGenerator[Delta, None]:
        for i in range(after):
            yield Delta((i,), "a")
        reached.set()
        await asyncio.Event().wait()

    backend = Scripted(endless)
    app = create_app(SETTINGS, tokenizer, backend)
    body = json.dumps(chat(stream=stream)).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await reached.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.set()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "scheme": "http", "server": ("test", 80),
        "client": ("test", 1), "http_version": "1.1", "root_path": "", "asgi": {"version": "3.0"},
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), PATIENCE_S)  # type: ignore[arg-type]
    await asyncio.wait_for(backend.closed.wait(), PATIENCE_S)

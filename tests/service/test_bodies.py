"""What a client is told of a body that cannot be read, or has fields that are not known or disagree."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import JSON, assert_error, chat, client, completion

DEEP = b'{"model": ' + b"[" * 100_000
DIGITS = b'{"model": "x", "seed": ' + b"9" * 5000 + b"}"
UNREADABLE: list[tuple[bytes, str, str]] = [
    (b"", "The body is empty; a JSON object is needed.", "invalid_json"),
    (b'{"model": "x", "prompt": "\xff"}', "not valid UTF-8: invalid start byte at byte 26", "invalid_json"),
    ('{"model": "x", "prompt": "a"}'.encode("utf-16"), "not valid UTF-8: ", "invalid_json"),
    (b'{"model": "x",}', "not valid JSON: ", "invalid_json"),
    (b'{"model": "x",}', " at position 1", "invalid_json"),
    (DEEP, "nested too deeply", "invalid_json"),
    (DIGITS, "too many digits", "invalid_json"),
    (b"[1]", "must be a JSON object", "invalid_value"),
    (b'"text"', "must be a JSON object", "invalid_value"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/audit"])
@pytest.mark.parametrize(("body", "said", "code"), UNREADABLE, ids=lambda v: str(v)[:30])
async def test_an_unreadable_body_is_told_why(
    tokenizer: Tokenizer, path: str, body: bytes, said: str, code: str
) -> None:
    async with client(tokenizer) as (http, _):
        error = assert_error(await http.post(path, content=body, headers=JSON), 400, None)
    assert said in error["message"]
    assert error["code"] == code


async def test_the_content_type(tokenizer: Tokenizer) -> None:
    """Without one a body is JSON; with another one the client is told so (curl -d sends a form's)."""
    text = json.dumps(completion())
    async with client(tokenizer) as (http, _):
        assert (await http.post("/v1/completions", content=text)).status_code == 200
        form = {"content-type": "application/x-www-form-urlencoded"}
        error = assert_error(await http.post("/v1/completions", content=text, headers=form), 400, None)
    assert (
        "Content-Type must be application/json, not 'application/x-www-form-urlencoded'" in error["message"]
    )


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/completions", completion(some_new_sampler=1), "some_new_sampler", "Unknown field"),
        ("/v1/completions", completion(messages=[1]), "messages", "another endpoint"),
        ("/v1/completions", completion(best_of=3), "best_of", "not supported with this value"),
        ("/v1/chat/completions", chat(top_b=1), "top_b", "Unknown field"),
        ("/v1/chat/completions", chat(temprature=1), "temprature", "nearest field here is 'temperature'"),
        ("/v1/completions", completion(max_token=1), "max_token", "nearest field here is 'max_tokens'"),
        (
            "/v1/chat/completions",
            chat(max_tokens=5, max_completion_tokens=6),
            "max_completion_tokens",
            "disagree",
        ),
    ],
)
async def test_fields_that_are_unknown_or_disagree(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    async with client(tokenizer) as (http, backend):
        assert said in assert_error(await http.post(path, json=body), 400, param)["message"]
        assert backend.requests == []


@pytest.mark.parametrize(
    ("body", "param", "place"),
    [
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "messages",
            "messages[0].content",
        ),
        (
            chat(messages=[{"role": "user", "content": "a"}, {"role": "x", "content": "b"}]),
            "messages",
            "messages[1]",
        ),
        (chat(temperature="hot"), "temperature", "temperature: "),
    ],
)
async def test_the_message_says_where_in_the_body(
    tokenizer: Tokenizer, body: dict[str, Any], param: str, place: str
) -> None:
    async with client(tokenizer) as (http, _):
        error = assert_error(await http.post("/v1/chat/completions", json=body), 400, param)
    assert error["message"].startswith(place)


async def test_one_limit_under_both_names(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, backend):
        for limits in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
            body = chat(max_tokens=5, max_completion_tokens=5) | limits
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        assert [r.max_tokens for r in backend.requests] == [5, 5]

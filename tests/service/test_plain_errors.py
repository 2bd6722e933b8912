"""What is wrong with a request is said in plain words: no error shows those of the library that has found it,
each names the field, and each has a code."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from llm42 import validation
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import JSON, assert_error, chat, client, completion

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
FORMS = "prompt: must be a text, a list of token ids, or a list of either"
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (TEXT, completion(max_tokens="5"), "max_tokens", "max_tokens: must be an integer"),
    (TEXT, completion(max_tokens=1.5), "max_tokens", "max_tokens: must be an integer"),
    (TEXT, completion(max_tokens=-1), "max_tokens", "max_tokens: must be at least 0"),
    (TEXT, completion(temperature="hot"), "temperature", "temperature: must be a number"),
    (TEXT, completion(temperature=101), "temperature", "temperature: must be at most 100"),
    (TEXT, completion(temperature=float("nan")), "temperature", "temperature: must be a finite number"),
    (TEXT, completion(top_p=0), "top_p", "top_p: must be more than 0"),
    (TEXT, completion(seed=2**64), "seed", f"seed: must be less than {2**64}"),
    (TEXT, completion(stream="yes"), "stream", "stream: must be true or false"),
    (TEXT, completion(logit_bias=[1]), "logit_bias", "logit_bias: must be an object"),
    (TEXT, completion(stop=5), "stop", "stop: must be a string or a list"),
    (TEXT, completion(stop=["x"] * 17), "stop", "stop: must have at most 16 entries"),
    (TEXT, completion(stop="x" * 1025), "stop", "stop: must have at most 1024 characters"),
    (TEXT, completion(stop_token_ids=7), "stop_token_ids", "stop_token_ids: must be a list"),
    (
        TEXT,
        completion(prompt=5),
        "prompt",
        "prompt: must be a text, a list of token ids, or a list of either",
    ),
    (TEXT, completion(prompt=[1, "a"]), "prompt", "prompt[1]: must be an integer"),
    (TEXT, completion(prompt=["a", 1]), "prompt", "prompt[1]: must be a string"),
    (TEXT, completion(prompt=[[1], ["a"]]), "prompt", "prompt[1][0]: must be an integer"),
    (TEXT, {"prompt": "a"}, "model", "model: is required"),
    (CHAT, chat(messages=[]), "messages", "messages: must not be empty"),
    (CHAT, chat(messages=["a"]), "messages", "messages[0]: must be an object"),
    (CHAT, chat(messages=[USER, {"content": "a"}]), "messages", "messages[1].role: is required"),
    (CHAT, chat(tools=[{"type": "x"}]), "tools", "tools[0].type: must be 'function'"),
    (CHAT, chat(date="May"), "date", "date: must be written as 2025-01-31"),
    (CHAT, chat(receipt="x"), "receipt", "receipt: must be true or false or an object"),
    (CHAT, chat(cache_salt=""), "cache_salt", "cache_salt: must not be empty"),
    ("/tokenize", {"prompt": 5}, "prompt", "prompt: must be a string"),
    ("/detokenize", {"tokens": ["x"]}, "tokens", "tokens[0]: must be an integer"),
    ("/v1/audit", {"records": 5}, "records", "records: must be a list"),
]
LIBRARY = re.compile(r"Input should|Field required|should (have|match)|after validation|[Uu]nable to parse")
"""Pydantic's words."""


@pytest.mark.parametrize(("path", "body", "param", "said"), WRONG, ids=[w[3][:40] for w in WRONG])
async def test_a_wrong_value_is_told_in_plain_words(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    async with client(tokenizer) as (http, backend):
        reply = await http.post(path, content=json.dumps(body), headers=JSON)
        error = assert_error(reply, 400, param)
        assert (error["message"], error["code"]) == (said, "invalid_value")
        assert not LIBRARY.search(error["message"])
        assert backend.requests == []


async def test_a_large_body_is_told_in_the_same_words(tokenizer: Tokenizer) -> None:
    """It is read in a thread, by other code (llm42/api/json_bodies.py)."""
    body = completion(max_tokens="5", user="x" * (40 << 10))
    async with client(tokenizer) as (http, _):
        error = assert_error(await http.post(TEXT, json=body), 400, "max_tokens")
    assert error["message"] == "max_tokens: must be an integer"


async def test_control_without_the_words_it_is_the_librarys(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_WORDS", {})
    async with client(tokenizer) as (http, _):
        error = assert_error(await http.post(TEXT, json=completion(max_tokens="5")), 400, "max_tokens")
    assert LIBRARY.search(error["message"])


@pytest.mark.parametrize(
    ("stop", "said"),
    [("", "stop: must not be empty"), ([""], "stop[0]: must not be empty"),
     (["a", ""], "stop[1]: must not be empty")],
)  # fmt: skip
async def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer, stop: Any, said: str) -> None:
    """Every output has it everywhere: it can only be a mistake. The control: no stop string at all."""
    async with client(tokenizer) as (http, backend):
        for path, body in ((TEXT, completion()), (CHAT, chat())):
            error = assert_error(await http.post(path, json=body | {"stop": stop}), 400, "stop")
            assert error["message"] == said
        assert backend.requests == []
        for none in (None, []):
            assert (await http.post(TEXT, json=completion(stop=none))).status_code == 200


async def test_what_is_not_there_has_a_code(tokenizer: Tokenizer) -> None:
    gzip = {**JSON, "Content-Encoding": "gzip"}
    async with client(tokenizer) as (http, _):
        lost = assert_error(await http.post("/v1/nothing", json={}), 404, None)
        method = assert_error(await http.get(TEXT), 405, None)
        encoded = assert_error(await http.post(TEXT, content=b"x", headers=gzip), 415, "Content-Encoding")
    assert (lost["code"], method["code"]) == ("not_found", "method_not_allowed")
    assert encoded["code"] == "unsupported_encoding"
    assert "/v1/nothing" in lost["message"]


@pytest.mark.parametrize(
    ("tree", "said"),
    [({"server": {"port": "a"}}, "server.port: must be an integer"),
     ({"server": {"port": -1}}, "server.port: must be at least 0"),
     ({"model": {"device": "tpu"}}, "model.device: must be 'cpu' or 'cuda'")],
)  # fmt: skip
def test_a_wrong_setting_is_told_in_the_same_words(tree: dict[str, Any], said: str) -> None:
    from pydantic import ValidationError

    from llm42.cli.errors import setting_error

    with pytest.raises(ValidationError) as caught:
        Settings.load(tree)
    assert [setting_error(e) for e in caught.value.errors()] == [said]

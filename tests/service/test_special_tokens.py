"""`add_special_tokens`: whether the tokenizer's begin token comes in front of a prompt, and where the tokens
of an echoed prompt stand in its text."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from llm42.protocol import Delta, FinishReason, Request, TokenLogprob
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import chat, client, completion, events
from tests.support import SPECIAL, tiny_tokenizer

BEGIN = 1
TEMPLATE = "<|begin|>{{ messages[0].content }}"


@pytest.fixture(scope="module")
def begins(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that puts its begin token in front of texts, with a template that does too."""
    place: Path = tmp_path_factory.mktemp("begins")
    data = json.loads(tiny_tokenizer().to_str())
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": SPECIAL[1], "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {SPECIAL[1]: {"id": SPECIAL[1], "ids": [BEGIN], "tokens": [SPECIAL[1]]}},
    }
    (place / "tokenizer.json").write_text(json.dumps(data))
    names = {"eos_token": SPECIAL[0], "bos_token": SPECIAL[1], "chat_template": TEMPLATE}
    (place / "tokenizer_config.json").write_text(json.dumps(names))
    return Tokenizer.load(place)


async def script(request: Request) -> AsyncGenerator[Delta, None]:
    found = None
    if request.prompt_logprobs is not None:
        found = tuple(TokenLogprob(token, -1.0) for token in request.prompt[1:])
    yield Delta((), "", prompt_logprobs=found)
    yield Delta((260,), "x", (TokenLogprob(260, -2.0),))
    yield Delta((), "", finish_reason=FinishReason.LENGTH)


async def ask(tokenizer: Tokenizer, body: dict[str, Any]) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client(tokenizer, script) as (http, _):
        reply = await http.post(path, json=body | {"return_token_ids": True})
        assert reply.status_code == 200, reply.text
        return events(reply.text) if body.get("stream") else reply.json()


@pytest.mark.parametrize(("given", "added"), [({}, 1), (None, 1), (True, 1), (False, 0)])
async def test_texts_of_completions(begins: Tokenizer, given: Any, added: int) -> None:
    fields = {} if given == {} else {"add_special_tokens": given}
    plain = begins.encode("tea")
    reply = await ask(begins, completion(prompt=["tea", "<|begin|>tea"], **fields))
    first, second = (c["prompt_token_ids"] for c in reply["choices"])
    assert first == [BEGIN] * added + plain
    assert second == [BEGIN] * (added + 1) + plain, "the client's own begin token is not touched"


async def test_ids_are_taken_as_they_are(begins: Tokenizer) -> None:
    for value in (None, True, False):
        reply = await ask(begins, completion(prompt=[5, 6], add_special_tokens=value))
        assert reply["choices"][0]["prompt_token_ids"] == [5, 6]


@pytest.mark.parametrize(("given", "added"), [({}, 0), (None, 0), (False, 0), (True, 1)])
async def test_messages_of_chat(begins: Tokenizer, given: Any, added: int) -> None:
    """The template has the begin token already."""
    fields = {} if given == {} else {"add_special_tokens": given}
    body = chat(messages=[{"role": "user", "content": "tea"}], prompt_logprobs=0, **fields)
    assert (await ask(begins, body))["prompt_token_ids"] == [BEGIN] * (added + 1) + begins.encode("tea")


async def test_tokenize_says_what_the_other_routes_do(begins: Tokenizer) -> None:
    messages = [{"role": "user", "content": "tea"}]
    async with client(begins, script) as (http, _):
        for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            text = (await http.post("/tokenize", json={"prompt": "tea"} | fields)).json()["tokens"]
            talk = (await http.post("/tokenize", json={"messages": messages} | fields)).json()["tokens"]
            asked = await ask(begins, completion(prompt="tea", **fields))
            assert text == asked["choices"][0]["prompt_token_ids"]
            asked = await ask(begins, chat(messages=messages, prompt_logprobs=0, **fields))
            assert talk == asked["prompt_token_ids"]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("prompt", ["the tea", "<|begin|>the tea"])
async def test_offsets_are_places_in_the_echoed_text(begins: Tokenizer, prompt: str, special: bool) -> None:
    """A begin token that the server adds is no part of the text, so it takes no room in it."""
    body = completion(prompt=prompt, echo=True, logprobs=0, add_special_tokens=special)
    (choice,) = (await ask(begins, body))["choices"]
    text, found = choice["text"], choice["logprobs"]
    assert text == prompt + "x"
    assert len(found["tokens"]) == len(choice["prompt_token_ids"]) + 1
    pairs = list(zip(found["tokens"], found["text_offset"], strict=True))[int(special) : -1]
    assert all(text.startswith(token, offset) for token, offset in pairs)
    assert found["text_offset"][-1] == len(prompt)
    assert found["text_offset"][0] == 0
    streamed = [c["choices"][0] for c in await ask(begins, body | {"stream": True})]
    assert [o for c in streamed if c["logprobs"] for o in c["logprobs"]["text_offset"]] == found[
        "text_offset"
    ]


async def test_ids_that_are_echoed_spell_every_token(begins: Tokenizer) -> None:
    ids = begins.encode("<|begin|>tea")
    (choice,) = (await ask(begins, completion(prompt=ids, echo=True, logprobs=0)))["choices"]
    assert choice["text"] == "<|begin|>teax"
    assert choice["logprobs"]["text_offset"][:2] == [0, len("<|begin|>")]


async def test_special_tokens_in_content_are_control_tokens(begins: Tokenizer) -> None:
    """As in vLLM and transformers; documented, since content of users can so end a turn."""
    body = chat(messages=[{"role": "user", "content": "a<|end|>b"}], prompt_logprobs=0)
    assert 0 in (await ask(begins, body))["prompt_token_ids"]

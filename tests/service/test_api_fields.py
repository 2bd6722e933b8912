"""Fields of the two endpoints beyond plain generation, and the small endpoints: over a scripted backend."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from llm42 import __version__
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import (
    JSON,
    MODEL,
    SETTINGS,
    assert_error,
    chat,
    client,
    completion,
)

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain, 4 degrees"},
]
TEMPLATE = """{%- if tools %}TOOLS {{ tools | tojson }}
{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}
{{- c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}</>
{% endfor %}{{ strftime_now("%Y-%m-%d") }} {{ mood }}{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def with_tools(tokenizer: Tokenizer) -> Tokenizer:
    """The default tokenizer with a chat template that knows tools, dates and a variable of its own."""
    return Tokenizer(tokenizer.backend, tokenizer.eos_token_ids, TEMPLATE, tokenizer.special)


async def prompt_text(tokenizer: Tokenizer, **fields: Any) -> str:
    """The prompt that a chat request becomes."""
    async with client(tokenizer) as (http, backend):
        reply = await http.post("/v1/chat/completions", json=chat(**fields))
        assert reply.status_code == 200, reply.text
        return tokenizer.decode(backend.requests[0].prompt, skip_special=False)


async def refused(tokenizer: Tokenizer, param: str, **fields: Any) -> str:
    """The message of a chat request's refusal; the backend must have seen nothing."""
    async with client(tokenizer) as (http, backend):
        reply = await http.post("/v1/chat/completions", json=chat(**fields))
        assert backend.requests == []
        return str(assert_error(reply, 400, param)["message"])


# ---- tools and constraints


async def test_tools_calls_and_results_reach_the_template(with_tools: Tokenizer) -> None:
    text = await prompt_text(with_tools, messages=TALK, tools=[TOOL], tool_choice="auto")
    assert text.startswith('TOOLS [{"type": "function", "function": {"name": "weather"')
    assert '<assistant>weather({"city": "Oslo"})</>' in text
    assert "<tool>rain, 4 degrees</>" in text
    assert "TOOLS" not in await prompt_text(with_tools, messages=TALK, tools=[TOOL], tool_choice="none")


async def test_what_a_template_would_leave_out_is_refused(
    tokenizer: Tokenizer, with_tools: Tokenizer
) -> None:
    """The default model's template knows no tools and no calls; one may skip tool results."""
    assert "no tools" in await refused(tokenizer, "tools", tools=[TOOL])
    assert "leaves out" in await refused(tokenizer, "messages", messages=TALK)
    skips = TEMPLATE.replace(
        "<{{ m.role }}>{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"
    )
    skipping = Tokenizer(tokenizer.backend, tokenizer.eos_token_ids, skips, tokenizer.special)
    assert "leaves out" in await refused(skipping, "messages", messages=TALK)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x", "tool_calls": [CALL]}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no JSON"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 900}}]}],
        [{"role": "user", "content": "x", "audio": {"id": "a"}}],
    ],
)
async def test_wrong_messages(with_tools: Tokenizer, messages: Any) -> None:
    await refused(with_tools, "messages", messages=messages)


@pytest.mark.parametrize("kind", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_calls_cannot_be_forced(with_tools: Tokenizer, kind: Any) -> None:
    await refused(with_tools, "tool_choice", tools=[TOOL], tool_choice=kind)


VLLM = Settings.load(
    {"model": {"device": "cuda"}, "engine": {"kind": "vllm", "vllm": {"structured_outputs": True}}}
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMATS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "json_object"}, {"type": "object"}),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, SCHEMA),
]


@pytest.mark.parametrize(("asked", "schema"), FORMATS)
async def test_constrained_output(tokenizer: Tokenizer, asked: Any, schema: Any) -> None:
    """Where the engine can, best effort is constrained; a deterministic request is told that it cannot
    be, and so is everybody where the engine cannot."""
    body = chat(response_format=asked)
    async with client(tokenizer, settings=VLLM) as (http, backend):
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        assert json.loads(backend.requests[0].json_schema or "") == schema
        reply = await http.post("/v1/chat/completions", json=body | {"deterministic": True})
        assert "deterministic" in assert_error(reply, 400, "response_format")["message"]
        assert_error(
            await http.post("/v1/chat/completions", json=body | {"ignore_eos": True}), 400, "ignore_eos"
        )
        assert (await http.post("/v1/chat/completions", json=chat(ignore_eos=True))).status_code == 200
        assert backend.requests[-1].json_schema is None
    assert "engine" in await refused(tokenizer, "response_format", response_format=asked)


# ---- the template's variables


async def test_the_date_is_fixed_unless_the_request_says_one(with_tools: Tokenizer) -> None:
    assert "2024-07-26 " in await prompt_text(with_tools, deterministic=True)
    assert "2024-07-26 " in await prompt_text(with_tools)
    assert "1999-12-31 " in await prompt_text(with_tools, date="1999-12-31", deterministic=True)
    for wrong in ("yesterday", "2024-02-30", "2024-1-1", 5):
        await refused(with_tools, "date", date=wrong)


async def test_template_variables(with_tools: Tokenizer) -> None:
    assert "26 glad<" in await prompt_text(with_tools, chat_template_kwargs={"mood": "glad"})
    for name in ("messages", "strftime_now", "raise_exception", "tools", "eos_token", "a b"):
        await refused(with_tools, "chat_template_kwargs", chat_template_kwargs={name: "x"})


async def test_the_end_of_the_prompt(tokenizer: Tokenizer) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "end"}]
    whole = await prompt_text(tokenizer, messages=talk)
    assert whole.endswith("end<|im_end|>\n<|im_start|>assistant\n")
    assert (await prompt_text(tokenizer, messages=talk, add_generation_prompt=False)).endswith(
        "end<|im_end|>\n"
    )
    assert (await prompt_text(tokenizer, messages=talk, continue_final_message=True)).endswith("\nend")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    await refused(tokenizer, "continue_final_message", messages=talk, **both)
    await refused(tokenizer, "continue_final_message", messages=talk[:1], continue_final_message=True)


async def test_text_parts_of_a_message_are_lines(tokenizer: Tokenizer) -> None:
    """As vLLM joins them, and as the template does with parts that it is given."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    talk = [{"role": "user", "content": parts}]
    text = await prompt_text(tokenizer, messages=talk)
    assert "<|im_start|>user\none\ntwo<|im_end|>" in text
    assert text == tokenizer.apply_chat_template(talk)


NULLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", completion(stream=True, stream_options={"include_usage": None})),
    (
        "/v1/completions",
        completion(deterministic=True, receipt={"prompt": None, "output": None}, logprobs=None),
    ),
    ("/v1/chat/completions", chat(messages=[{"role": "user", "content": "x", "tool_calls": None}])),
    ("/v1/chat/completions", chat(response_format={"type": "text", "json_schema": None})),
    ("/tokenize", {"prompt": "a", "messages": None, "date": None, "return_token_strs": None}),
    ("/detokenize", {"tokens": [1], "model": None}),
    ("/v1/audit", {"records": [{}], "manifests": None}),
]


@pytest.mark.parametrize(("path", "body"), NULLS)
async def test_null_means_the_default(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    """Also inside objects: the answer is that of a body without the null fields."""

    def without(value: Any) -> Any:
        if isinstance(value, list):
            return [without(v) for v in value]
        if not isinstance(value, dict):
            return value
        return {k: without(v) for k, v in value.items() if v is not None}

    async with client(tokenizer) as (http, backend):
        for asked in (body, without(body)):
            reply = await http.post(path, json=asked)
            assert reply.status_code == 200, reply.text
        assert not backend.requests or len({(r.prompt, r.num_logprobs) for r in backend.requests}) == 1


async def test_a_tool_call_without_a_type(with_tools: Tokenizer) -> None:
    talk = [TALK[0], TALK[1] | {"tool_calls": [CALL | {"type": None}]}, TALK[2]]
    assert await prompt_text(with_tools, messages=talk) == await prompt_text(with_tools, messages=TALK)


# ---- the small endpoints


async def test_tokenize_and_detokenize(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, _):
        reply = await http.post("/tokenize", json={"model": MODEL, "prompt": "Hello, world"})
        ids = reply.json()["tokens"]
        assert ids == tokenizer.encode("Hello, world", add_special=True)
        assert reply.json() == {
            "count": len(ids),
            "max_model_len": SETTINGS.model.max_model_len,
            "tokens": ids,
        }
        back = await http.post("/detokenize", json={"tokens": ids})
        assert back.json() == {"prompt": "Hello, world"}
        talk = [{"role": "user", "content": "Hi"}]
        reply = await http.post("/tokenize", json={"messages": talk, "return_token_strs": True})
        assert reply.json()["tokens"] == tokenizer.encode(tokenizer.apply_chat_template(talk))
        assert reply.json()["token_strs"][0] == "<|im_start|>"
        assert_error(await http.post("/tokenize", json={}), 400, "prompt")
        assert_error(await http.post("/tokenize", json={"prompt": "a", "model": "other"}), 404, "model")
        assert_error(await http.post("/tokenize", json={"prompt": "w " * 10**5}), 400, "prompt")
        assert_error(await http.post("/detokenize", json={"tokens": [10**6]}), 400, "tokens")
        lone = await http.post("/tokenize", content='{"prompt": "\\ud800"}', headers=JSON)
        assert_error(lone, 400, "prompt")


async def test_version(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, _):
        assert (await http.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_id_comes_back(tokenizer: Tokenizer, stream: bool) -> None:
    """The client's own, on answers and errors; else one of ours; never what is no header."""
    async with client(tokenizer) as (http, _):

        async def id_of(given: str | None, **fields: Any) -> tuple[str, httpx.Response]:
            headers = {} if given is None else {"x-request-id": given}
            reply = await http.post(
                "/v1/completions", json=completion(stream=stream, **fields), headers=headers
            )
            return reply.headers["x-request-id"], reply

        assert (await id_of("abc-1"))[0] == "abc-1"
        assert (await id_of("abc-2", temperature=-1))[0] == "abc-2"
        made, reply = await id_of(None)
        assert made in reply.text
        assert (await id_of(None, temperature=-1))[0] != (await id_of(None, temperature=-1))[0]
        assert (await id_of("x" * 1000))[0] != "x" * 1000

"""Keys of messages that are no fields here: the chat template decides whether one counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import assert_error, chat, client

REPLY = {"role": "assistant", "content": "hello"}
USER = {"role": "user", "content": "Hi"}
READS = """{% for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}
{{- m['content'] }}{{ m.get('weight', '') }}{% endfor %}<a>"""
DUMPS = "{% for m in messages %}{{ m | tojson }}{% endfor %}"


def with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    return Tokenizer(tokenizer.backend, tokenizer.eos_token_ids, source, tokenizer.special)


async def prompt_of(tokenizer: Tokenizer, *messages: dict[str, Any]) -> str:
    async with client(tokenizer) as (http, backend):
        reply = await http.post("/v1/chat/completions", json=chat(messages=[*messages, USER]))
        assert reply.status_code == 200, reply.text
        ids = (await http.post("/tokenize", json={"messages": [*messages, USER]})).json()["tokens"]
        assert tuple(ids) == backend.requests[0].prompt
        return tokenizer.decode(backend.requests[0].prompt, skip_special=False)


DEEP: Any = "x"
for _ in range(200):
    DEEP = {"a": [DEEP]}
UNREAD: dict[str, Any] = {
    "finish_reason": "stop", "provider_specific_fields": {"a": 1}, "reasoning_content": "because", "id": "m1",
    "cache_control": {"type": "ephemeral"}, "weight": 1, "phase": "final", "status": "completed",
    "reasoning": "so", "reasoning_details": [{"type": "text"}], "thinking_blocks": [{"a": 1}],
    "refusal": "no", "annotations": [{"type": "url"}], "token_ids": [1, 2], "created": 17, "metadata": DEEP,
    "long": "x" * 300_000, "logprobs": {"content": []}, "parsed": {"a": 1}, "stop_reason": 2, "index": 0,
}  # fmt: skip


async def test_a_key_that_the_template_does_not_read_changes_nothing(tokenizer: Tokenizer) -> None:
    want = await prompt_of(tokenizer, USER, REPLY)
    added = {key: (USER | {key: value}, REPLY | {key: value}) for key, value in UNREAD.items()}
    assert [key for key, talk in added.items() if await prompt_of(tokenizer, *talk) != want] == []


EMPTY = [None, "", [], {}, False]


@pytest.mark.parametrize("key", ["prefix", "function_call", "audio", "refusal", "provider_specific_fields"])
async def test_an_empty_value_of_any_key_changes_nothing(tokenizer: Tokenizer, key: str) -> None:
    """Even where the template writes out all that a message has."""
    dumping = with_template(tokenizer, DUMPS)
    want = await prompt_of(dumping, REPLY)
    assert [value for value in EMPTY if await prompt_of(dumping, REPLY | {key: value}) != want] == []


async def test_a_key_that_the_template_reads_takes_effect(tokenizer: Tokenizer) -> None:
    """It is not dropped: the prompt is what the template's author meant, on /tokenize too."""
    reading = with_template(tokenizer, READS)
    assert await prompt_of(reading, REPLY) == "<assistant>hello<user>Hi<a>"
    thought = REPLY | {"reasoning_content": "because", "id": "m1"}
    assert await prompt_of(reading, thought) == "<assistant>[because]hello<user>Hi<a>"
    assert await prompt_of(reading, REPLY | {"weight": 3}) == "<assistant>hello3<user>Hi<a>"
    assert '"weight": 3' in await prompt_of(with_template(tokenizer, DUMPS), REPLY | {"weight": 3})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("prefix", True, "continue_final_message"), ("partial", True, "continue_final_message"),
        ("function_call", {"name": "f", "arguments": "{}"}, "tool_calls"),
        ("audio", {"id": "a"}, "only text"), ("images", ["aGk="], "only text"),
    ],
)  # fmt: skip
async def test_a_key_that_means_something_beside_the_template_is_refused(
    tokenizer: Tokenizer, key: str, value: Any, said: str
) -> None:
    async with client(tokenizer) as (http, backend):
        body = chat(messages=[USER, REPLY | {key: value}])
        message = assert_error(await http.post("/v1/chat/completions", json=body), 400, "messages")["message"]
        assert key in message
        assert said in message
        assert backend.requests == []


async def test_what_a_template_cannot_write_is_the_requests_fault(tokenizer: Tokenizer) -> None:
    reading = with_template(tokenizer, READS)
    async with client(reading) as (http, _):
        for value in ("\ud800", "x" * 300_000):
            text = json.dumps(chat(messages=[USER, REPLY | {"reasoning_content": value}]))
            reply = await http.post(
                "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
            )
            assert_error(reply, 400, "messages")


CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
TOOLS = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}
{{- m.tool_calls | tojson if m.tool_calls else '' }}{% endfor %}"""


async def test_bookkeeping_of_calls_and_tools(tokenizer: Tokenizer) -> None:
    """What clients add to a call or a tool, and templates do not see."""
    made = with_template(tokenizer, TOOLS)
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}, "thought_signature": "s"}
    async with client(made) as (http, backend):
        for call, tools in (
            (CALL, [tool]),
            (
                CALL | {"function": function, "extra_content": {"a": 1}},
                [tool | {"cache_control": {"type": "x"}}],
            ),
            (CALL, [tool | {"strict": False}]),
        ):
            talk = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
            reply = await http.post("/v1/chat/completions", json=chat(messages=talk, tools=tools))
            assert reply.status_code == 200, reply.text
        assert len({r.prompt for r in backend.requests}) == 1
        strict = chat(messages=[USER], tools=[tool | {"strict": True}])
        assert_error(await http.post("/v1/chat/completions", json=strict), 400, "tools")


async def test_a_key_that_fills_the_context_is_refused_before_it_is_encoded(tokenizer: Tokenizer) -> None:
    """By its length alone: to encode it would take long."""
    reads = with_template(tokenizer, READS)
    thought = REPLY | {"reasoning_content": "a b " * (reads.longest_token * 2048 // 4 + 1)}
    async with client(reads) as (http, _):
        for path in ("/v1/chat/completions", "/tokenize"):
            reply = await http.post(path, json=chat(messages=[USER, thought, USER]))
            error = assert_error(reply, 400, "messages")
            assert error["code"] == "context_length_exceeded"
            assert "characters cannot fit" in error["message"]

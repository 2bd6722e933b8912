"""Fields that clients send with values that change nothing: ignored on every route; any other value of them
is refused."""

from __future__ import annotations

from typing import Any

import pytest

from llm42.api.other_fields import HARMLESS, NEUTRAL, is_neutral, refusal
from llm42.api.requests import ChatBody, CompletionBody, TokenizeBody
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import assert_error, chat, client, completion

NOTHING: dict[str, Any] = {
    "allowed_token_ids": [], "bad_words": [], "return_tokens_as_token_ids": False, "detokenize": True,
    "truncate_prompt_tokens": -1, "structured_outputs": {}, "mm_processor_kwargs": {},
    "include_reasoning": True, "top_logprobs": 0, "stop": [], "stop_token_ids": [], "logit_bias": {},
    "rid": "r", "session_id": "s", "cache_prompt": True, "prediction": {"type": "content", "content": "x"},
    "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k",
    "parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "functions": [],
    "function_call": "auto", "suffix": "", "best_of": 1, "echo": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "use_beam_search": False, "length_penalty": 1.0,
    "early_stopping": False, "add_generation_prompt": True, "chat_template_kwargs": {},
    "continue_final_message": False, "documents": [], "modalities": ["text"], "verbosity": "medium",
    "regex": "", "no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True,
    "return_hidden_states": False, "custom_params": {}, "vllm_xargs": {}, "kv_transfer_params": {},
    "mirostat": 0, "typical_p": 1.0, "repeat_penalty": 1.0, "grammar": "", "n_probs": 0,
    "timings_per_token": False, "transforms": [], "provider": {}, "keep_alive": "5m", "ttl": 300,
    "options": {}, "priority": 0, "request_id": "x", "extra_body": {}, "response_format": {"type": "text"},
    "stream_options": {}, "logprobs": False, "max_completion_tokens": 8, "presence_penalty": 0, "n": 1,
    "ignore_eos": False, "min_tokens": 0, "top_k": -1, "include_stop_str_in_output": False,
    "return_token_ids": False, "prompt_logprobs": None, "is_deterministic": None,
}  # fmt: skip
"""One value of each: the default that a client of some server writes out."""


@pytest.mark.parametrize("name", NOTHING)
async def test_a_neutral_value_is_ignored_on_both_routes(tokenizer: Tokenizer, name: str) -> None:
    async with client(tokenizer) as (http, backend):
        for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
            for value in (NOTHING[name], None):
                reply = await http.post(path, json=body | {name: value})
                assert reply.status_code == 200, reply.text
        plain, given = backend.requests[1], backend.requests[0]
        assert given.prompt == plain.prompt
        assert given.stop_token_ids == plain.stop_token_ids
        assert given.stop == plain.stop == ()


async def test_all_of_them_at_once_make_the_same_request(tokenizer: Tokenizer) -> None:
    async with client(tokenizer) as (http, backend):
        for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
            for fields in ({}, NOTHING):
                asked = body | fields | {"seed": 1, "max_tokens": 8}
                assert (await http.post(path, json=asked)).status_code == 200
            first, second = backend.requests
            backend.requests.clear()
            names = [n for n in first.__slots__ if n != "request_id"]
            assert [getattr(first, n) for n in names] == [getattr(second, n) for n in names]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", [1]), ("bad_words", ["a"]), ("return_tokens_as_token_ids", True),
        ("detokenize", False), ("truncate_prompt_tokens", 5), ("structured_outputs", {"regex": "a"}),
        ("include_reasoning", False), ("skip_special_tokens", False), ("grammar", "root ::= x"),
        ("mirostat", 2), ("mirostat", False), ("n_predict", 5), ("reasoning_effort", "low"),
        ("guided_json", {"a": 1}), ("return_hidden_states", True), ("suffix", "x"), ("documents", [{}]),
        ("echo", 0), ("use_beam_search", 0), ("length_penalty", True), ("modalities", ["text", "audio"]),
        ("verbosity", "low"), ("cache_me_if_you_can", True),
    ],
)  # fmt: skip
async def test_any_other_value_is_refused_on_both_routes(tokenizer: Tokenizer, name: str, value: Any) -> None:
    async with client(tokenizer) as (http, backend):
        for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
            assert_error(await http.post(path, json=body | {name: value}), 400, name)
        assert backend.requests == []


def test_no_field_is_known_on_one_route_only() -> None:
    """What one route takes, the others take with a value that changes nothing, or say where it belongs."""
    both = set(CompletionBody.model_fields) & set(ChatBody.model_fields)
    alone = (set(CompletionBody.model_fields) | set(ChatBody.model_fields)) - both
    of_the_prompt = {"prompt", "messages", "date"}
    for name in alone - of_the_prompt - {"logprobs"}:
        assert name in NEUTRAL, name
    for name in of_the_prompt:
        kind = ChatBody if name == "prompt" else CompletionBody
        body = chat(**{name: "x"}) if kind is ChatBody else completion(**{name: "x"})
        found = kind.model_validate(body).unsupported()
        assert found is not None
        assert "another endpoint" in found[1]


def test_the_table_is_sound() -> None:
    assert not HARMLESS & set(NEUTRAL)
    implemented = set(CompletionBody.model_fields) & set(ChatBody.model_fields)
    assert not (HARMLESS | set(NEUTRAL)) & implemented
    assert not HARMLESS & (set(CompletionBody.model_fields) | set(ChatBody.model_fields))
    assert set(TokenizeBody.model_fields) >= {"tools", "tool_choice", "date"}
    for name, values in NEUTRAL.items():
        assert all(is_neutral(name, v) for v in values)
        assert not is_neutral(name, "a value that nobody has")
    assert refusal({"user": 1, "echo": False, "other": None}) is None

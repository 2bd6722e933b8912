"""A field that is accepted takes effect, or docs/api.md says that it need not: what by construction never
could is refused with its name."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from llm42.api.plan import plan_request
from llm42.api.requests import CompletionBody
from llm42.protocol import Delta, FinishReason, Request
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import assert_error, chat, client, completion, events
from tests.support import SPECIAL, Lab, collect

TOOL = {"type": "function", "function": {"name": "f"}}
PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}


async def accepted(tokenizer: Tokenizer, body: dict[str, Any]) -> Request:
    async with client(tokenizer) as (http, backend):
        reply = await http.post(PATHS["messages" in body], json=body)
        assert reply.status_code == 200, reply.text
        return backend.requests[0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"include_stop_str_in_output": True}])
@pytest.mark.parametrize(
    ("stop", "token"),
    [("<|im_start|>", 1), (["<|im_start|>"], 1), (["x", "<|im_end|>"], 2), (["<|endoftext|>"], 0)],
)
async def test_a_stop_string_that_is_a_special_token_ends_the_output(
    tokenizer: Tokenizer, stop: Any, token: int, fields: dict[str, Any], deterministic: bool
) -> None:
    """Its text is no part of the output, so that only the token can end it; on both routes."""
    asked = {"stop": stop, "deterministic": deterministic, **fields}
    for body in (completion(**asked), chat(**asked)):
        request = await accepted(tokenizer, body)
        assert token in request.stop_token_ids
        assert request.stop == ((stop,) if isinstance(stop, str) else tuple(stop))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("include", [False, True])
async def test_it_does_through_engine_and_verifier(lab: Lab, deterministic: bool, include: bool) -> None:
    """A model that says nothing but the token; with another stop string it goes on to the limit."""
    verifier = lab.verifier().start()
    generator = lab.generator(lab.engine(), verifier)
    found = []
    for stop in (SPECIAL[1], "x"):
        asked = {"logit_bias": {"1": 100}, "stop": [stop], "include_stop_str_in_output": include}
        fields = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "temperature": 0, **asked}
        body = CompletionBody.model_validate(fields | {"deterministic": deterministic})
        answer = await collect(generator, plan_request(body, lab.settings, lab.tokenizer).requests[0])
        found.append((answer.tokens, answer.text, answer.finish))
    assert found == [((1,), "", FinishReason.STOP), ((1,) * 6, "", FinishReason.LENGTH)]


async def test_such_a_token_is_banned_for_min_tokens(tokenizer: Tokenizer) -> None:
    request = await accepted(tokenizer, completion(stop="<|im_start|>", min_tokens=3))
    assert 1 in request.sampling.min_tokens_banned


async def test_ordinary_stop_strings_add_no_token(tokenizer: Tokenizer) -> None:
    """Among them parts of a special token's spelling, which text may have, and any character."""
    strings = ["\n\n", "<|im_", "im_start", "</s>", "\u00e9\U0001f600\u4e2d", "\ufffd", " ", "\u2028"]
    request = await accepted(tokenizer, completion(stop=strings))
    assert request.stop == tuple(strings)
    assert request.stop_token_ids == tokenizer.eos_token_ids


NEVER: list[tuple[dict[str, Any], str, str]] = [
    (completion(stop="<|im_start|>user"), "stop", "stop_token_ids"),
    (completion(stop=["a", "\n<|im_end|>"]), "stop", "stop_token_ids"),
    (chat(stop=["<|im_end|>" * 90]), "stop", "stop_token_ids"),
    (completion(stop="\x04"), "stop", "U+0004"),
    (completion(stop=["a\U00040000"]), "stop", "U+40000"),
    (completion(stop="\ud800"), "stop", ""),
    (completion(stop="x", skip_special_tokens=False), "skip_special_tokens", "return_token_ids"),
    (completion(bad_words=["x"]), "bad_words", "logit_bias"),
    (completion(allowed_token_ids=[5]), "allowed_token_ids", "logit_bias"),
    (completion(min_tokens=1, max_tokens=0, echo=True), "min_tokens", "above"),
    (chat(min_tokens=1, max_tokens=0, prompt_logprobs=0), "min_tokens", "above"),
    (completion(min_tokens=17), "min_tokens", "above"),
    (chat(min_tokens=9, max_completion_tokens=8), "min_tokens", "above"),
    (completion(max_tokens=8, max_completion_tokens=9), "max_completion_tokens", "disagree"),
    (chat(max_tokens=8, max_completion_tokens=9), "max_completion_tokens", "disagree"),
    (completion(n=2, best_of=3), "best_of", ""),
    (completion(n=2, best_of=1), "best_of", ""),
    (completion(best_of=True), "best_of", ""),
    (chat(top_logprobs=2, logprobs=False), "top_logprobs", "logprobs"),
    (completion(top_logprobs=2), "top_logprobs", ""),
    (chat(tool_choice="required"), "tool_choice", ""),
    (chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice", ""),
    (chat(tools=[TOOL], parallel_tool_calls=False), "parallel_tool_calls", "cannot be kept to one"),
    (completion(receipt=True, deterministic=False), "receipt", "deterministic"),
    (completion(stream=True, prompt_logprobs=1), "prompt_logprobs", "stream"),
    (completion(date="2025-01-01"), "date", "another endpoint"),
    (completion(tools=[TOOL]), "tools", "another endpoint"),
    (chat(prompt="Hi"), "prompt", "another endpoint"),
    (chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message", ""),
]


@pytest.mark.parametrize(("body", "param", "said"), NEVER, ids=lambda v: str(v)[-60:] if v else None)
@pytest.mark.parametrize("deterministic", [False, True])
async def test_what_could_never_take_effect_is_refused(
    tokenizer: Tokenizer, body: dict[str, Any], param: str, said: str, deterministic: bool
) -> None:
    async with client(tokenizer) as (http, backend):
        text = json.dumps({"deterministic": deterministic} | body)
        reply = await http.post(
            PATHS["messages" in body], content=text, headers={"content-type": "application/json"}
        )
        assert said in assert_error(reply, 400, param)["message"]
        assert backend.requests == []


HARMLESS: list[dict[str, Any]] = [
    completion(stream_options={"include_usage": True}),
    chat(stream_options={"include_usage": True, "continuous_usage_stats": True}),
    completion(include_stop_str_in_output=True),
    completion(n=2, best_of=2, temperature=0.5),
    completion(n=2, temperature=0),
    chat(tool_choice="auto"),
    chat(tool_choice="none", tools=[TOOL], parallel_tool_calls=False),
    chat(parallel_tool_calls=False),
    chat(top_logprobs=0),
    completion(max_tokens=8, max_completion_tokens=8),
    completion(max_completion_tokens=8),
    completion(ignore_eos=True, stop="x"),
    completion(min_tokens=4, max_tokens=4, stop="x", logit_bias={"2": 100}),
    completion(echo=True, max_tokens=0, stop="x", seed=3, logprobs=1),
    chat(response_format={"type": "text"}, deterministic=True),
    chat(response_format={"type": "text", "json_schema": None}),
    completion(temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=1),
]


@pytest.mark.parametrize("body", HARMLESS, ids=lambda v: str(v)[-60:])
async def test_what_needs_no_effect_is_accepted(tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    await accepted(tokenizer, body)


async def test_the_limit_of_completions_under_its_other_name(tokenizer: Tokenizer) -> None:
    request = await accepted(tokenizer, completion(max_completion_tokens=3, min_tokens=2))
    assert (request.max_tokens, request.sampling.min_tokens) == (3, 2)
    async with client(tokenizer) as (http, _):
        reply = await http.post("/v1/completions", json=completion(max_completion_tokens=65535))
        message = assert_error(reply, 400, "max_completion_tokens")["message"]
    length = len(request.prompt)
    assert f"at most {2048 - length} of output fit" in message
    assert (await accepted(tokenizer, completion(max_tokens=2048 - length))).max_tokens == 2048 - length


async def counted(request: Request) -> AsyncGenerator[Delta, None]:
    yield Delta((5,), "a")
    yield Delta((6, 7), "b")
    yield Delta((8,), "c", finish_reason=FinishReason.STOP)


@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize("include", [False, True])
async def test_the_usage_so_far_in_every_chunk(tokenizer: Tokenizer, path: str, include: bool) -> None:
    """`continuous_usage_stats` was taken without a word and had no effect."""
    options = {"continuous_usage_stats": True, "include_usage": include}
    body = (chat if "chat" in path else completion)(stream=True, stream_options=options)
    async with client(tokenizer, counted) as (http, _):
        chunks = events((await http.post(path, json=body)).text)
        whole = (await http.post(path, json=body | {"stream": False})).json()["usage"]
    found = [c["usage"]["completion_tokens"] for c in chunks]
    assert found == [1, 3, 4, *([4] if include else [])]
    assert chunks[-1]["usage"] == whole


TOKENIZE: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "x", "tools": [TOOL]}, "tools"),
    ({"prompt": "x", "date": "2025-01-01"}, "date"),
    ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
    ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
    ({"prompt": "x", "some_new_field": 1}, "some_new_field"),
    ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), TOKENIZE)
async def test_tokenize_takes_nothing_that_its_ids_could_not_show(
    tokenizer: Tokenizer, body: dict[str, Any], param: str
) -> None:
    async with client(tokenizer) as (http, _):
        assert_error(await http.post("/tokenize", json=body), 400, param)


async def test_tokenize_takes_a_requests_own_body(tokenizer: Tokenizer) -> None:
    """The ids are those that the request's prompt has, whatever else it says."""
    async with client(tokenizer) as (http, backend):
        for body in (
            chat(
                temperature=0.5,
                max_tokens=5,
                stop="x",
                user="me",
                top_logprobs=0,
                tools=[],
                deterministic=True,
            ),
            chat(tools=[TOOL], tool_choice="none", chat_template_kwargs={}, detokenize=True),
            completion(max_tokens=5, echo=True, n=2, truncate_prompt_tokens=-1, add_generation_prompt=True),
        ):
            assert (await http.post(PATHS["messages" in body], json=body)).status_code == 200
            reply = await http.post("/tokenize", json=body)
            assert reply.status_code == 200, reply.text
            assert tuple(reply.json()["tokens"]) == backend.requests[-1].prompt

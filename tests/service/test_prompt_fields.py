"""What a reply says of its prompt: echo, log-probabilities, ids, what was cached. Over a scripted backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from llm42.protocol import Delta, FinishReason, Request, TokenLogprob
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import Script, assert_error, chat, client, completion, events

PROMPT = [19556, 28, 905]


async def scored(request: Request) -> AsyncGenerator[Delta, None]:
    """What the driver sends: the prompt's entries first, if they are asked for."""
    found = None
    if request.prompt_logprobs is not None:
        count = request.prompt_logprobs
        found = tuple(
            TokenLogprob(t, -float(i), ((9, -0.5), (t, -float(i)))[:count])
            for i, t in enumerate(request.prompt[1:], 1)
        )
    yield Delta((), "", prompt_logprobs=found, cached_tokens=2)
    if request.max_tokens:
        yield Delta((7,), "out", (TokenLogprob(7, -3.0, ((7, -3.0),)),))
    yield Delta((), "", finish_reason=FinishReason.LENGTH)


async def ask(tokenizer: Tokenizer, body: dict[str, Any], script: Script = scored) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client(tokenizer, script) as (http, _):
        reply = await http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return events(reply.text) if body.get("stream") else reply.json()


async def test_echo_puts_the_prompt_and_its_log_probabilities_in_front(tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(PROMPT)
    reply = await ask(tokenizer, completion(prompt=PROMPT, echo=True, logprobs=1))
    (choice,) = reply["choices"]
    assert choice["text"] == text + "out"
    found = choice["logprobs"]
    assert found["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    assert found["tokens"] == [tokenizer.token_text(t) for t in (*PROMPT, 7)]
    assert found["top_logprobs"][0] is None
    assert [max(t, key=t.get) for t in found["top_logprobs"][1:]] == [
        tokenizer.token_text(t) for t in (9, 9, 7)
    ]
    assert found["text_offset"] == [0, *[len(tokenizer.decode(PROMPT[:n])) for n in (1, 2, 3)]]
    streamed = [c["choices"][0] for c in await ask(tokenizer, completion(
        prompt=PROMPT, echo=True, logprobs=1, stream=True))]  # fmt: skip
    assert "".join(c["text"] for c in streamed) == choice["text"]
    assert [p for c in streamed for p in c["logprobs"]["token_logprobs"]] == found["token_logprobs"]


async def test_echo_alone_needs_no_scores(tokenizer: Tokenizer) -> None:
    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        assert request.prompt_logprobs is None
        yield Delta((7,), " out", finish_reason=FinishReason.LENGTH)

    reply = await ask(tokenizer, completion(prompt=["Hi", "Ho"], n=2, echo=True), script)
    assert [c["text"] for c in reply["choices"]] == ["Hi out", "Hi out", "Ho out", "Ho out"]


async def test_the_prompt_alone(tokenizer: Tokenizer) -> None:
    """max_tokens 0 with echo: nothing is generated."""
    body = completion(prompt=PROMPT, echo=True, logprobs=0, max_tokens=0)
    (choice,) = (await ask(tokenizer, body))["choices"]
    assert choice["text"] == tokenizer.decode(PROMPT)
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert choice["logprobs"]["top_logprobs"] is None


async def test_prompt_logprobs_are_vllms(tokenizer: Tokenizer) -> None:
    (choice,) = (await ask(tokenizer, completion(prompt=PROMPT, prompt_logprobs=1)))["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "9": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_text(9)},
        "28": {"logprob": -1.0, "rank": None, "decoded_token": tokenizer.token_text(28)},
    }
    assert set(third) == {"9", "905"}
    assert choice["text"] == "out"
    reply = await ask(tokenizer, chat(prompt_logprobs=0, n=2))
    assert reply["prompt_logprobs"][0] is None
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert all("prompt_logprobs" not in choice for choice in reply["choices"])
    async with client(tokenizer) as (http, _):
        body = completion(prompt=PROMPT, prompt_logprobs=1, stream=True)
        assert_error(await http.post("/v1/completions", json=body), 400, "prompt_logprobs")


async def test_prompt_ids_are_where_vllm_has_them(tokenizer: Tokenizer) -> None:
    """Once at the top of a chat reply, and of the first chunk of each choice; in each choice of a
    completion."""
    talk = chat(return_token_ids=True, n=2)
    whole = await ask(tokenizer, talk)
    assert tokenizer.decode(whole["prompt_token_ids"], skip_special=False).endswith("assistant\n")
    assert [set(c) & {"prompt_token_ids", "token_ids"} for c in whole["choices"]] == [{"token_ids"}] * 2
    chunks = await ask(tokenizer, talk | {"stream": True})
    first = [c for c in chunks if "prompt_token_ids" in c]
    assert [c["choices"][0]["index"] for c in first] == [0, 1]
    assert [c["prompt_token_ids"] for c in first] == [whole["prompt_token_ids"]] * 2
    assert all("prompt_token_ids" not in c["choices"][0] for c in chunks)
    assert "prompt_token_ids" not in await ask(tokenizer, chat())
    for stream in (False, True):
        body = completion(prompt=[PROMPT, [7]], return_token_ids=True, stream=stream)
        found = await ask(tokenizer, body)
        assert all("prompt_token_ids" not in c for c in (found if stream else [found]))
        choices = [c["choices"][0] for c in found] if stream else found["choices"]
        assert {c["index"]: c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c} == {
            0: PROMPT,
            1: [7],
        }


async def test_usage_says_what_was_cached(tokenizer: Tokenizer) -> None:
    usage = (await ask(tokenizer, completion(prompt=[PROMPT, PROMPT], n=2)))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 4)

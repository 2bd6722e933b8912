"""Replies of many log-probabilities: bounded, and not written on the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from llm42.api.logprobs import MAX_LOGPROBS
from llm42.api.render import Renderer
from llm42.api.reply_writer import LARGE, ReplyWriter
from llm42.config import Settings
from llm42.protocol import Delta, FinishReason, Request, TokenLogprob
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import assert_error, chat, client, completion, events


@pytest.mark.parametrize("size", [LARGE - 1, LARGE])
async def test_the_same_text_as_the_librarys(size: int) -> None:
    value = {
        "choices": [{"a": -1e-05, "b": [1, None, True], "\u00e9\n": "\u2028\U0001f642"}] * 9,
        "c": {},
        "d": [],
    }
    assert await ReplyWriter().write(size, lambda: value) == json.dumps(value, ensure_ascii=False)


def alternatives(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, tuple((i, -1.0) for i in range(20)))


async def scored(request: Request) -> AsyncGenerator[Delta, None]:
    """As many log-probabilities as were asked for, in one piece."""
    found = None
    if request.prompt_logprobs is not None:
        found = tuple(alternatives(t) for t in request.prompt[1:])
    if not request.max_tokens:
        yield Delta((), "", finish_reason=FinishReason.LENGTH, prompt_logprobs=found)
        return
    ids = tuple(range(request.max_tokens))
    yield Delta(
        ids,
        "text",
        tuple(alternatives(t) for t in ids) if request.num_logprobs is not None else (),
        finish_reason=FinishReason.LENGTH,
        prompt_logprobs=found,
    )


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each reply and chunk was rendered on this thread, the event loop's."""
    loop, found = threading.get_ident(), list[bool]()
    for name in ("reply", "chunk"):
        real = getattr(Renderer, name)

        def noted(self: Renderer, *args: Any, real: Any = real) -> Any:
            found.append(threading.get_ident() == loop)
            return real(self, *args)

        monkeypatch.setattr(Renderer, name, noted)
    return found


TOKENS = LARGE // 21 + 2
ASKED: list[tuple[dict[str, Any], bool]] = [
    (completion(prompt=[7] * 9, max_tokens=TOKENS, logprobs=20), False),
    (chat(max_tokens=TOKENS, logprobs=True, top_logprobs=20), False),
    (completion(prompt=[7] * TOKENS, max_tokens=0, logprobs=20, echo=True), False),
    (completion(prompt=[7] * TOKENS, max_tokens=1, prompt_logprobs=20), False),
    (completion(prompt=[[7] * 9] * 10, max_tokens=TOKENS // 10 + 1, logprobs=20), False),
    (completion(prompt=[7] * 9, max_tokens=9, logprobs=20), True),
    (chat(max_tokens=TOKENS), True),
]


@pytest.mark.parametrize(
    ("body", "on_loop", "stream"),
    [(*asked, False) for asked in ASKED] + [(*ASKED[i], True) for i in (0, 1, 2, 5, 6)],
)
async def test_what_is_large_leaves_the_event_loop(
    tokenizer: Tokenizer, rendered: list[bool], body: dict[str, Any], on_loop: bool, stream: bool
) -> None:
    """Replies, and a chunk that is large by itself; small ones stay, because a thread costs more.
    prompt_logprobs is not for streams, and ten choices come in small chunks."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client(tokenizer, scored) as (http, _):
        reply = await http.post(path, json=body | {"stream": stream})
        assert reply.status_code == 200, reply.text
        found = events(reply.text)[0] if stream else reply.json()
    assert rendered == [on_loop]
    wanted = body.get("logprobs") is not None
    assert (found["choices"][0]["logprobs"] is not None) == wanted


async def test_one_at_a_time() -> None:
    """However many large replies are ready, one thread writes them."""
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.01)
        running -= 1

    writer = ReplyWriter()
    await asyncio.gather(*(writer.write(LARGE, work) for _ in range(5)))
    assert (running, most) == (0, 1)


WIDE = Settings.load({"model": {"max_model_len": 65536}, "server": {"max_queued": 1024}})
MOST = MAX_LOGPROBS // 21
REFUSED: list[tuple[dict[str, Any], str]] = [
    (completion(prompt=[[7] * 2047] * 64, max_tokens=0, logprobs=20, echo=True), "logprobs"),
    (completion(prompt=[7], max_tokens=MOST + 1, logprobs=20), "logprobs"),
    (completion(prompt=[7], max_tokens=MOST // 2 + 1, logprobs=20, n=2), "logprobs"),
    (completion(prompt=[7] * (MOST + 1), max_tokens=1, prompt_logprobs=20), "prompt_logprobs"),
    (completion(prompt=[7] * (MOST + 1), max_tokens=1, logprobs=20, echo=True, stream=True), "logprobs"),
    (chat(logprobs=True, top_logprobs=20), "logprobs"),
]
SERVED: list[dict[str, Any]] = [
    completion(prompt=[7] * MOST, max_tokens=1, logprobs=20),
    completion(prompt=[7], max_tokens=MOST, logprobs=20),
    completion(prompt=[7], max_tokens=65000, logprobs=0),
    completion(prompt=[7], max_tokens=65000, logprobs=20, stream=True),
    completion(prompt=[7], max_tokens=65000, n=16),
    completion(prompt=[7] * MOST, max_tokens=0, logprobs=20, echo=True),
    chat(logprobs=True),
    chat(logprobs=True, top_logprobs=20, stream=True),
]


async def short(request: Request) -> AsyncGenerator[Delta, None]:
    yield Delta((7,), "x", (alternatives(7),), finish_reason=FinishReason.STOP)


async def test_a_reply_has_a_bound(tokenizer: Tokenizer) -> None:
    """(prompt + output tokens) x (alternatives + 1), over all choices; streamed output leaves as it comes."""
    async with client(tokenizer, short, WIDE) as (http, backend):
        for body, param in REFUSED:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            assert str(MAX_LOGPROBS) in assert_error(await http.post(path, json=body), 400, param)["message"]
        assert backend.requests == []
        for body in SERVED:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            assert (await http.post(path, json=body)).status_code == 200, str(body)[:200]

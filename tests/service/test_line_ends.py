"""One event is one line, for readers of every kind: characters that some of them take for the end of a line
are escaped."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from llm42.api import reply_writer
from llm42.errors import VerifierUnavailable
from llm42.protocol import Delta, FinishReason, Request, TokenLogprob
from llm42.text.tokenizer import Tokenizer
from tests.service.scripted import chat, client, completion

ENDS = "".join(
    c for c in map(chr, range(0x110000)) if not 0xD800 <= ord(c) < 0xE000 and len(f"a{c}b".splitlines()) > 1
)
HARD = f"a{ENDS}b\u00e9\U0001f600"
TOKENS = 3000
"""Enough for the way of large events, which is another one."""


def test_all_that_python_takes_for_a_line_end_is_known() -> None:
    assert set("\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029") == set(ENDS)
    text = reply_writer.event(json.dumps(HARD, ensure_ascii=False))
    assert len(text.splitlines()) == 2, "the event, and the empty line that ends it"
    assert json.loads(text.removeprefix("data: ")) == HARD


def spoken(large: bool, fails: bool = False) -> Any:
    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        ids = tuple([7] * (TOKENS if large else 2))
        scores = tuple(TokenLogprob(t, -1.0) for t in ids) if request.num_logprobs is not None else ()
        yield Delta(ids, HARD, scores)
        if fails:
            raise VerifierUnavailable(f"gone: {HARD}")
        yield Delta((8,), HARD, scores[:1], finish_reason=FinishReason.STOP)

    return script


async def lines_of(reply: httpx.Response) -> list[str]:
    """As httpx's `iter_lines` and every reader by `str.splitlines` see it."""
    lines = reply.text.splitlines()
    assert [line async for line in reply.aiter_lines()] == lines
    return [line for line in lines if line]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_text_and_prompt_in_a_stream(tokenizer: Tokenizer, path: str, large: bool) -> None:
    is_chat = "chat" in path
    body = chat(logprobs=True) if is_chat else completion(prompt=HARD, echo=True, logprobs=0)
    body |= {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1900}
    async with client(tokenizer, spoken(large)) as (http, _):
        lines = await lines_of(await http.post(path, json=body))
    assert all(line.startswith("data: ") for line in lines), "an event was cut"
    assert lines.pop() == "data: [DONE]"
    choices = [c for line in lines for c in json.loads(line[6:])["choices"]]
    texts = [c["delta"].get("content", "") if is_chat else c["text"] for c in choices]
    assert "".join(texts) == ("" if is_chat else HARD) + HARD * 2


async def test_errors_in_a_stream(tokenizer: Tokenizer) -> None:
    async with client(tokenizer, spoken(False, fails=True)) as (http, _):
        lines = await lines_of(await http.post("/v1/completions", json=completion(stream=True)))
    assert len(lines) == 3
    assert json.loads(lines[1][6:])["error"]["message"] == f"gone: {HARD}"

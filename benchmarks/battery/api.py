"""A client of any OpenAI endpoint that keeps what has to be equal, and a load beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = ("river", "stone", "lamp", "winter", "copper", "garden", "signal", "paper", "harbour", "violin")


class NotOffered(Exception):
    """The system does not have what the check needs; the text says what it answered."""


class Broken(Exception):
    """The rule is broken; the text says where."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice: all that a repeated request must give again, compared with `==`."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    finish: str | None
    ids: tuple[int, ...] = ()
    top: str = ""

    def difference(self, other: Answer) -> str:
        """In words, where two answers part."""
        if self.tokens != other.tokens or self.ids != other.ids or self.text != other.text:
            pairs = zip(self.ids or self.tokens, other.ids or other.tokens, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
            return f"other tokens from {at} on"
        if self.finish != other.finish:
            return f"finish_reason {self.finish} and {other.finish}"
        for i, (a, b) in enumerate(zip(self.logprobs, other.logprobs, strict=False)):
            if a != b:
                return f"same tokens, log-probability {i} is {a!r} and {b!r}"
        return "other alternatives" if self.top != other.top else "other numbers of log-probabilities"


@dataclass(slots=True)
class Reply:
    """A whole reply, or the events of a stream put together."""

    choices: list[Answer]
    fingerprint: str | None = None
    cached: int | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Api:
    """`extra`: fields that ask for determinism, if the system has such; the load is sent without them."""

    client: httpx.AsyncClient
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    tokens: int = 24
    load_size: int = 6

    def body(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A greedy completion with log-probabilities and token ids, unless `fields` say otherwise."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0}
        body |= {"logprobs": 0, "return_token_ids": True} | self.extra | fields
        return {key: value for key, value in body.items() if value is not None}

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises NotOffered for a refusal and Broken for an error of the server."""
        reply = await self.client.post(path, json=body)
        _judge(reply.status_code, reply.text)
        document: dict[str, Any] = reply.json()
        return document

    async def ask(self, prompt: Any, **fields: Any) -> Reply:
        """A whole completion."""
        return whole(await self.post("completions", self.body(prompt, **fields)))

    async def one(self, prompt: Any, **fields: Any) -> Answer:
        """The first choice of a whole completion."""
        return (await self.ask(prompt, **fields)).choices[0]

    async def chat(self, text: str, **fields: Any) -> str:
        """The text of a chat answer."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0}
        document = await self.post(
            "chat/completions", body | {"max_tokens": self.tokens} | self.extra | fields
        )
        return str(document["choices"][0]["message"]["content"])

    async def events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed completion."""
        async with self.client.stream("POST", "completions", json=body | {"stream": True}) as reply:
            if reply.status_code != 200:
                _judge(reply.status_code, (await reply.aread()).decode())
            async for line in reply.aiter_lines():
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise Broken(f"an error inside the stream: {str(event['error'])[:200]}")
                    yield event

    async def streamed(self, prompt: Any, **fields: Any) -> Reply:
        """A streamed completion of one choice, put together."""
        return joined([event async for event in self.events(self.body(prompt, **fields))])

    async def fingerprint(self) -> str | None:
        """What the system says of itself in a reply."""
        return (await self.ask("Hello", max_tokens=1)).fingerprint


def _judge(status: int, text: str) -> None:
    if 400 <= status < 500:
        raise NotOffered(f"refused with {status}: {text[:240]}")
    if status != 200:
        raise Broken(f"status {status}: {text[:240]}")


def _answer(choice: dict[str, Any]) -> Answer:
    scores = choice.get("logprobs") or {}
    return Answer(
        choice.get("text") or "",
        tuple(scores.get("tokens") or ()),
        tuple(scores.get("token_logprobs") or ()),
        choice.get("finish_reason"),
        tuple(choice.get("token_ids") or ()),
        json.dumps(scores.get("top_logprobs") or "", sort_keys=True),
    )


def whole(document: dict[str, Any]) -> Reply:
    """What has to be equal, out of a whole reply."""
    choices = sorted(document["choices"], key=lambda choice: int(choice["index"]))
    details = (document.get("usage") or {}).get("prompt_tokens_details") or {}
    ids = tuple(choices[0].get("prompt_token_ids") or ())
    answers = [_answer(choice) for choice in choices]
    return Reply(answers, document.get("system_fingerprint"), details.get("cached_tokens"), [], ids)


def joined(events: list[dict[str, Any]]) -> Reply:
    """The same out of a stream of one choice."""
    parts = [_answer(event["choices"][0]) for event in events if event.get("choices")]
    ends = [part.finish for part in parts if part.finish is not None]
    answer = Answer(
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.tokens),
        tuple(score for part in parts for score in part.logprobs),
        ends[-1] if ends else None,
        tuple(token for part in parts for token in part.ids),
        "",
    )
    return Reply([answer], next((e.get("system_fingerprint") for e in events), None), None, events)


async def _worker(api: Api, number: int, decoding: asyncio.Event, cut: bool) -> None:
    """Other people's requests, one after the other, of lengths that differ; `cut`: they leave early."""
    turn = refused = 0
    while True:
        words = [WORDS[(number + turn + i) % len(WORDS)] for i in range(5 + 37 * ((number + turn) % 4))]
        body = {"model": api.model, "prompt": " ".join(words), "max_tokens": 16 + 24 * (number % 3)}
        body |= {"temperature": 0.5 * (number % 3), "ignore_eos": True}
        seen = 0
        try:
            async for _ in api.events(body):
                decoding.set()
                seen += 1
                if cut and seen == 3:
                    break
        except NotOffered:
            refused += 1  # a full queue passes, an unknown field does not
            if refused == 20:
                raise
            await asyncio.sleep(0.1)
        turn += 1


@asynccontextmanager
async def load(api: Api, count: int | None = None, cut: bool = False) -> AsyncIterator[None]:
    """Entered when each of `count` requests has had a token; they go on until the block is left.

    Raises Broken when the load ended by itself: then the check was not beside a load.
    """
    count = api.load_size if count is None else count
    decoding = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(_worker(api, i, event, cut)) for i, event in enumerate(decoding)]
    try:
        started = asyncio.gather(*(event.wait() for event in decoding))
        await asyncio.wait([started, *tasks], return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        yield
        for task in tasks:
            if task.done():
                raise Broken(f"the load ended: {task.exception()!r}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

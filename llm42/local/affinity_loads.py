"""The loads under which `llm42 affinity` asks a fast path: decoding alone, and prompts that ride along.

A step of a serving engine holds the rows of those who decode and, whenever somebody comes, a chunk of a
prompt. Attention kernels may choose another order of sums for such a mixed step (FlashAttention 3 does at
head size 64), so a figure of requests that all start together says too little."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llm42.config import Settings
from llm42.errors import LLM42Error
from llm42.local.assembly import Local, Output, output_of
from llm42.local.demo import PROMPTS
from llm42.protocol import Request
from llm42.text.tokenizer import Tokenizer

SIZES = {"cpu": (8,), "cuda": (8, 64)}
"""Requests at a time, unless asked otherwise."""
ROUNDS = 2
"""Requests of a load, unless asked otherwise, in multiples of what is there at a time."""
BEFORE = (0, 3, 9, 1, 18, 0, 27)
"""How many other questions a prompt of the mixed load has before its own: 30 to 350 tokens or so."""
SHARES = (1.0, 0.5, 0.75, 0.25, 0.875)
"""Lengths of the mixed load's outputs, in shares of the longest: so they do not all end in one step."""


class TooMany(LLM42Error):
    """More requests at a time were asked for than the engine decodes."""

    code = "too_many"


@dataclass(frozen=True, slots=True)
class Load:
    """How requests meet the fast path."""

    kind: Literal["decode", "mixed"]
    """decode: they start together, and the next ones when all have ended. mixed: each starts as another ends,
    with prompts and outputs of several lengths."""
    concurrent: int
    requests: int

    def prompts(self, tokenizer: Tokenizer, room: int) -> list[list[int]]:
        """Of at most `room` tokens, if they can be made so short."""
        if self.kind == "decode":
            return chat_prompts(tokenizer, self.requests)
        return [_mixed_prompt(tokenizer, i, room) for i in range(self.requests)]

    def max_tokens(self, longest: int) -> list[int]:
        """The most tokens of each output."""
        if self.kind == "decode":
            return [longest] * self.requests
        return [max(1, int(longest * SHARES[i % len(SHARES)])) for i in range(self.requests)]


def loads_of(settings: Settings, concurrent: Sequence[int], requests: int | None) -> list[Load]:
    """What is measured: each number at a time, decoding alone and mixed. Raises TooMany."""
    most = settings.engine.places
    if too_many := [n for n in concurrent if n > most]:
        raise TooMany(f"--concurrent {too_many[0]}: the engine decodes {most} at a time: ask for fewer")
    sizes = concurrent or [n for n in SIZES[settings.model.device] if n <= most] or [most]
    return [Load(kind, n, requests or ROUNDS * n) for n in sizes for kind in ("decode", "mixed")]


async def answers(local: Local, load: Load, prompts: Sequence[Sequence[int]], longest: int) -> list[Output]:
    """What the fast path answers to greedy best-effort requests under this load, in their order."""
    gate = asyncio.Semaphore(load.concurrent)
    limits, name = load.max_tokens(longest), f"affinity-{load.kind}-{load.concurrent}"

    async def one(index: int) -> Output:
        request = Request(f"{name}-{index}", tuple(prompts[index]), limits[index], num_logprobs=0)
        async with gate:
            return await output_of(local.generate(request))

    found: list[Output] = []
    together = load.concurrent if load.kind == "decode" else load.requests
    for begin in range(0, load.requests, together):
        wave = range(begin, min(load.requests, begin + together))
        found += await asyncio.gather(*(one(i) for i in wave))
    return found


def chat_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """The demonstration's prompts, repeated with other endings as often as needed."""
    endings = ("", " Answer in detail.", " Keep it short and simple.", " Give an example.")
    texts = [PROMPTS[i % len(PROMPTS)] + endings[i // len(PROMPTS) % len(endings)] for i in range(count)]
    return [_chat(tokenizer, text) for text in texts]


def _mixed_prompt(tokenizer: Tokenizer, index: int, room: int) -> list[int]:
    """A question behind some others, whose order is its own: so no prefix of it is in a cache."""
    before = BEFORE[index % len(BEFORE)]
    while True:
        others = [PROMPTS[(index * 7 + k) % len(PROMPTS)] for k in range(before)]
        prompt = _chat(tokenizer, " ".join([f"Number {index}.", *others, PROMPTS[index % len(PROMPTS)]]))
        if len(prompt) <= room or before == 0:
            return prompt
        before //= 2


def _chat(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}]))

"""What clients of the service do: questions that are compared with the oracle, and noise beside them."""

from __future__ import annotations

import asyncio
import random
from typing import Any, NamedTuple

import openai

from llm42.protocol import Request, SamplingParams
from tests.support import Lab


class Answer(NamedTuple):
    """What must be equal, with ==: ids, and log-probabilities as floats (tests.support.Answer.sent)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "presence_penalty": 0.5},
)
"""Greedy, sampled, and with the stages that restrict and penalise."""


def oracle(served: Lab, prompt: list[int], fields: dict[str, Any], tokens: int) -> Answer:
    """The right answer to a completion with these sampling fields."""
    request = Request("oracle", tuple(prompt), tokens, SamplingParams(**fields), True, num_logprobs=0)
    return Answer(*served.oracle(request).sent)


async def ask(
    client: openai.AsyncOpenAI, model: str, prompt: list[int], tokens: int, **extra: object
) -> tuple[Answer, dict[str, object]]:
    """One completion over HTTP with ids and log-probabilities, and its `llm42` object."""
    body = {"return_token_ids": True, "ignore_eos": True, **extra}
    reply = await client.completions.create(
        model=model, prompt=prompt, max_tokens=tokens, logprobs=0, extra_body=body
    )
    choice = reply.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    extra_fields = choice.model_extra or {}
    answer = Answer(
        tuple(extra_fields["token_ids"]), tuple(float(p or 0) for p in choice.logprobs.token_logprobs)
    )
    return answer, (reply.model_extra or {})["llm42"]


async def noise(client: openai.AsyncOpenAI, model: str, seed: int, requests: int, longest: int = 300) -> None:
    """Unrelated best-effort requests: prompts of 5 to `longest` tokens, outputs of 8 to 48 (beside shorter
    prompts shorter), mixed temperatures."""
    rng = random.Random(seed)

    async def one() -> None:
        await asyncio.sleep(rng.random() * 3)
        await client.completions.create(
            model=model,
            prompt=[rng.randrange(2, 500) for _ in range(rng.randrange(5, longest))],
            max_tokens=rng.randrange(8, 8 + 2 * longest // 15),
            temperature=rng.choice([0.0, 0.7, 1.3]),
            extra_body={"ignore_eos": True},
        )

    await asyncio.gather(*(one() for _ in range(requests)))

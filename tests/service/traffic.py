"""What clients of the service do: questions that are compared with the oracle, and noise beside them."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import openai


class Answer(NamedTuple):
    """What must be equal, with ==: ids, and log-probabilities as floats (tests.support.Answer.sent)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


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

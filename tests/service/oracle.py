"""The oracle: the verifier alone, one token at a time, no fast path. And noise: best-effort traffic."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import openai

from llm42.protocol import Commit, SamplingParams, Window
from llm42.verifier.scheduler import Verifier
from tests.support import verified


@dataclass(frozen=True, slots=True)
class Answer:
    """What must be equal, with ==: ids, and log-probabilities as floats."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def decode_alone(verifier: Verifier, prompt: list[int], sampling: SamplingParams, tokens: int) -> Answer:
    """`tokens` canonical tokens after `prompt` (which must not meet an end token)."""
    output: list[int] = []
    logprobs: list[float] = []
    for _ in range(tokens):
        window = Window("oracle", (*prompt, *output), len(prompt), (), sampling)
        (commit,) = verified(verifier, window)
        assert isinstance(commit, Commit), commit
        output.append(commit.next_token)
        logprobs.append(commit.logprobs[0].logprob)
    verifier.release("oracle")
    return Answer(tuple(output), tuple(logprobs))


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


async def noise(client: openai.AsyncOpenAI, model: str, seed: int, requests: int) -> None:
    """Unrelated best-effort requests: prompts of 5 to 300 tokens, outputs of 8 to 48, mixed temperatures."""
    rng = random.Random(seed)

    async def one() -> None:
        await asyncio.sleep(rng.random() * 3)
        await client.completions.create(
            model=model,
            prompt=[rng.randrange(2, 500) for _ in range(rng.randrange(5, 300))],
            max_tokens=rng.randrange(8, 48),
            temperature=rng.choice([0.0, 0.7, 1.3]),
            extra_body={"ignore_eos": True},
        )

    await asyncio.gather(*(one() for _ in range(requests)))

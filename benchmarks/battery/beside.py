"""Checks: the same request alone and beside others."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.battery.api import Answer, Api, NotOffered, joined, load
from benchmarks.battery.registry import check, same

PROMPT = "The old lighthouse keeper wrote in his diary that"
LONG = " ".join(f"Note {i}: the tide was high and the wind came from the north." for i in range(40))


@check("alone, a request repeats", "vllm#7779")
async def repeated(api: Api) -> str:
    first = await api.one(PROMPT)
    return f"{same(first, [await api.one(PROMPT) for _ in range(3)], 'alone')} repeats"


@check("a request is the same alone and beside other people's", "vllm#4091, vllm#9567, batch_invariant_ops#2")
async def beside_load(api: Api) -> str:
    alone = await api.one(PROMPT)
    async with load(api):
        answers = [await api.one(PROMPT) for _ in range(3)]
    return f"{same(alone, answers, 'beside a load')} answers beside {api.load_size}"


@check("many equal requests at once have one answer", "vllm#4091, llama.cpp#7052")
async def equal_at_once(api: Api) -> str:
    alone = await api.one(PROMPT)
    answers = await asyncio.gather(*(api.one(PROMPT) for _ in range(12)))
    return f"{same(alone, answers, 'at once')} at once"


@check("the number of neighbours does not matter", "vllm#9567, vllm#2008")
async def batch_sizes(api: Api) -> str:
    alone, compared = await api.one(PROMPT), 0
    for count in (1, 2, 3, 8):
        async with load(api, count):
            compared += same(alone, [await api.one(PROMPT)], f"beside {count}")
    return f"beside 1, 2, 3 and 8: {compared} answers"


@check("a list of equal prompts has equal answers, those of the single call", "TensorRT-LLM#1879")
async def list_of_prompts(api: Api) -> str:
    alone = await api.one(PROMPT)
    return f"{same(alone, (await api.ask([PROMPT] * 6)).choices, 'in a list')} choices"


def _longer(api: Api) -> dict[str, Any]:
    """Long enough that a server which sends several tokens at a time still has some to decode."""
    return api.body(PROMPT, max_tokens=4 * api.tokens, ignore_eos=True)


async def _decoded_while_a_long_prompt_joins(api: Api, at: int) -> Answer:
    """The answer of a stream, `at` of whose events had come when a long prompt was sent."""
    events, tasks = [], []
    async for event in api.events(_longer(api)):
        events.append(event)
        if len(events) == at:
            tasks.append(asyncio.create_task(api.one(LONG, max_tokens=2)))
    if not tasks:
        raise NotOffered(f"the stream has only {len(events)} events, so nothing joined it")
    await asyncio.gather(*tasks)
    return joined(events).choices[0]


@check("a long prompt that joins does not flip a decoding neighbour", "vllm#51902")
async def long_prompt_joins(api: Api) -> str:
    alone = joined([event async for event in api.events(_longer(api))]).choices[0]
    answers = [await _decoded_while_a_long_prompt_joins(api, at) for at in (1, 2)]
    return f"{same(alone, answers, 'a long prompt joined')} streams"


@check("a long prompt is the same in one piece and beside others", "vllm#5952, sglang PR #28063")
async def long_prompt_beside_load(api: Api) -> str:
    alone = await api.one(LONG, cache_salt="a", max_tokens=8)
    async with load(api):
        answers = [await api.one(LONG, cache_salt=f"b{i}", max_tokens=8) for i in range(2)]
    return f"{same(alone, answers, 'long prompt')} answers"

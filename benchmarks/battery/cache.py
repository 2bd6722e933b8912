"""Checks: caches, order, scores of prompts, what happened before."""

from __future__ import annotations

import asyncio

from benchmarks.battery.api import Api, Broken, NotOffered, load
from benchmarks.battery.beside import LONG, PROMPT
from benchmarks.battery.registry import check, same


@check("a prefix in the cache changes nothing", "vllm#40896, vllm#7845, sglang#34683")
async def cache_hit(api: Api) -> str:
    prompt = f"{LONG} In short,"
    cold = await api.ask(prompt, cache_salt="cold 1")
    warm = [await api.ask(prompt, cache_salt="cold 1") for _ in range(2)]
    other = await api.ask(prompt, cache_salt="cold 2")
    same(cold.choices[0], [reply.choices[0] for reply in (*warm, other)], "cold and warm")
    if not warm[0].cached:
        raise NotOffered(f"no difference seen, but no hit was shown (cached_tokens: {warm[0].cached})")
    return f"{warm[0].cached} tokens were in the cache"


@check("what others left in the cache changes nothing", "vllm#5543, sglang#22819")
async def shared_prefix(api: Api) -> str:
    cold = await api.ask(f"{LONG} In short,", cache_salt="shared 1")
    await api.ask(f"{LONG} Nobody knew", cache_salt="shared 2", max_tokens=4)
    warm = await api.ask(f"{LONG} In short,", cache_salt="shared 2")
    same(cold.choices[0], [warm.choices[0]], "beside a cold one")
    if not warm.cached:
        raise NotOffered(f"no difference seen, but no hit was shown (cached_tokens: {warm.cached})")
    return f"{warm.cached} tokens were in the cache"


@check("the order of requests does not matter", "vllm#7845, llama.cpp#2838")
async def order(api: Api) -> str:
    prompts = [f"{PROMPT} on day {i}" for i in range(4)]
    forward = [await api.one(p, cache_salt="forward") for p in prompts]
    backward = [await api.one(p, cache_salt="backward") for p in reversed(prompts)]
    for first, second in zip(forward, reversed(backward), strict=True):
        same(first, [second], "in another order")
    return "4 prompts in 2 orders"


@check("log-probabilities of an echoed prompt do not depend on the load", "sglang PR #28063")
async def echo_beside_load(api: Api) -> str:
    fields = {"echo": True, "max_tokens": 1, "logprobs": 0}
    alone = await api.one(LONG[:600], **fields)
    async with load(api):
        answers = [await api.one(LONG[:600], **fields) for _ in range(3)]
    return f"{same(alone, answers, 'echoed')} answers of {len(alone.logprobs)} log-probabilities"


@check("tokens have the same log-probabilities decoded and scored again", "slime#492, vllm#48305")
async def scored_again(api: Api) -> str:
    reply = await api.ask(PROMPT)
    decoded, prompt = reply.choices[0], reply.prompt_ids
    if not decoded.ids or not prompt:
        raise NotOffered("the reply has no token ids, so its tokens cannot be sent back exactly")
    again = await api.one([*prompt, *decoded.ids], echo=True, max_tokens=1, logprobs=0)
    scores = again.logprobs[len(prompt) : len(prompt) + len(decoded.ids)]
    pairs = list(zip(decoded.logprobs, scores, strict=True))
    wrong = [(a, b) for a, b in pairs if a != b]
    if wrong:
        gap = max(abs(a - b) for a, b in wrong if a is not None and b is not None)
        raise Broken(f"{len(wrong)} of {len(pairs)} log-probabilities differ, by up to {gap:.1e}")
    return f"{len(pairs)} log-probabilities"


@check("neighbours that leave early change nothing", "vllm#54947, ray#39703")
async def aborted_neighbours(api: Api) -> str:
    alone = await api.one(PROMPT)
    async with load(api, cut=True):
        answers = [await api.one(PROMPT) for _ in range(3)]
    return f"{same(alone, answers, 'beside requests that are cut')} answers"


@check("odd requests leave nothing behind", "tt-metal#55408")
async def odd_requests(api: Api) -> str:
    before, refused = await api.one(PROMPT), 0
    for fields in ({"max_tokens": 10**7}, {"temperature": -3}, {"n": 0}, {"stop": 5}, {"prompt": [2**40]}):
        reply = await api.client.post("completions", json=api.body(PROMPT) | fields)
        refused += 400 <= reply.status_code < 500
        if reply.status_code >= 500:
            raise Broken(f"{fields}: status {reply.status_code}")
    cut = [asyncio.create_task(api.one(LONG, max_tokens=200)) for _ in range(2)]
    await asyncio.sleep(0.2)
    for task in cut:
        task.cancel()
    await asyncio.gather(*cut, return_exceptions=True)
    same(before, [await api.one(PROMPT)], "after odd requests")
    return f"{refused} of 5 refused, 2 cut"


@check("longer answers are equal to their end, log-probabilities too", "vllm PR #32480, vllm#7779")
async def longer_answer(api: Api) -> str:
    fields = {"max_tokens": 6 * api.tokens, "ignore_eos": True}
    alone = await api.one(PROMPT, **fields)
    async with load(api):
        answers = [await api.one(PROMPT, **fields)]
    same(alone, answers, "longer")
    return f"{len(alone.logprobs)} tokens"


@check("alternatives of log-probabilities do not depend on the load", "vllm#7779, vllm PR #45683")
async def alternatives_beside_load(api: Api) -> str:
    alone = await api.one(PROMPT, logprobs=5)
    if len(alone.top) < 10:
        raise NotOffered("the reply has no alternatives")
    async with load(api):
        answers = [await api.one(PROMPT, logprobs=5) for _ in range(2)]
    return f"{same(alone, answers, 'alternatives')} answers"

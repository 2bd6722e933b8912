"""Checks: seeds and sampling."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.battery.api import Api, Broken, NotOffered, load
from benchmarks.battery.beside import PROMPT
from benchmarks.battery.registry import check, same

HOT: dict[str, Any] = {"temperature": 1.0}
FIELDS: tuple[dict[str, Any], ...] = (
    {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.05}, {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"logit_bias": {"300": 5}},
)  # fmt: skip


@check("a seed repeats, and other seeds give other texts: completions", "sglang#15481, vllm#21310")
async def seeds_repeat(api: Api) -> str:
    first = [await api.one(PROMPT, **HOT, seed=seed) for seed in range(5)]
    for seed, answer in enumerate(first):
        same(answer, [await api.one(PROMPT, **HOT, seed=seed)], f"seed {seed}")
    if len({answer.text for answer in first}) < 4:
        raise Broken("different seeds give the same text: the seed is not used")
    return "5 seeds, each twice"


@check("a seed repeats, and other seeds give other texts: chat", "sglang#15481")
async def seeds_repeat_in_chat(api: Api) -> str:
    texts = [[await api.chat("Tell me of the sea.", **HOT, seed=seed) for seed in range(3)] for _ in range(2)]
    if texts[0] != texts[1]:
        raise Broken("a seed does not repeat")
    if len(set(texts[0])) < 3:
        raise Broken("different seeds give the same text: the seed is not used")
    return "3 seeds, each twice"


@check("a seed repeats beside requests without one", "sglang#5377, vllm#51226")
async def seed_beside_load(api: Api) -> str:
    alone = await api.one(PROMPT, **HOT, seed=7)
    async with load(api):
        answers = [await api.one(PROMPT, **HOT, seed=7) for _ in range(4)]
    return f"{same(alone, answers, 'seed 7 beside a load')} answers"


@check("seeds at once do not mix", "tensorrtllm_backend#468, mlxcel PR #356")
async def seeds_at_once(api: Api) -> str:
    alone = [await api.one(PROMPT, **HOT, seed=seed) for seed in range(8)]
    together = await asyncio.gather(*(api.one(PROMPT, **HOT, seed=seed) for seed in range(8)))
    for seed in range(8):
        same(alone[seed], [together[seed]], f"seed {seed} among 8")
    return "8 seeds"


@check("every field of sampling repeats with a seed", "vllm#16945")
async def sampling_fields(api: Api) -> str:
    refused, alone = [], {}
    for i, fields in enumerate(FIELDS):
        try:
            alone[i] = await api.one(PROMPT, **HOT, seed=3, **fields)
        except NotOffered:
            refused += fields
    async with load(api):
        for i, answer in alone.items():
            same(answer, [await api.one(PROMPT, **HOT, seed=3, **FIELDS[i])], str(FIELDS[i]))
    return f"{len(alone)} fields; refused: {', '.join(refused) or 'none'}"


@check("the choices of n repeat, and differ among themselves", "vllm#966, sglang#5377")
async def n_choices(api: Api) -> str:
    alone = (await api.ask(PROMPT, **HOT, seed=11, n=4)).choices
    async with load(api):
        again = (await api.ask(PROMPT, **HOT, seed=11, n=4)).choices
    for i, (a, b) in enumerate(zip(alone, again, strict=True)):
        same(a, [b], f"choice {i}")
    if len({answer.text for answer in alone}) < 3:
        raise Broken("the choices are the same text")
    return "4 choices"


@check("without a seed, ordinary requests vary", "vllm#11953, mlx-vlm#1818")
async def unseeded_vary(api: Api) -> str:
    plain = Api(api.client, api.model, {}, api.tokens, api.load_size)
    texts = {(await plain.one(PROMPT, **HOT)).text for _ in range(6)}
    if len(texts) < 5:
        raise Broken(f"{len(texts)} texts of 6")
    return f"{len(texts)} texts of 6"

"""Rows of the collected field reports (what users of deterministic serving trip over) as tests of the
service: two replicas that also propose wrong tokens, beside noise. Sizes fit two CPU cores; on a real model
they are smaller."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer
from llm42_serve.launch import Service
from tests.service.served import on_the_tiny_model_only
from tests.service.traffic import Answer, ask, noise

pytestmark = pytest.mark.service


class Sizes(NamedTuple):
    """How much of everything."""

    tokens: int = 24
    noise: int = 3
    longest_noise: int = 150
    one_by_one: int = 4
    at_once: int = 12
    fillers: tuple[int, ...] = (1, 11)
    long: int = 1000
    lists: tuple[int, ...] = (4, 12)
    rounds: int = 2
    sentences: int = 25
    scorings: int = 3
    seeds: int = 6


SIZES = {"tiny": Sizes(), "real": Sizes(12, 2, 60, 2, 8, (1, 7), 400, (4,), 2, 10, 3, 5)}


@pytest.fixture(scope="module")
def model(settings: Settings) -> str:
    return settings.model.name


def sizes_for(model: str) -> Sizes:
    return SIZES["tiny" if model == "tiny" else "real"]


@pytest.fixture(scope="module")
def tokenizer(settings: Settings) -> Tokenizer:
    """The served model's."""
    return Tokenizer.load(settings.model.path)


def prompt_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)


async def many(
    aclient: openai.AsyncOpenAI, model: str, prompts: list[list[int]], tokens: int = 0, **fields: Any
) -> list[Answer]:
    """Deterministic answers to prompts that are sent at once, beside noise."""
    sizes = sizes_for(model)
    beside = asyncio.create_task(noise(aclient, model, len(prompts), sizes.noise, sizes.longest_noise))
    found = await asyncio.gather(
        *(ask(aclient, model, p, tokens or sizes.tokens, deterministic=True, **fields) for p in prompts)
    )
    await beside
    return [answer for answer, _ in found]


async def alone(aclient: openai.AsyncOpenAI, model: str, prompt: list[int], **fields: Any) -> Answer:
    tokens = fields.pop("tokens", sizes_for(model).tokens)
    return (await ask(aclient, model, prompt, tokens, deterministic=True, **fields))[0]


async def test_r2_sequential_and_concurrent_are_one_answer(
    aclient: openai.AsyncOpenAI, model: str, tokenizer: Tokenizer
) -> None:
    """Calls one after the other, and many at once: one output, and one set of floats to the end."""
    prompt, sizes = prompt_of(tokenizer, "Once upon a time there was"), sizes_for(model)
    found = [await alone(aclient, model, prompt, temperature=0) for _ in range(sizes.one_by_one)]
    found += await many(aclient, model, [prompt] * sizes.at_once, temperature=0)
    assert len(set(found)) == 1


@on_the_tiny_model_only
async def test_r4_the_batch_size_does_not_matter(
    aclient: openai.AsyncOpenAI, model: str, tokenizer: Tokenizer
) -> None:
    """The needle alone, beside a few and many fillers, and beside a long prefill."""
    needle, sizes = prompt_of(tokenizer, "The best way to learn is"), sizes_for(model)
    want = await alone(aclient, model, needle, temperature=0)
    for fillers in sizes.fillers:
        others = [prompt_of(tokenizer, f"Story number {i}:") for i in range(fillers)]
        assert (await many(aclient, model, [needle, *others], temperature=0))[0] == want
    long = prompt_of(tokenizer, "word " * sizes.long)[: sizes.long]
    beside = asyncio.create_task(ask(aclient, model, long, 4))
    assert await alone(aclient, model, needle, temperature=0) == want
    await beside


@on_the_tiny_model_only
async def test_r11_a_list_of_equal_prompts(
    aclient: openai.AsyncOpenAI, model: str, tokenizer: Tokenizer
) -> None:
    """One request with a list of prompts: all choices equal, and equal to the single call."""
    prompt = prompt_of(tokenizer, "My favourite colour is")
    want = await alone(aclient, model, prompt, temperature=0)
    for count in sizes_for(model).lists:
        reply = await aclient.completions.create(
            model=model, prompt=[prompt] * count, max_tokens=len(want.tokens), temperature=0, logprobs=0,
            extra_body={"deterministic": True, "return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        got = {
            (
                tuple((c.model_extra or {})["token_ids"]),
                tuple((c.logprobs and c.logprobs.token_logprobs) or ()),
            )
            for c in reply.choices
        }
        assert got == {(want.tokens, want.logprobs)}


async def test_r14_first_and_later_calls_agree_and_the_cache_is_used(
    aclient: openai.AsyncOpenAI, model: str, tokenizer: Tokenizer
) -> None:
    """Cold, warm, and after others that share its prefix; the hits are proven."""
    shared = "In the year 1911 a small ship left the harbour with a crew of nine and a cat. " * 4
    prompt, sizes = prompt_of(tokenizer, shared + "The cat"), sizes_for(model)
    first, evidence = await ask(aclient, model, prompt, sizes.tokens, deterministic=True, temperature=0)
    seen = [int(str(evidence["cached_prompt_tokens"]))]
    for i in range(sizes.rounds):
        await alone(aclient, model, prompt_of(tokenizer, shared + f"Number {i}"), temperature=0)
        again, evidence = await ask(aclient, model, prompt, sizes.tokens, deterministic=True, temperature=0)
        assert again == first
        seen.append(int(str(evidence["cached_prompt_tokens"])))
    assert seen[0] == 0, "the first call was not cold"
    assert min(seen[1:]) >= 48, "the cache was not used"


@on_the_tiny_model_only
async def test_r15_the_order_of_prompts_with_a_shared_prefix(
    aclient: openai.AsyncOpenAI, model: str, tokenizer: Tokenizer
) -> None:
    """Prefixes of B - 1, B, B + 1 and 2B tokens (B is the block size), in two orders."""
    base = prompt_of(tokenizer, "one two three four five six seven eight nine ten " * 8)
    prompts = [base[:n] + tail for n in (15, 16, 17, 32) for tail in (base[-3:], base[-5:-1])]
    forward = [await alone(aclient, model, p, tokens=8, temperature=0) for p in prompts]
    backward = [await alone(aclient, model, p, tokens=8, temperature=0) for p in reversed(prompts)]
    assert forward == backward[::-1]


@on_the_tiny_model_only
async def test_r22_long_prompts_at_several_concurrencies(
    aclient: openai.AsyncOpenAI, model: str, tokenizer: Tokenizer
) -> None:
    """Where chunks end moves with the load; the prompt's own log-probabilities do not."""
    sizes = sizes_for(model)
    prompt = prompt_of(tokenizer, "The quick brown fox jumps over the lazy dog. " * sizes.sentences)

    async def scores() -> list[float]:
        reply = await aclient.completions.create(
            model=model, prompt=prompt, max_tokens=0, logprobs=0, echo=True,
            extra_body={"deterministic": True},
        )  # fmt: skip
        assert reply.choices[0].logprobs
        found = list(reply.choices[0].logprobs.token_logprobs or [])
        assert found[0] is None
        assert len(found) == len(prompt)
        return found[1:]

    want = await scores()
    assert len(set(want)) > 20
    for got in await asyncio.gather(*(scores() for _ in range(sizes.scorings))):
        assert got == want


@on_the_tiny_model_only
async def test_r24_a_command_line_that_can_be_published(
    service: Service, model: str, client: openai.OpenAI
) -> None:
    """Curl with a seed, twice, and the openai client: one text."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = {"model": model, "prompt": "A haiku:", "seed": 123, "temperature": 0.5, "deterministic": True}

    def run() -> str:
        command = [curl, "-s", f"{service.url}/v1/completions", "-H", "Content-Type: application/json"]
        done = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, check=True)
        return str(json.loads(done.stdout)["choices"][0]["text"])

    texts = {await asyncio.to_thread(run) for _ in range(2)}
    reply = client.completions.create(
        model=model, prompt="A haiku:", seed=123, temperature=0.5, extra_body={"deterministic": True}
    )
    assert texts == {reply.choices[0].text}


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_r26_seeds_work_on_both_routes(
    aclient: openai.AsyncOpenAI, model: str, path: str, service: Service
) -> None:
    """Seeds at once, twice: each repeats, and all but one differ at least."""
    seeds = sizes_for(model).seeds

    async def one(seed: int) -> str:
        fields: Any = {"model": model, "seed": seed, "temperature": 1.5, "max_tokens": 12}
        extra = {"deterministic": True}
        if path == "chat":
            talk: Any = [{"role": "user", "content": "Say something."}]
            chat = await aclient.chat.completions.create(messages=talk, extra_body=extra, **fields)
            return chat.choices[0].message.content or ""
        reply = await aclient.completions.create(prompt="Something:", extra_body=extra, **fields)
        return reply.choices[0].text

    first, second = [await asyncio.gather(*(one(s) for s in range(seeds))) for _ in range(2)]
    assert first == second
    assert len(set(first)) >= seeds - 1


@on_the_tiny_model_only
async def test_r27_a_seed_beside_unseeded_neighbours(
    aclient: openai.AsyncOpenAI, model: str, tokenizer: Tokenizer
) -> None:
    """Seeded sampling under noise is what it is alone."""
    prompt = prompt_of(tokenizer, "The weather today")
    want = await alone(aclient, model, prompt, temperature=1.0, seed=42)
    assert set(await many(aclient, model, [prompt] * 6, temperature=1.0, seed=42)) == {want}
    assert await alone(aclient, model, prompt, temperature=1.0, seed=43) != want


@on_the_tiny_model_only
async def test_r28_unflagged_unseeded_calls_differ(aclient: openai.AsyncOpenAI, model: str) -> None:
    """Nobody asked for sameness: 12 calls give many texts. The control of the test below, too."""
    calls = [
        aclient.completions.create(model=model, prompt="Invent a word:", temperature=1.2, max_tokens=12)
        for _ in range(12)
    ]
    assert len({r.choices[0].text for r in await asyncio.gather(*calls)}) >= 10


@on_the_tiny_model_only
async def test_r29_the_seed_that_was_chosen_comes_back_and_replays(
    aclient: openai.AsyncOpenAI, model: str, settings: Settings, tokenizer: Tokenizer
) -> None:
    """Without a seed the documented one is used and returned, and replays. Seeds at the edges are
    used and echoed, or refused."""
    prompt = prompt_of(tokenizer, "A new idea:")
    tokens = sizes_for(model).tokens
    found, evidence = await ask(aclient, model, prompt, tokens, deterministic=True, temperature=1.0)
    assert evidence["seed"] == settings.server.default_seed
    assert await alone(aclient, model, prompt, temperature=1.0, seed=evidence["seed"]) == found
    answers = set()
    for seed in (0, -1, 2**31 - 1, -(2**63), 2**63 - 1, 2**64 - 2):
        got, evidence = await ask(aclient, model, prompt, 8, deterministic=True, temperature=1.0, seed=seed)
        assert evidence["seed"] == seed
        answers.add(got)
    assert len(answers) >= 4
    with pytest.raises(openai.BadRequestError, match="seed"):
        await ask(aclient, model, prompt, 8, deterministic=True, seed=2**64)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.05}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3}, {"logit_bias": {"28": 8, "30": -100}}, {"min_tokens": 5},
    ],
    ids=lambda f: next(iter(f)),
)  # fmt: skip
@on_the_tiny_model_only
async def test_r33_every_sampling_field_is_repeatable(
    aclient: openai.AsyncOpenAI, model: str, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    """With a seed under noise; and the field is not ignored, or its answer would be the plain one's."""
    prompt = prompt_of(tokenizer, "List of things:")
    plain: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    tokens = 48
    if "penalty" in next(iter(fields)):  # the tiny model repeats little by itself
        plain["logit_bias"] = {"28": 8}
    found = await many(aclient, model, [prompt] * 3, tokens, **plain, **fields)
    assert len(set(found)) == 1
    if "min_tokens" not in fields and "min_p" not in fields:
        assert await alone(aclient, model, prompt, tokens=tokens, **plain) != found[0]


@on_the_tiny_model_only
async def test_r39_one_fingerprint_over_many_calls(
    aclient: openai.AsyncOpenAI, model: str, service: Service
) -> None:
    """Constant within a build, and the one that /health names."""
    calls = [
        aclient.completions.create(model=model, prompt="x", max_tokens=2, extra_body={"deterministic": True})
        for _ in range(20)
    ]
    found = {r.system_fingerprint for r in await asyncio.gather(*calls)}
    assert found == {service.health()["fingerprint"]}


@on_the_tiny_model_only
async def test_r42_wrong_streams_have_a_status(service: Service, model: str) -> None:
    """An over-long prompt, a bad n, a bad type, all with stream: 4xx before any chunk."""
    wrong: list[dict[str, Any]] = [{"prompt": [1] * 5000}, {"n": 0}, {"temperature": "hot"}, {"best_of": 3}]
    async with httpx.AsyncClient(timeout=300) as http:
        for fields in wrong:
            body = {"model": model, "prompt": "x", "stream": True, **fields}
            reply = await http.post(f"{service.url}/v1/completions", json=body)
            assert reply.status_code == 400
            assert reply.headers["content-type"].startswith("application/json")


async def test_r53_a_rollout_can_be_scored_again(
    aclient: openai.AsyncOpenAI, model: str, tokenizer: Tokenizer
) -> None:
    """Ids and log-probabilities come back; prompt + output, scored as a prompt, has the same floats."""
    prompt = prompt_of(tokenizer, "Question: why is the sky blue? Answer:")
    out = await alone(aclient, model, prompt, temperature=1.0, seed=3)
    reply = await aclient.completions.create(
        model=model, prompt=[*prompt, *out.tokens], max_tokens=0, logprobs=0, echo=True,
        extra_body={"deterministic": True},
    )  # fmt: skip
    assert reply.choices[0].logprobs
    found = (reply.choices[0].logprobs.token_logprobs or [])[len(prompt) :]
    assert tuple(found) == out.logprobs


@on_the_tiny_model_only
async def test_r55_an_idle_server_says_so(service: Service, model: str, aclient: openai.AsyncOpenAI) -> None:
    """After cut streams and finished requests nothing runs, waits or holds KV; survivors are
    what they would have been."""
    body = {"model": model, "prompt": "Once", "max_tokens": 800, "stream": True, "ignore_eos": True}

    async def leave(i: int) -> None:
        fields = body | {"deterministic": bool(i % 2)}
        async with (
            httpx.AsyncClient(timeout=300) as http,
            http.stream("POST", f"{service.url}/v1/completions", json=fields) as reply,
        ):
            async for _ in reply.aiter_lines():
                return

    want = await alone(aclient, model, [195, 28], temperature=0)
    survivors = [asyncio.create_task(alone(aclient, model, [195, 28], temperature=0)) for _ in range(4)]
    await asyncio.gather(*(leave(i) for i in range(10)))
    assert {await s for s in survivors} == {want}
    deadline = time.monotonic() + 10
    while True:
        states = [await asyncio.to_thread(service.health) for _ in range(8)]
        if not any(s[k] for s in states for k in ("running", "waiting", "queued", "kv_used")):
            break
        assert time.monotonic() < deadline, states
        await asyncio.sleep(0.2)

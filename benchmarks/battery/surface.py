"""Checks: streams, errors, fingerprints, and what a restart changes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.battery.api import Answer, Api, Broken, NotOffered, load
from benchmarks.battery.beside import PROMPT
from benchmarks.battery.registry import check, same


@check("a stream and a whole reply are the same, log-probabilities too", "mlx-lm PR #1630, sglang PR #21583")
async def streamed_and_whole(api: Api) -> str:
    whole = replace(await api.one(PROMPT), top="")
    parts = (await api.streamed(PROMPT)).choices
    async with load(api, 3):
        parts += (await api.streamed(PROMPT)).choices
    return f"{same(whole, parts, 'streamed')} streams of {len(whole.logprobs)} tokens"


@check(
    "a stream has no empty text before the first, and null finish_reason until the end",
    "vllm#13087, sglang#3912",
)
async def chunks(api: Api) -> str:
    body = api.body(PROMPT, stop=["\nUser:"], logprobs=None, return_token_ids=None)
    events = [e async for e in api.events(body) if e.get("choices")]
    choices = [event["choices"][0] for event in events]
    if any(choice.get("finish_reason") is not None for choice in choices[:-1]):
        raise Broken("finish_reason is not null before the last chunk")
    if choices[-1]["finish_reason"] not in ("stop", "length"):
        raise Broken(f"the last finish_reason is {choices[-1]['finish_reason']!r}")
    if not choices[0].get("text"):
        raise Broken("the first chunk has no text")
    return f"{len(choices)} chunks"


@check("a wrong request is refused before a stream begins", "llama.cpp#14566")
async def errors_before_streams(api: Api) -> str:
    wrong = ({"prompt": "word " * 100_000}, {"n": 0}, {"temperature": "hot"})
    for fields in wrong:
        reply = await api.client.post("completions", json=api.body(PROMPT) | {"stream": True} | fields)
        if not 400 <= reply.status_code < 500:
            raise Broken(f"{next(iter(fields))}: status {reply.status_code}")
    return f"{len(wrong)} requests"


@check("replies have a fingerprint, which stays", "cookbook on seed, eesel.ai on system_fingerprint")
async def fingerprint(api: Api) -> str:
    seen = {await api.fingerprint() for _ in range(4)}
    if seen == {None}:
        raise NotOffered("system_fingerprint is null")
    if len(seen) > 1:
        raise Broken(f"{len(seen)} fingerprints in 4 replies")
    return f"{seen.pop()}"


def restart_check(before: Path | None, after: Path | None) -> None:
    """Adds the check of two halves: before a restart answers are written, after it compared."""
    if before is None and after is None:
        return

    @check(
        "a restarted server gives the same answers, from its first one on",
        "vllm#40896, vllm#21310, rtx3090#75",
    )
    async def restart(api: Api) -> str:
        answers = [await api.one(PROMPT), await api.one(PROMPT, temperature=1.0, seed=5)]
        if before is not None:
            before.write_text(json.dumps([asdict(answer) for answer in answers]))
            return "kept for the run after the restart"
        assert after is not None
        for old, new in zip(_read(after), answers, strict=True):
            same(old, [new], "after a restart")
        return f"{len(answers)} answers"


def _read(file: Path) -> list[Answer]:
    kept = json.loads(file.read_text())
    return [
        Answer(**{k: tuple(v) if isinstance(v, list) else v for k, v in answer.items()}) for answer in kept
    ]

"""The `generate` command: one prompt answered in this process."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import asdict

from rich.console import Console

from llm42.cli.progress import Steps
from llm42.config import Settings
from llm42.errors import RequestRejected
from llm42.local.assembly import Local
from llm42.protocol import Request, RequestStats, SamplingParams

err = Console(stderr=True, soft_wrap=True)


def run_generate(
    settings: Settings, prompt: str, raw: bool, max_tokens: int, sampling: SamplingParams,
    deterministic: bool, as_json: bool,
) -> None:  # fmt: skip
    """Prints the answer while it comes, or as one JSON object at its end. raw: the prompt is text to go on
    with, not a chat message. Raises LLM42Error; RequestRejected for a prompt that is empty or too long."""
    with Steps() as steps, Local(settings, verifier=deterministic, progress=steps) as local:
        steps.done()
        tokenizer = local.tokenizer
        if raw:
            ids = tokenizer.encode(prompt, add_special=True)
        else:
            ids = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))
        context, ends = settings.model.max_model_len, tokenizer.eos_token_ids
        if not ids or len(ids) + max_tokens > context:
            told = f"{len(ids)} tokens of prompt and {max_tokens} of answer exceed the context, {context}:"
            told += " shorten the prompt or lower --max-tokens."
            raise RequestRejected(told if ids else "The prompt is empty: give some text.")
        request = Request("generate", tuple(ids), max_tokens, sampling, deterministic, stop_token_ids=ends)
        asyncio.run(_print_answer(local, request, as_json))


async def _print_answer(local: Local, request: Request, as_json: bool) -> None:
    tokens: list[int] = []
    text, fingerprint, finish = "", None, None
    stats: RequestStats | None = None
    async with aclosing(local.generate(request)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            text += delta.text
            fingerprint = delta.fingerprint or fingerprint
            stats, finish = delta.stats or stats, delta.finish_reason
            if not as_json:
                print(delta.text, end="", flush=True)
    evidence = {
        "deterministic": request.deterministic,
        "seed": request.sampling.seed,
        **(asdict(stats) if stats else {}),
    }
    if as_json:
        reply = {
            "text": text,
            "token_ids": tokens,
            "finish_reason": finish,
            "system_fingerprint": fingerprint,
        }
        print(json.dumps(reply | {"llm42": evidence}))
        return
    print(flush=True)
    err.print(f"[dim]{len(tokens)} tokens, fingerprint {fingerprint}, {evidence}[/]")

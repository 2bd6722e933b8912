"""Audits on a CPU: stored answers replayed as windows, against generating them again.

    python -m benchmarks.service.audit [--answers 64] [--prompt 64] [--tokens 64] [--rounds 3]

One process, the default model, no HTTP. The answers are made once by the whole service of one process. Then
rounds alternate: `replay` holds every answer against the verifier as one window with a cold cache;
`regenerate` generates every answer again from its receipt, in batches and through decode, verify and
rollback, as one must who knows only hashes. Both must confirm all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.lib.report import Figure, report
from llm42.audit.claim import Claim
from llm42.audit.compare import Finding, Verdict, throughput
from llm42.audit.records import claims_of
from llm42.audit.replayer import Replayer
from llm42.config import Settings
from llm42.local.assembly import Local
from llm42.protocol import Request, SamplingParams, TokenLogprob
from llm42.receipt import Answered, Keyring, Receipt, make_receipt

FIRST_ID, LAST_ID = 1000, 40000
CONCURRENT = 16


def questions(count: int, prompt: int, tokens: int) -> list[Request]:
    """Random token ids, no two with a common beginning; every other one is sampled."""
    rng = random.Random(42)
    made = []
    for i in range(count):
        ids = tuple(rng.randrange(FIRST_ID, LAST_ID) for _ in range(prompt))
        sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=i) if i % 2 else SamplingParams(seed=i)
        made.append(Request(f"q{i}", ids, tokens, sampling, deterministic=True, num_logprobs=0))
    return made


async def answer(whole: Local, asked: Sequence[Request]) -> list[Receipt]:
    """Their receipts, with ids."""
    name, places = whole.verifier.fingerprint, asyncio.Semaphore(CONCURRENT)

    async def one(request: Request) -> Receipt:
        output: list[int] = []
        logprobs: list[TokenLogprob] = []
        async with places:
            async for delta in whole.generate(request):
                output += delta.token_ids
                logprobs += delta.logprobs
        parts = (request.prompt, request.sampling, tuple(output), tuple(logprobs), "length")
        return make_receipt(Answered(request.request_id, "model", 0, name, *parts), True, True)

    return list(await asyncio.gather(*(one(r) for r in asked)))


async def audit(whole: Local, claims: Sequence[Claim], settings: Settings) -> dict[str, float]:
    """Speeds of one audit. Ends the benchmark when not everything is confirmed."""
    found: list[Finding] = []
    replayer = Replayer(whole, settings.audit, Keyring({}), whole.tokenizer, lambda _: [])
    began = time.monotonic()
    await replayer.audit(claims, found.append)
    seconds = time.monotonic() - began
    odd = [f for f in found if f.verdict != Verdict.CONFIRMED]
    if odd or len(found) != len(claims):
        raise SystemExit(f"not confirmed: {odd[:3]}")
    return throughput(found, seconds)


async def measure(whole: Local, args: Any, settings: Settings) -> dict[str, list[dict[str, float]]]:
    """Speeds of every round by kind."""
    receipts = await answer(whole, questions(args.answers, args.prompt, args.tokens))
    bare = [replace(r, output=None) for r in receipts]
    kinds = {
        name: [claim for i, r in enumerate(which) for claim in claims_of(r.to_json(), i)]
        for name, which in (("replay", receipts), ("regenerate", bare))
    }
    speeds: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, claims in kinds.items():
            speeds[name].append(await audit(whole, claims, settings))
            print(name, speeds[name][-1], flush=True)
    return speeds


def main() -> None:
    """Runs everything and writes results/cpu-audit.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    settings = Settings()
    with Local(settings) as whole:
        speeds = asyncio.run(measure(whole, args, settings))

    def middle(kind: str, rate: str) -> float:
        return statistics.median(r[rate] for r in speeds[kind])

    pairs = zip(speeds["replay"], speeds["regenerate"], strict=True)
    gain = statistics.median(a["tokens_s"] / b["tokens_s"] for a, b in pairs)
    figures = {
        "replay_records_s": Figure(middle("replay", "records_s"), "records/s", None, "higher"),
        "replay_tokens_s": Figure(middle("replay", "tokens_s"), "tokens/s", None, "higher"),
        "replay_rows_s": Figure(middle("replay", "rows_s"), "positions/s", None, "higher"),
        "regenerate_records_s": Figure(middle("regenerate", "records_s"), "records/s", None, "higher"),
        "regenerate_tokens_s": Figure(middle("regenerate", "tokens_s"), "tokens/s", None, "higher"),
        "replay_over_regenerate": Figure(round(gain, 2), "ratio", None, "higher"),
    }
    raw = {"speeds": speeds, "load_average": os.getloadavg(), "arguments": vars(args)}
    print(report("cpu-audit", figures, raw))


if __name__ == "__main__":
    main()

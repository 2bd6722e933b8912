"""SmolLM2 on a CPU, in one process: what the verifier decodes by itself, against the torch engine.

    python -m benchmarks.direct.cpu [--rounds 4] [--tokens 64] [--out DIR]

Rounds of 8 requests, best effort by the torch engine and deterministic ones decoded directly, in turns, so
that a ratio compares neighbours in time: `direct_at_8` is the median over the rounds of direct tokens/s over
best-effort tokens/s. Both have one thread. `group_prompt_rows` is how many rows the verifier computes for 16
choices of one prompt that come together, each with one token, over the tokens of the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.lib.report import RESULTS, Figure, arguments, report
from benchmarks.service.cpu import PROMPTS
from llm42.checkpoint.fetch import DEFAULT_DIR, fetch_smollm2
from llm42.config import Settings
from llm42.local.assembly import Local, output_of
from llm42.protocol import Request, SamplingParams

CHOICES, AT_ONCE = 16, 8
PREDICTION = (
    "direct_at_8 0.99: equal products, steps of 8 rows both; the loop costs some 0.1 ms of 100. "
    "group_prompt_rows 1.03: the prompt once, and the last row of each other choice"
)


def settings() -> Settings:
    """As `llm42 serve` has them, but for the way."""
    model = fetch_smollm2(Path(__file__).parents[2] / DEFAULT_DIR)
    return Settings.load({"model": {"path": str(model)}, "session": {"mode": "direct"}})


async def speed(local: Local, name: str, deterministic: bool, tokens: int) -> float:
    """Output tokens a second of 8 requests that begin together; ends of text are ignored."""
    requests = [
        Request(f"{name}-{i}", tuple(local.tokenizer.encode(text)), tokens, SamplingParams(), deterministic)
        for i, text in enumerate(PROMPTS[:AT_ONCE])
    ]
    began = time.monotonic()
    outputs = await asyncio.gather(*(output_of(local.generator.generate(r)) for r in requests))
    seconds = time.monotonic() - began
    for output in outputs:
        assert len(output.tokens) == tokens
        assert not deterministic or (output.stats and output.stats.direct_tokens == tokens)
    return AT_ONCE * tokens / seconds


async def group_rows(local: Local) -> tuple[int, int]:
    """Rows computed for the choices of one prompt, and the prompt's tokens."""
    text = " ".join(f"{i}. {prompt}" for i, prompt in enumerate(PROMPTS * 5))
    one = Request("g", tuple(local.tokenizer.encode(text)), 1, SamplingParams(temperature=1.0), True)
    choices = [
        replace(one, request_id=f"g-{i}", sampling=replace(one.sampling, seed=i)) for i in range(CHOICES)
    ]
    before = local.verifier.stats().rows
    await asyncio.gather(*(output_of(local.generator.generate(r)) for r in choices))
    return local.verifier.stats().rows - before, len(one.prompt)


async def measure(local: Local, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Speeds of both ways, round by round; the order changes."""
    speeds: dict[str, list[float]] = {"direct": [], "best_effort": []}
    for name in speeds:
        await speed(local, f"warm-{name}", name == "direct", 8)
    for number in range(rounds):
        for name in sorted(speeds, reverse=number % 2 == 1):
            found = await speed(local, f"{name}-{number}", name == "direct", tokens)
            speeds[name].append(round(found, 2))
            print(f"{name}: {found:.1f} tok/s", flush=True)
    return speeds


def main() -> None:
    """Writes results/cpu-direct.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with Local(settings(), progress=print) as local:
        speeds = asyncio.run(measure(local, args.rounds, args.tokens))
        rows, prompt = asyncio.run(group_rows(local))
    ratios = [a / b for a, b in zip(speeds["direct"], speeds["best_effort"], strict=True)]
    figures = {
        "direct_at_8": Figure(round(statistics.median(ratios), 3), "ratio", 0.97, "higher"),
        "group_prompt_rows": Figure(round(rows / prompt, 3), "prompts", 1.1),
        "direct_tok_s_8": Figure(statistics.median(speeds["direct"]), "tokens/s", better="higher"),
        "best_effort_tok_s_8": Figure(statistics.median(speeds["best_effort"]), "tokens/s", better="higher"),
    }
    raw = {
        "prediction": PREDICTION,
        "options": arguments(args),
        "speeds": speeds,
        "rows": rows,
        "prompt": prompt,
        "load_average": os.getloadavg(),
    }
    print(report("cpu-direct", figures, raw, args.out))
    print({name: figure.value for name, figure in figures.items()})


if __name__ == "__main__":
    main()

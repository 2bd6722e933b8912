"""What the adapter costs: best-effort tokens per second through it, against an untouched AsyncLLM.

    python -m benchmarks.engine.vllm_adapter [--model 8b] [--requests 256] [--input 256] [--output 256] \
        [--rounds 5]
    python -m benchmarks.engine.vllm_adapter --device cpu --model .models/smollm2/... --dtype float32 \
        --eager --requests 16 --input 32 --output 32

Both engines run at the same time with the same sizes, the untouched one with vLLM's defaults (its own
scheduling policy, statistics and log); rounds alternate between them, so a ratio compares neighbours in time.
The untouched one's stream is read in the cheapest way that vLLM has: token deltas, no detokenisation.
The CPU time of either side's event loop per token is reported too: on a busy machine it says more than the
clock. --processor adds a third engine, with the optional logits processor loaded (sampled_agreement), and the
same requests, which do not ask for it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import threading
import time
from contextlib import ExitStack, closing
from typing import Any

from benchmarks.lib.report import Figure, arguments, report
from benchmarks.lib.vllm_setup import add_arguments, prompts_of, settings_of
from llm42.engine.base import EngineOutput
from llm42.engine.vllm.engine import VllmEngine
from llm42.engine.vllm.options import engine_arguments, model_directory
from llm42.protocol import Request, SamplingParams

OURS = ("scheduling_policy", "disable_log_stats", "max_logprobs", "enable_prefix_caching")
"""Arguments that the adapter sets and an untouched engine does not."""
SAMPLING = SamplingParams(temperature=1.0)
_numbers = itertools.count()


class Untouched:
    """An AsyncLLM with vLLM's defaults in an event loop of its own thread."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.llm = asyncio.run_coroutine_threadsafe(self._start(arguments), self.loop).result()

    async def _start(self, arguments: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def round(self, prompts: list[tuple[int, ...]], tokens: int) -> float:
        """Output tokens per second of all prompts at once."""
        return asyncio.run_coroutine_threadsafe(self._round(prompts, tokens), self.loop).result()

    async def _round(self, prompts: list[tuple[int, ...]], tokens: int) -> float:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        async def one(prompt: tuple[int, ...]) -> int:
            params = VllmParams(
                temperature=SAMPLING.temperature,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            got = 0
            source = {"prompt_token_ids": list(prompt)}
            async for output in self.llm.generate(source, params, f"untouched-{next(_numbers)}"):
                got += len(output.outputs[0].token_ids)
            return got

        began = time.perf_counter()
        got = await asyncio.gather(*(one(p) for p in prompts))
        seconds = time.perf_counter() - began
        assert got == [tokens] * len(prompts)
        return sum(got) / seconds

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.llm.shutdown)


def adapter_round(engine: VllmEngine, prompts: list[tuple[int, ...]], tokens: int) -> float:
    """Output tokens per second of all prompts at once, through the adapter."""
    left, done, counts = len(prompts), threading.Event(), [0] * len(prompts)

    def sink_of(index: int) -> Any:
        def sink(output: EngineOutput) -> None:
            nonlocal left
            assert output.error is None, output.error
            counts[index] += len(output.tokens)
            if output.finish is not None:
                left -= 1
                if not left:
                    done.set()

        return sink

    began = time.perf_counter()
    for index, prompt in enumerate(prompts):
        request = Request(f"adapter-{next(_numbers)}", prompt, tokens, SAMPLING, seeded=False)
        engine.submit(request, sink_of(index), tokens)
    done.wait()
    seconds = time.perf_counter() - began
    assert counts == [tokens] * len(prompts)
    return sum(counts) / seconds


def loop_cpu_s(loop: asyncio.AbstractEventLoop) -> float:
    """CPU seconds that the loop's thread has used."""

    async def read() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(read(), loop).result()


def measure(
    engines: dict[str, VllmEngine], untouched: Untouched, args: argparse.Namespace, vocab: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(tokens per second, loop CPU microseconds per token) by side and round; the order of the sides
    alternates. A warm-up of each comes first."""
    sides = ["untouched", *engines]
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-1, args.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            prompts = prompts_of(args.requests, args.input, vocab, seed=10 * number + len(side))
            loop = untouched.loop if side == "untouched" else engines[side]._loop
            began = loop_cpu_s(loop)
            if side == "untouched":
                speed = untouched.round(prompts, args.output)
            else:
                speed = adapter_round(engines[side], prompts, args.output)
            used = 1e6 * (loop_cpu_s(loop) - began) / (args.requests * args.output)
            if number >= 0:
                speeds[side].append(round(speed, 1))
                cpu[side].append(round(used, 2))
            print(
                f"{'warm-up' if number < 0 else number} {side}: {speed:.1f} tok/s, {used:.1f} us", flush=True
            )
    return speeds, cpu


def figures_of(speeds: dict[str, list[float]], cpu: dict[str, list[float]]) -> dict[str, Figure]:
    """Medians by side, and of the ratios to the untouched engine in the same round."""
    figures = {}
    for side, found in speeds.items():
        figures[f"{side}_tok_s"] = Figure(statistics.median(found), "tokens/s", None, "higher")
        figures[f"{side}_loop_cpu_us"] = Figure(statistics.median(cpu[side]), "us per token")
        if side != "untouched":
            share = statistics.median(a / u for a, u in zip(found, speeds["untouched"], strict=True))
            target = 0.99 if side == "adapter" else None
            figures[f"{side}_share"] = Figure(round(share, 4), "ratio", target, "higher")
    return figures


def main() -> None:
    """Runs everything and writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input", type=int, default=256, help="prompt tokens")
    parser.add_argument("--output", type=int, default=256, help="output tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor", action="store_true", help="a third engine, with sampled_agreement")
    args = parser.parse_args()
    settings = settings_of(args)
    given = engine_arguments(settings, model_directory(settings))
    with ExitStack() as stack:
        engines = {"adapter": stack.enter_context(closing(VllmEngine(settings).start()))}
        if args.processor:
            other = settings_of(args, sampled_agreement=True)
            engines["processor"] = stack.enter_context(closing(VllmEngine(other).start()))
        facts = {side: engine.facts for side, engine in engines.items()}
        untouched = Untouched({k: v for k, v in given.items() if k not in OURS})
        speeds, cpu = measure(engines, untouched, args, facts["adapter"]["vocab_size"])
        untouched.close()
    raw = {"speeds": speeds, "loop_cpu_us": cpu, "engines": facts, "arguments": arguments(args)}
    raw |= {"load_average": os.getloadavg()}
    figures = figures_of(speeds, cpu)
    print(report(args.name or f"{args.device}-vllm-adapter", figures, raw, args.out))


if __name__ == "__main__":
    main()

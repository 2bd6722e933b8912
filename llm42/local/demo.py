"""The demonstration: the same prompts alone and under load, best-effort and deterministic, in this
process."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llm42.config import Settings
from llm42.local.assembly import Local, Output, output_of, require_fast_path, verified
from llm42.local.demo_products import batch_dependent
from llm42.protocol import Request, SamplingParams
from llm42.verifier.certify.certificate import Certificate
from llm42_kernels.cpu import cpu_operators
from llm42_kernels.operators import Operators

PROMPTS = (
    "Why is the sky blue?",
    "Write a short poem about a cat that likes the sea.",
    "Explain recursion to a ten-year-old.",
    "List five uses of a paper clip.",
    "What is the difference between weather and climate?",
    "Tell a story about a dragon who is afraid of fire.",
    "How does an aeroplane stay in the air?",
    "Describe the city of Paris in one paragraph.",
    "Write a Python function that reverses a string.",
    "What should I cook with rice, eggs and tomatoes?",
    "Summarise the water cycle.",
    "Give three reasons to learn a second language.",
    "What is a prime number?",
    "Write a polite email that declines an invitation.",
    "How do vaccines work?",
    "Name the planets and one fact about each.",
    "What makes bread rise?",
    "Explain supply and demand with an example.",
    "Write a haiku about winter.",
    "How can I sleep better at night?",
)


@dataclass(slots=True)
class Divergence:
    """One prompt whose output under load is not its output alone."""

    prompt: str
    token: int
    """Index of the first output token that differs."""


@dataclass(slots=True)
class ModeResult:
    """What one mode did. tokens/s count output tokens of the compared requests; noise is not counted."""

    diverged: int = 0
    logprobs_diverged: int = 0
    first_differences: list[Divergence] = field(default_factory=list)
    tokens_s_alone: float = 0.0
    tokens_s_loaded: float = 0.0
    rollbacks: int = 0
    rolled_back_tokens: int = 0
    verified_tokens: int = 0
    windows: int = 0


@dataclass(slots=True)
class DemoResult:
    """The whole demonstration."""

    model: str
    numerics: str
    fast_path_products: str
    row_counts_matter: bool
    fingerprint: str
    requests: int
    load: int
    tokens: int
    temperature: float
    best_effort: ModeResult
    deterministic: ModeResult

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, with the two figures most readers want on top."""
        return {
            "deterministic_diverged": self.deterministic.diverged,
            "best_effort_diverged": self.best_effort.diverged,
            **asdict(self),
        }


Progress = Callable[[str, int], None]
"""progress(what is going on, finished requests to add)"""


@dataclass(slots=True)
class Demo:
    """Two engines' worth of traffic on one engine and one verifier."""

    local: Local
    requests: int
    load: int
    tokens: int
    temperature: float
    progress: Progress

    async def mode(self, deterministic: bool) -> ModeResult:
        """All prompts alone, one after another, then together among noise."""
        name = "deterministic" if deterministic else "best-effort"
        began = time.monotonic()
        alone = []
        for i in range(self.requests):
            alone.append(await self._one(f"{name}-alone-{i}", i, deterministic))
            self.progress(f"{name}, alone", 1)
        middle = time.monotonic()
        noise = asyncio.create_task(self._noise())
        loaded = await asyncio.gather(
            *(
                self._one(f"{name}-loaded-{i}", i, deterministic, f"{name}, under load")
                for i in range(self.requests)
            )
        )
        end = time.monotonic()
        if noise.done():
            noise.result()  # without load the comparison would show nothing: raises what ended it
        noise.cancel()
        await asyncio.gather(noise, return_exceptions=True)
        return self._compare(alone, loaded, middle - began, end - middle)

    async def _one(self, request_id: str, index: int, deterministic: bool, label: str = "") -> Output:
        text = self.local.tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPTS[index % len(PROMPTS)]}]
        )
        request = Request(
            request_id,
            tuple(self.local.tokenizer.encode(text)),
            self.tokens,
            SamplingParams(temperature=self.temperature, seed=index),
            deterministic,
            stop_token_ids=self.local.tokenizer.eos_token_ids,
            num_logprobs=0,
        )
        output = await output_of(self.local.generate(request))
        if label:
            self.progress(label, 1)
        return output

    async def _noise(self) -> None:
        """`load` best-effort streams of random prompts and lengths, each replaced when it ends."""
        rng, ids = random.Random(1), min(10000, self.local.tokenizer.vocab_size)

        async def stream(n: int) -> None:
            for k in range(10**6):
                prompt = tuple(rng.randrange(100, ids) for _ in range(rng.randrange(5, 100)))
                request = Request(
                    f"noise-{n}-{k}", prompt, rng.randrange(8, 64), SamplingParams(temperature=1.0)
                )
                async for _ in self.local.generate(request):
                    pass

        await asyncio.gather(*(stream(n) for n in range(self.load)))

    def _compare(self, alone: Sequence[Output], loaded: Sequence[Output], t0: float, t1: float) -> ModeResult:
        result = ModeResult()
        for index, (a, b) in enumerate(zip(alone, loaded, strict=True)):
            if a.tokens != b.tokens:
                result.diverged += 1
                where = Divergence(PROMPTS[index % len(PROMPTS)], first_difference(a.tokens, b.tokens))
                result.first_differences.append(where)
            result.logprobs_diverged += a.logprobs != b.logprobs
            for stats in (a.stats, b.stats):
                if stats is not None:
                    result.rollbacks += stats.rollbacks
                    result.rolled_back_tokens += stats.rolled_back_tokens
                    result.verified_tokens += stats.verified_tokens
                    result.windows += stats.windows
        result.tokens_s_alone = round(sum(len(a.tokens) for a in alone) / t0, 1)
        result.tokens_s_loaded = round(sum(len(b.tokens) for b in loaded) / t1, 1)
        return result


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first element that differs, or the shorter length."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def run_demo(
    settings: Settings,
    requests: int = 20,
    load: int = 12,
    tokens: int = 128,
    temperature: float = 0.0,
    progress: Progress = lambda _what, _done: None,
) -> DemoResult:
    """Loads, certifies, runs both modes with the configured engine, on the configured device; session.mode is
    verify, so that there are windows and rollbacks to be seen. Raises LLM42Error."""

    require_fast_path(settings)
    settings = verified(settings)

    def products(certificate: Certificate) -> Operators | None:
        return batch_dependent(cpu_operators()) if _needs_stand_in(settings, certificate) else None

    with Local(settings, progress=lambda what: progress(what, 0), operators=products) as local:
        demo = Demo(local, requests, load, tokens, temperature, progress)

        async def both() -> tuple[ModeResult, ModeResult]:
            return await demo.mode(False), await demo.mode(True)

        best_effort, deterministic = asyncio.run(both())
        return DemoResult(
            model=settings.model.name,
            numerics=_numerics(settings),
            fast_path_products=_products_label(settings, local.certificate),
            row_counts_matter=local.certificate.row_counts_matter,
            fingerprint=local.verifier.fingerprint,
            requests=requests,
            load=load,
            tokens=tokens,
            temperature=temperature,
            best_effort=best_effort,
            deterministic=deterministic,
        )


def _needs_stand_in(settings: Settings, certificate: Certificate) -> bool:
    """Whether this machine's ordinary products would show nothing: they do not depend on the batch."""
    ordinary = settings.engine.shares_weights and settings.model.device == "cpu"
    return ordinary and not certificate.row_counts_matter


def _products_label(settings: Settings, certificate: Certificate) -> str:
    """Whose products the fast path has, and why they may depend on the batch."""
    if not settings.engine.shares_weights:
        return "vLLM's"
    if settings.model.device == "cuda":
        return (
            "cublas without workspace, as the verifier's in the same process; attention depends on the batch"
        )
    if _needs_stand_in(settings, certificate):
        return "mkl made batch-dependent on purpose: this CPU's products are not"
    return "mkl (ordinary; its bits depend on the number of rows on this CPU)"


def _numerics(settings: Settings) -> str:
    """The arithmetic in words, with the device's."""
    if settings.model.device == "cuda":
        return f"{settings.model.dtype} on a GPU, float32 accumulators"
    engine = f"{settings.engine.thread_count} engine thread(s), " if settings.engine.shares_weights else ""
    verifier = f"{settings.verifier.threads} verifier thread(s)"
    return f"{settings.model.dtype} activations, float32 products, {engine}{verifier}"

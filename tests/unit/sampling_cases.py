"""Random cases of the sampling tests, and the call of llm42's sampler on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

import llm42.sampling as sampling
from llm42.protocol import SamplingParams
from tests.unit.sampling_oracle import F32, Params

SEEDS = (0, 1, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**32, 0x123456789ABCDEF)


@dataclass(frozen=True)
class Case:
    logits: F32
    params: Params
    history: Sequence[int]
    prompt_len: int


def ours(case: Case, num_logprobs: int = 0) -> sampling.Sampled:
    logits = torch.from_numpy(case.logits.copy())
    return sampling.sample_row(logits, to_protocol(case.params), case.history, case.prompt_len, num_logprobs)


def to_protocol(params: Params) -> SamplingParams:
    return SamplingParams(**asdict(params))


def random_logits(rng: np.random.Generator, vocab: int) -> F32:
    """Ordinary rows, and rows full of ties, of holes, of signed zeros, of very large or small values."""
    x = rng.normal(size=vocab)
    style = rng.choice(["plain", "sharp", "steps", "bfloat16", "flat", "zeros", "holes", "huge", "tiny"])
    if style == "sharp":
        x = x * 8
    elif style == "steps":
        x = np.round(x * 4) / 2
    elif style == "bfloat16":
        x = (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    elif style == "flat":
        x = np.full(vocab, x[0])
    elif style == "zeros":
        x = rng.choice([0.0, -0.0, 1.0, -1.0], size=vocab)
    elif style == "holes":
        x = np.where(rng.random(vocab) < 0.3, -np.inf, x)
        x[rng.integers(vocab)] = 0.5
    elif style == "huge":
        x = x * 1e30
    elif style == "tiny":
        x = x * 1e-30
    return x.astype(np.float32)


def random_params(rng: np.random.Generator, vocab: int, produced: int) -> Params:
    """Each stage is on in about half of the cases, independently. `produced`: output tokens so far."""

    def some(value: Any, neutral: Any) -> Any:
        return value if rng.random() < 0.5 else neutral

    bias_ids = rng.choice(vocab, size=min(vocab, int(rng.integers(1, 6))), replace=False)
    banned = rng.choice(vocab, size=min(vocab, int(rng.integers(1, 5))), replace=False)
    top_p = rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999, rng.random()])
    seed = int(rng.integers(-(2**63), 2**63 - 1)) if rng.random() < 0.5 else SEEDS[rng.integers(len(SEEDS))]
    return Params(
        temperature=float(rng.choice([0.0, 1e-6, 1e-5, 0.05, 0.7, 1.0, 1.3, 10.0, 100.0])),
        top_k=int(some(rng.choice([1, 2, 3, max(1, vocab // 2), vocab - 1, vocab, vocab + 5, 40]), 0)),
        top_p=float(some(top_p, 1.0)),
        min_p=float(some(rng.choice([1e-9, 0.01, 0.1, 0.5, 1.0]), 0.0)),
        seed=seed,
        repetition_penalty=float(some(rng.choice([0.5, 1.1, 1.5, 2.0]), 1.0)),
        presence_penalty=float(some(rng.choice([-0.5, 0.3, 0.5, 2.0]), 0.0)),
        frequency_penalty=float(some(rng.choice([-0.25, 0.1, 0.5, 2.0]), 0.0)),
        logit_bias=some(tuple((int(i), float(rng.choice([-100, -0.5, 0.3, 1, 100]))) for i in bias_ids), ()),
        min_tokens=int(some(max(0, produced + int(rng.integers(-1, 2))), 0)),
        min_tokens_banned=some(tuple(int(i) for i in banned), ()),
    )


def random_case(rng: np.random.Generator, vocab: int) -> Case:
    # few distinct ids, so that counts above one and ids of both prompt and output are common
    history = rng.integers(min(vocab, 12), size=int(rng.integers(1, 40))).tolist()
    prompt_len = int(rng.integers(1, len(history) + 1))
    params = random_params(rng, vocab, len(history) - prompt_len)
    return Case(random_logits(rng, vocab), params, history, prompt_len)


def random_cases(seed: int, count: int, vocab: int) -> Iterator[Case]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield random_case(rng, vocab)

"""Requests for the tiny model, and the windows that ask for what follows their output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from llm42.protocol import Request, SamplingParams, Window
from tests.support.tiny_model import VOCAB

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
PENALISED = SamplingParams(
    temperature=0.8,
    seed=5,
    repetition_penalty=1.3,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    logit_bias=((17, 2.5), (300, -4.0)),
    min_tokens=9,
    min_tokens_banned=tuple(range(256)),
)


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    """Random token ids, no special ones."""
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, VOCAB, (length,), generator=gen).tolist())


def request_of(
    name: str,
    seed: int,
    length: int = 20,
    max_tokens: int = 48,
    sampling: SamplingParams = SAMPLED,
    **more: Any,
) -> Request:
    """A deterministic request with log-probabilities and two alternatives."""
    base = Request(name, prompt_of(seed, length), max_tokens, sampling, True, num_logprobs=2)
    return replace(base, **more)


def window_of(request: Request, output: Sequence[int], candidates: Sequence[int] = ()) -> Window:
    """The window that asks for what follows `output`, with candidates for it."""
    return Window(
        request.request_id,
        (*request.prompt, *output),
        len(request.prompt),
        tuple(candidates),
        request.sampling,
        request.num_logprobs or 0,
    )

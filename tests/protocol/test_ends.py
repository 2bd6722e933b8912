"""Where an output ends and what of its end is text: min_tokens holds back stop strings, a stop token is no
text. Deterministic, best-effort and resumed outputs agree with the oracle."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from llm42.protocol import FinishReason, Request, SamplingParams
from tests.support import SAMPLED, Lab, all_ways, collect, differences, request_of

LEAST = 16


def plain(lab: Lab) -> Request:
    """A request with no end but its length."""
    request = request_of("ends", 4, max_tokens=48, stop_token_ids=())
    assert len(lab.oracle(request).tokens) == 48
    return request


def held_back(lab: Lab) -> Request:
    """Its output has one of its stop strings before and after the minimum."""
    request = plain(lab)
    tokens = lab.oracle(request).tokens
    early, late = lab.tokenizer.decode(tokens[:LEAST]), lab.tokenizer.decode(tokens[LEAST:-8])
    stop = tuple(sorted(set(early) & set(late) - {"\ufffd"}))[:4]
    assert stop, "the tiny model's output has nothing twice"
    return replace(request, stop=stop, sampling=replace(request.sampling, min_tokens=LEAST))


@all_ways
def test_min_tokens_holds_back_stop_strings(lab: Lab) -> None:
    request = held_back(lab)
    want = lab.oracle(request)
    assert LEAST < len(want.tokens) < 48
    assert want.finish is FinishReason.STOP
    generator = lab.generator(lab.engine(corrupt_share=0.1), lab.verifier().start(), max_window=7)
    assert differences(asyncio.run(collect(generator, request)), want) == []
    at_once = replace(request, sampling=SAMPLED)
    assert len(lab.oracle(at_once).tokens) <= LEAST, "control: without the minimum it ends there"
    assert differences(asyncio.run(collect(generator, at_once)), lab.oracle(at_once)) == []


def test_the_best_effort_path_holds_them_back_too(lab: Lab) -> None:
    request = replace(held_back(lab), deterministic=False)
    got = asyncio.run(collect(lab.generator(lab.engine(), None), request))
    assert len(got.tokens) > LEAST


@all_ways
@pytest.mark.parametrize("cut", [1, LEAST - 1, LEAST])
def test_a_resumed_output_has_the_same_end(lab: Lab, cut: int) -> None:
    """Another replica goes on with what the client has (Request.output)."""
    request = held_back(lab)
    want = lab.oracle(request)
    generator = lab.generator(lab.engine(), lab.verifier().start(), max_window=7)
    rest = asyncio.run(collect(generator, replace(request, output=want.tokens[:cut])))
    assert want.tokens[:cut] + rest.tokens == want.tokens
    assert want.text.endswith(rest.text)
    assert rest.finish is FinishReason.STOP


@all_ways
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_stop_token_is_no_text(lab: Lab, include: bool, deterministic: bool) -> None:
    """An ordinary token as the end: in token_ids and log-probabilities, in the text only when asked for. It
    comes after 8 others, whatever the engine's bits: a bias forces it, min_tokens holds it back."""
    end = next(i for i in range(40, 200) if lab.tokenizer.decode([i]).strip())
    forced = SamplingParams(logit_bias=((end, 100.0),), min_tokens=8, min_tokens_banned=(end,))
    ending = replace(plain(lab), sampling=forced, stop_token_ids=(end,), include_stop=include)
    generator = lab.generator(lab.engine(), lab.verifier().start(), max_window=7)
    got = asyncio.run(collect(generator, replace(ending, deterministic=deterministic)))
    assert got.finish is FinishReason.STOP
    assert got.tokens.index(end) == 8 == len(got.tokens) - 1
    assert len(got.logprobs) == len(got.tokens)
    assert got.text == lab.tokenizer.decode(got.tokens if include else got.tokens[:-1])
    if deterministic:
        assert differences(got, lab.oracle(ending)) == []

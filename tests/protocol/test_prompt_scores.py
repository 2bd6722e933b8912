"""Log-probabilities of the prompt: the verifier's, whatever else runs; the engine's, close to them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from llm42.host.threads import torch_threads
from llm42.protocol import Commit, Delta, FinishReason, Request, SamplingParams, TokenLogprob, Window
from llm42.session.prompt_scores import scoring_windows
from llm42.verifier.scheduler import Verifier
from tests.support import SAMPLED, Lab, all_ways, answer_of, differences, request_of
from tests.support import Answer as Output


def one_by_one(lab: Lab, prompt: tuple[int, ...]) -> list[TokenLogprob]:
    """What the verifier says of prompt[i + 1] after prompt[:i + 1] alone: every token is among the
    alternatives."""
    verifier, found = lab.verifier(1024), []
    with torch_threads(lab.settings.verifier.threads):
        for end in range(1, len(prompt)):
            window = Window("alone", prompt[:end], end, (), SamplingParams(), 512)
            commit = answer_of(verifier, window)
            assert isinstance(commit, Commit)
            top = commit.logprobs[0].top
            found.append(TokenLogprob(prompt[end], dict(top)[prompt[end]], top[:3]))
    return found


async def deltas(lab: Lab, request: Request, verifier: Verifier | None, engine: object) -> list[Delta]:
    return [d async for d in lab.generator(engine, verifier).generate(request)]  # type: ignore[arg-type]


def scores(found: list[Delta]) -> list[TokenLogprob]:
    """Those of the first delta; no other one has any."""
    assert all(d.prompt_logprobs is None for d in found[1:])
    return list(found[0].prompt_logprobs or ())


def test_canonical_scores_are_the_bits_of_single_steps(lab: Lab) -> None:
    """Beside other requests, over cold and warm caches: equal to the verifier alone; penalties, temperature
    and seed change nothing; the output that follows is the oracle's."""
    requests = [
        request_of(f"r{i}", 5, 90, 12, SAMPLED, prompt_logprobs=3, num_logprobs=2) for i in range(3)
    ] + [request_of(f"n{i}", i, 50 + i, 12) for i in range(4)]
    engine, verifier = lab.engine(corrupt_share=0.3), lab.verifier().start()

    async def together() -> list[list[Delta]]:
        return list(await asyncio.gather(*(deltas(lab, r, verifier, engine) for r in requests)))

    want = one_by_one(lab, requests[0].prompt)
    for _ in range(2):
        for request, found in zip(requests, asyncio.run(together()), strict=True):
            if request.prompt_logprobs is not None:
                assert scores(found) == want
            got = Output(
                tuple(t for d in found for t in d.token_ids),
                tuple(p for d in found for p in d.logprobs),
                "".join(d.text for d in found),
                found[-1].finish_reason,
            )
            assert differences(got, lab.oracle(replace(request, prompt_logprobs=None))) == []


def test_control_without_scoring_the_window_ends_at_the_first_token_not_drawn(lab: Lab) -> None:
    """An ordinary window with the same candidates: the verifier's own tokens, not the prompt's."""
    request = request_of("r", 5, 90, prompt_logprobs=3)
    (scoring,) = scoring_windows(request)
    with torch_threads(lab.settings.verifier.threads):
        right, wrong = (answer_of(lab.verifier(1024), w) for w in (scoring, replace(scoring, score=False)))
    assert right.accepted == 89
    assert [p.token for p in right.logprobs[:-1]] == list(request.prompt[1:])
    assert wrong.accepted < 89
    assert wrong.logprobs != right.logprobs[: len(wrong.logprobs)]


@all_ways
@pytest.mark.parametrize("deterministic", [True, False])
def test_nothing_but_the_prompt(lab: Lab, deterministic: bool) -> None:
    """max_tokens 0: one delta, with the prompt's log-probabilities and no token."""
    request = request_of("r", 6, 40, 0, prompt_logprobs=1, deterministic=deterministic)
    (only,) = asyncio.run(deltas(lab, request, lab.verifier().start(), lab.engine()))
    assert (only.token_ids, only.text, only.finish_reason) == ((), "", FinishReason.LENGTH)
    assert len(only.prompt_logprobs or ()) == 39
    assert (only.fingerprint is not None) == deterministic


@all_ways
def test_best_effort_scores_are_close_to_the_canonical_ones(lab: Lab) -> None:
    """Also when the cache is warm: every token once, in order."""
    best_effort_scores(lab, lab.engine(prefill_chunk=24))


def test_a_preempted_prompt_is_scored_once(lab: Lab) -> None:
    """The same in a cache so small that prompts are preempted and computed again."""
    engine = lab.engine(kv_tokens=160, prefill_chunk=24)
    best_effort_scores(lab, engine)
    assert engine.load().preemptions > 0, "the cache was not too small"


def best_effort_scores(lab: Lab, engine: Any) -> None:
    """Three equal prompts at once, twice, beside the canonical scores of one."""
    requests = [
        request_of(f"r{i}", 7, 80, 40, prompt_logprobs=3, deterministic=False, stop_token_ids=())
        for i in range(3)
    ]
    want = one_by_one(lab, requests[0].prompt)

    async def together() -> list[list[Delta]]:
        return list(await asyncio.gather(*(deltas(lab, r, None, engine) for r in requests)))

    for _ in range(2):
        for found in asyncio.run(together()):
            got = scores(found)
            assert [p.token for p in got] == [p.token for p in want]
            pairs = torch.tensor([[a.logprob, b.logprob] for a, b in zip(got, want, strict=True)])
            apart = (pairs[:, 0] - pairs[:, 1]).abs()
            # roundings of bfloat16 are some hundredths; those of a neighbouring token would be units apart
            assert apart.mean() < 0.15
            assert apart.max() < 1.0
            assert (pairs[:-1, 0] - pairs[1:, 1]).abs().mean() > 1.0, "control: one place further they differ"


def test_cached_tokens_are_told(lab: Lab) -> None:
    """The second of two equal requests finds its prompt in the engine's and in the verifier's cache."""
    engine, verifier = lab.engine(), lab.verifier().start()
    counts = []
    for name in ("first", "second"):
        for deterministic in (True, False):
            request = request_of(f"{name}{deterministic}", 8, 80, 8, deterministic=deterministic)
            found = asyncio.run(deltas(lab, request, verifier, engine))
            stats = found[-1].stats
            cached = [d.cached_tokens for d in found if d.cached_tokens is not None]
            assert len(cached) == 1
            counts.append((cached[0], stats.cached_prompt_tokens if stats else None))
    assert counts[0] == (0, 0)
    assert counts[1] == (64, None)
    assert counts[2][1] == 64 or counts[2][1] == 79
    assert counts[2][0] >= 64
    assert counts[3] == (64, None) or counts[3] == (79, None)

"""Tokens and log-probability bits equal the oracle's whatever the windows, chunks, steps and caches are;
with the mechanism broken, the same comparison fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from llm42.errors import RequestRejected
from llm42.host.threads import torch_threads
from llm42.protocol import Commit, Failure, SamplingParams, Window
from tests.support import (
    END,
    GREEDY,
    PENALISED,
    SAMPLED,
    AcceptsEverything,
    Lab,
    Wrapped,
    all_ways,
    answer_of,
    both_engines,
    request_of,
    sweep,
    together,
    window_of,
)

BESIDE_BORDERS = (1, 2, 6, 7, 8, 13, 14, 15, 19)
"""Places at and beside the borders of windows of 7, the first ones, and one further on."""
QUICK_PLACES = (1, 7, 8, 15)


def fixed(length: int) -> dict[str, int]:
    return {"min_window": length, "start_window": length, "max_window": length, "lookahead": max(128, length)}


@both_engines
@pytest.mark.parametrize("length", sweep([1, 2, 3, 7, 15, 16, 31, 64, 128], quick=(1, 15, 64)))
def test_window_lengths(lab: Lab, length: int) -> None:
    requests = [
        request_of(f"w{length}-{i}", i, max_tokens=40, sampling=s) for i, s in enumerate((GREEDY, SAMPLED))
    ]
    generator = lab.generator(lab.engine(corrupt_share=0.05), lab.verifier().start(), **fixed(length))
    assert lab.wrong(together(generator, requests), requests) == []


@both_engines
@pytest.mark.parametrize("share", sweep([0.02, 0.1, 0.5, 1.0], quick=(1.0,)))
def test_corrupt_candidates(lab: Lab, share: float) -> None:
    requests = [
        request_of(f"c{share}-{i}", i, sampling=s) for i, s in enumerate((GREEDY, SAMPLED, PENALISED) * 2)
    ]
    generator = lab.generator(lab.engine(corrupt_share=share), lab.verifier().start())
    answers = together(generator, requests)
    assert lab.wrong(answers, requests) == []
    assert sum(a.stats.rollbacks for a in answers) > 0
    if share == 1.0:
        assert all(a.stats.rollbacks == a.stats.windows for a in answers)


class WrongBorder(Wrapped):
    """Takes the whole sequence for the prompt, as a rollback that loses prompt_len would."""

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        return await super().verify([replace(w, prompt_len=len(w.tokens)) for w in windows])


@both_engines
def test_control_accepting_everything_is_noticed(lab: Lab) -> None:
    requests = [request_of(f"ae{i}", i) for i in range(3)]
    client = AcceptsEverything(lab.verifier().start())
    assert lab.wrong(together(lab.generator(lab.engine(corrupt_share=0.3), client), requests), requests)


@both_engines
def test_control_a_lost_prompt_border_is_noticed(lab: Lab) -> None:
    requests = [request_of(f"pb{i}", i, sampling=PENALISED) for i in range(3)]
    client = WrongBorder(lab.verifier().start())
    assert lab.wrong(together(lab.generator(lab.engine(), client), requests), requests)


@pytest.mark.parametrize("chunk", sweep([1, 5, 16, 64], quick=(5, 64)))
@pytest.mark.parametrize("buckets", [(8,), (16, 64), (8, 16, 24, 32, 48, 64, 96, 128)], ids=str)
def test_ragged_prefill_and_step_sizes(lab: Lab, chunk: int, buckets: tuple[int, ...]) -> None:
    requests = [request_of(f"r{chunk}-{n}", n, length=n, max_tokens=20) for n in (1, 15, 16, 17, 90)]
    generator = lab.generator(lab.engine(prefill_chunk=chunk), lab.verifier(buckets=buckets).start())
    assert lab.wrong(together(generator, requests), requests) == []


@pytest.mark.parametrize("plant", ["row-position", "attention-split", "one-ulp"])
def test_control_a_verifier_that_is_not_row_invariant_is_noticed(lab: Lab, plant: str) -> None:
    # which rows a plant hits follows the load, so one run may happen to miss: several, all different
    generator = lab.generator(lab.engine(), lab.verifier(plants=[plant]).start())

    def noticed(attempt: int) -> bool:
        requests = [request_of(f"p{attempt}-{i}", 10 * attempt + i, max_tokens=32) for i in range(8)]
        return bool(lab.wrong(together(generator, requests), requests))

    assert any(noticed(attempt) for attempt in range(8))


@all_ways
def test_warm_and_cold_caches_agree_and_are_hit(lab: Lab) -> None:
    request = request_of("cold", 3, length=70)
    verifier = lab.verifier().start()
    generator = lab.generator(lab.engine(), verifier)
    first = together(generator, [request])
    before = verifier.stats().cache_hits
    again = [replace(request, request_id=f"warm-{i}") for i in range(3)]
    assert lab.wrong(first + together(generator, again), [request, *again]) == []
    assert verifier.stats().cache_hits > before


@all_ways
def test_generated_text_is_reused_in_the_next_turn(lab: Lab) -> None:
    verifier = lab.verifier().start()
    generator = lab.generator(lab.engine(), verifier)
    request = request_of("turn-1", 4, length=30, max_tokens=60)
    (first,) = together(generator, [request])
    follow = replace(request_of("turn-2", 5), prompt=(*request.prompt, *first.tokens, 77, 78, 79))
    hits = verifier.stats().cache_hits
    answers = together(generator, [follow])
    assert lab.wrong(answers, [follow]) == []
    # more than the first prompt's blocks: generated ones were found too
    assert verifier.stats().cache_hits - hits > len(request.prompt) // 16


@all_ways
@pytest.mark.parametrize("dirt", [float("nan"), float("inf"), 1e4])
def test_dirty_memory_is_never_seen(lab: Lab, dirt: float) -> None:
    requests = [request_of(f"d{i}", i, length=5 + 13 * i) for i in range(4)]
    generator = lab.generator(lab.engine(), lab.verifier(dirt=dirt).start())
    assert lab.wrong(together(generator, requests), requests) == []


def test_control_reading_a_dirty_tail_is_noticed(lab: Lab) -> None:
    verifier = lab.verifier(dirt=float("nan"), plants=["dirty-tail"])
    with torch_threads(1):
        answer = answer_of(verifier, window_of(request_of("dt", 1), []))
    assert isinstance(answer, Failure)


@all_ways
def test_demand_of_three_times_the_cache(lab: Lab) -> None:
    requests = [request_of(f"kv{i}", i, length=60, max_tokens=60) for i in range(9)]
    demand = sum(len(r.prompt) + r.max_tokens for r in requests)
    verifier, engine = lab.verifier(kv_tokens=demand // 3).start(), lab.engine(kv_tokens=demand // 3)
    assert lab.wrong(together(lab.generator(engine, verifier), requests), requests) == []
    assert verifier.stats().evictions > 0
    by_mode = {
        "verify": [engine.load()],
        "direct": [verifier.stats()],
        "auto": [engine.load(), verifier.stats()],
    }
    assert sum(x.preemptions for x in by_mode[lab.mode]) > 0


def test_a_request_larger_than_the_cache_is_refused(lab: Lab) -> None:
    request = request_of("huge", 1, length=200, max_tokens=100)
    with pytest.raises(RequestRejected) as caught:
        together(lab.generator(lab.engine(kv_tokens=128), lab.verifier().start()), [request])
    assert caught.value.code == "context_length_exceeded"
    failure = answer_of(lab.verifier(kv_tokens=128), window_of(request, []))
    assert isinstance(failure, Failure)
    assert failure.code == "context_length_exceeded"


@all_ways
@pytest.mark.parametrize("end", sweep(BESIDE_BORDERS, quick=QUICK_PLACES))
def test_max_tokens_at_and_beside_window_borders(lab: Lab, end: int) -> None:
    request = request_of(f"mt{end}", 6, max_tokens=end)
    generator = lab.generator(lab.engine(), lab.verifier().start(), **fixed(7))
    answers = together(generator, [request])
    assert lab.wrong(answers, [request]) == []
    assert len(answers[0].tokens) == end


@all_ways
@pytest.mark.parametrize("at", sweep(BESIDE_BORDERS, quick=QUICK_PLACES))
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_end_of_text_at_and_beside_window_borders(lab: Lab, at: int, share: float) -> None:
    free = lab.oracle(request_of("free", 7, max_tokens=24))
    request = request_of(f"eot{at}", 7, max_tokens=24, stop_token_ids=(END, free.tokens[at]))
    generator = lab.generator(lab.engine(corrupt_share=share), lab.verifier().start(), **fixed(7))
    assert lab.wrong(together(generator, [request]), [request]) == []


@all_ways
@pytest.mark.parametrize("begin", sweep(range(4, 18, 2), quick=(6, 8, 14)))
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_window_borders(lab: Lab, begin: int, include: bool) -> None:
    free = lab.oracle(request_of("free", 8, max_tokens=30))
    stop = free.text[begin : begin + 5]
    request = request_of(f"ss{begin}", 8, max_tokens=30, stop=(stop, "never appears"), include_stop=include)
    generator = lab.generator(lab.engine(), lab.verifier().start(), **fixed(4))
    answers = together(generator, [request])
    assert lab.wrong(answers, [request]) == []
    assert (stop in answers[0].text) == include


def test_penalties_survive_rollbacks_and_cause_none(lab: Lab) -> None:
    def rollbacks(sampling: SamplingParams, share: float) -> tuple[int, int]:
        requests = [request_of(f"pn{share}-{i}", i, max_tokens=60, sampling=sampling) for i in range(4)]
        answers = together(lab.generator(lab.engine(corrupt_share=share), lab.verifier().start()), requests)
        assert lab.wrong(answers, requests) == []
        return sum(a.stats.rollbacks for a in answers), sum(len(a.tokens) for a in answers)

    plain, _ = rollbacks(
        replace(PENALISED, **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0)), 0.0
    )
    penalised, tokens = rollbacks(PENALISED, 0.0)
    assert penalised <= plain + 0.03 * tokens
    forced, _ = rollbacks(PENALISED, 0.2)
    assert forced > penalised

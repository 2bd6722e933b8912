"""llm42/sampling.py against an independent float64 sampler: tokens, log-probabilities, bad rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import llm42.sampling as sampling
from llm42.noise import gumbel_row
from llm42.sampling import Draw, Sampled, sample_row, sample_step
from tests.support import sweep
from tests.unit import sampling_oracle as oracle
from tests.unit.sampling_cases import SEEDS, Case, ours, random_case, random_cases, random_logits, to_protocol
from tests.unit.sampling_oracle import Params

NEG_INF = float("-inf")
EXCLUDED_SHARE = 0.01
"""At most this share of the cases may hang on less than float32 rounding at the top-p border."""


def disagreements(cases: Iterable[Case], sampler: Callable[[Case], Sampled] = ours) -> list[Case]:
    """The cases whose token, or whose refusal, is not the oracle's."""
    wrong, excluded, total = [], 0, 0
    for case in cases:
        want = oracle.draw(case.logits, case.params, case.history, case.prompt_len)
        got = sampler(case)
        total += 1
        if want.token is not None and not want.decisive:
            excluded += 1
        elif got.finite != (want.token is not None) or (got.finite and got.token != want.token):
            wrong.append(case)
    assert excluded <= EXCLUDED_SHARE * total, f"{excluded} of {total} cases are not decisive"
    return wrong


@pytest.mark.parametrize(
    ("vocab", "count"),
    sweep([(4, 3000), (7, 3000), (130, 1500), (49152, 60)], quick=[(7, 3000), (49152, 60)]),
)
def test_tokens_equal_the_oracle(vocab: int, count: int) -> None:
    assert disagreements(random_cases(vocab, count, vocab)) == []


EDGE = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-38, 3e38, -3e38, 88.0, -104.0, NEG_INF])
FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def edge_cases(pick: st.DrawFn) -> Case:
    row = pick(st.lists(EDGE | st.sampled_from([0.5, 0.25]), min_size=1, max_size=9))
    if pick(st.booleans()):
        row = pick(st.lists(FLOAT32, min_size=1, max_size=9))
    ids = st.integers(0, len(row) - 1)
    history = pick(st.lists(ids, min_size=1, max_size=12))
    bias = pick(st.dictionaries(ids, st.sampled_from([-100.0, 0.25, 100.0]), max_size=3))
    params = Params(
        temperature=pick(st.sampled_from([0.0, 1e-300, 9.9e-6, 1e-5, 0.3, 1.0, 100.0])),
        top_k=pick(st.integers(0, len(row) + 1)),
        top_p=pick(st.sampled_from([5e-324, 0.3, 0.9, 1 - 2**-53, 1.0])),
        min_p=pick(st.sampled_from([0.0, 5e-324, 0.1, 1.0])),
        seed=pick(st.sampled_from(SEEDS) | st.integers(-(2**63), 2**64 - 1)),
        repetition_penalty=pick(st.sampled_from([1.0, 0.01, 1.2, 100.0])),
        presence_penalty=pick(st.sampled_from([0.0, -2.0, 2.0])),
        frequency_penalty=pick(st.sampled_from([0.0, -2.0, 2.0])),
        logit_bias=tuple(bias.items()),
        min_tokens=pick(st.integers(0, 12)),
        min_tokens_banned=tuple(pick(st.sets(ids, max_size=9))),
    )
    return Case(np.array(row, dtype=np.float32), params, history, pick(st.integers(1, len(history))))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(edge_cases())
def test_edge_values(case: Case) -> None:
    want = oracle.draw(case.logits, case.params, case.history, case.prompt_len)
    got = ours(case)
    assert got.finite == (want.token is not None)
    if got.finite and want.decisive:
        assert got.token == want.token
    if got.finite:
        assert math.isfinite(got.logprob.logprob)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", [1, 2**32 - 1, 2**32, 2**32 + 1, 2**33 + 7, 2**62])
def test_any_seed_and_position(seed: int, position: int) -> None:
    logits = random_logits(np.random.default_rng(5), 1000)
    case = Case(logits, Params(temperature=1.0, top_p=0.95, seed=seed), range(position), 1)
    assert disagreements([case]) == []


def _cases() -> list[Case]:
    return list(random_cases(11, 800, 7))


def test_controls_wrong_inputs() -> None:
    """The comparison must notice a sampler that is given slightly other inputs."""

    def border_off_by_one(c: Case) -> Sampled:
        return ours(replace(c, prompt_len=min(c.prompt_len + 1, len(c.history))))

    def low_seed_word_only(c: Case) -> Sampled:
        return ours(replace(c, params=replace(c.params, seed=c.params.seed & oracle.MASK)))

    def bias_after_temperature(c: Case) -> Sampled:
        t = max(c.params.temperature, oracle.GREEDY_BELOW)
        bias = tuple((i, b * t) for i, b in c.params.logit_bias)
        return ours(replace(c, params=replace(c.params, logit_bias=bias)))

    for wrong in (border_off_by_one, low_seed_word_only, bias_after_temperature):
        assert disagreements(_cases(), wrong), wrong.__name__


def _highest_id_on_ties(values: Tensor, k: int) -> Tensor:
    keep = torch.zeros(len(values), dtype=torch.bool)
    keep[len(values) - 1 - values.flip(0).sort(descending=True, stable=True).indices[:k]] = True
    return keep


def _without_the_crossing_id(values: Tensor, ids: Tensor, mass: Tensor) -> Tensor:
    order = values[ids].sort(descending=True, stable=True)
    weight = (order.values - values.max()).exp().double()
    inside = weight.cumsum(0) <= mass
    inside[0] = True
    return ids[order.indices[inside]]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_top_k", _highest_id_on_ties),
        ("_nucleus", _without_the_crossing_id),
        ("gumbel_row", lambda seed, position, vocab, device: gumbel_row(seed, position + 1, vocab, device)),
        ("GREEDY_BELOW", 0.01),
    ],
)
def test_controls_wrong_stages(monkeypatch: pytest.MonkeyPatch, name: str, wrong: object) -> None:
    """The comparison must notice a stage that is subtly wrong."""
    monkeypatch.setattr(sampling, name, wrong)
    cases = _cases()
    if name == "GREEDY_BELOW":  # only rows with two nearly equal values can show it
        cases = [replace(c, logits=c.logits * np.float32(1e-4)) for c in cases]
    assert disagreements(cases)


@pytest.mark.parametrize(("vocab", "count"), [(4, 60), (130, 60), (49152, 8)])
def test_logprobs_equal_the_oracle(vocab: int, count: int) -> None:
    rng = np.random.default_rng(vocab + 1)
    for _ in range(count):
        case, asked = random_case(rng, vocab), int(rng.choice([0, 1, 5, 20]))
        case = replace(case, params=replace(case.params, min_tokens_banned=()))
        got = ours(case, asked)
        want = oracle.logprobs(case.logits)
        assert got.finite
        assert got.logprob.token == got.token
        assert [i for i, _ in got.logprob.top] == oracle.top_ids(case.logits, asked)
        for token, value in ((got.token, got.logprob.logprob), *got.logprob.top):
            assert logprob_close(value, want[token]), (token, value, want[token])


def logprob_close(value: float, want: float) -> bool:
    """Within 1e-6 of the float64 value, besides the one rounding of the result to float32."""
    return value == want or abs(value - want) <= 1e-6 + abs(want) * 2.0**-24


@pytest.mark.parametrize("wrong", ["float16", "temperature", "penalty"])
def test_control_logprobs_of_other_logits(wrong: str) -> None:
    """Rounding, penalties and temperature must not enter the log-probabilities: the check would see it."""
    x = np.random.default_rng(3).normal(size=50).astype(np.float32)
    want = oracle.logprobs(x)
    other = {"float16": x.astype(np.float16).astype(np.float32), "temperature": x / np.float32(1.001)}
    changed = torch.from_numpy(other.get(wrong, np.where(np.arange(50) == 9, x - np.float32(0.01), x)))
    got = [sampling.token_logprob(torch.from_numpy(x), i).logprob for i in range(50)]
    bad = [sampling.token_logprob(changed, i).logprob for i in range(50)]
    assert all(logprob_close(v, w) for v, w in zip(got, want, strict=True))
    assert sum(not logprob_close(v, w) for v, w in zip(bad, want, strict=True)) > 25


def test_top_list_ties_and_length() -> None:
    row = torch.tensor([0.0, 2.0, -0.0, 2.0, 0.0, NEG_INF])
    top = sampling.token_logprob(row, 0, 4).top
    assert [i for i, _ in top] == [1, 3, 0, 2]
    assert top[0][1] == top[1][1]
    assert top[2][1] == top[3][1]
    assert [i for i, _ in sampling.token_logprob(row, 0, 20).top] == [1, 3, 0, 2, 4, 5]


BAD_ROWS = {
    "nan": ([0.0, math.nan, 1.0, 2.0], Params()),
    "nan below the maximum, sampled": ([0.0, math.nan, 1.0, 2.0], Params(temperature=1.0, top_k=1)),
    "banned nan": ([0.0, math.nan, 1.0, 2.0], Params(min_tokens=9, min_tokens_banned=(1,))),
    "inf": ([0.0, math.inf, 1.0, 2.0], Params(temperature=1.0)),
    "banned inf": ([0.0, math.inf, 1.0, 2.0], Params(min_tokens=9, min_tokens_banned=(1,))),
    "nothing finite": ([NEG_INF] * 4, Params(logit_bias=((2, 100.0),))),
    "all banned": ([0.0, 1.0, 2.0, 3.0], Params(min_tokens=9, min_tokens_banned=(0, 1, 2, 3))),
    "penalty overflows": ([0.0, 3e38, 1.0, 2.0], Params(repetition_penalty=0.01)),
    "temperature overflows": ([0.0, 3e38, 1.0, 2.0], Params(temperature=1e-4, top_p=0.5)),
    "temperature overflows down": ([-3e38] * 4, Params(temperature=1e-4, min_p=0.5)),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_refused(name: str) -> None:
    row, params = BAD_ROWS[name]
    case = Case(np.array(row, dtype=np.float32), params, [1, 1], 1)
    assert oracle.draw(case.logits, case.params, case.history, case.prompt_len).token is None
    got = ours(case, 3)
    assert not got.finite
    assert got.token == -1


def test_minus_infinity_alone_is_no_error() -> None:
    row = np.array([NEG_INF, 1.0, NEG_INF], dtype=np.float32)
    got = ours(Case(row, Params(temperature=1.0, top_k=3), [0], 1))
    assert (got.finite, got.token, got.logprob.logprob) == (True, 1, 0.0)


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-45, 1e-38, 9.99e-6])
@pytest.mark.parametrize("sign", [1, -1])
def test_tiny_temperatures_are_greedy(temperature: float, sign: int) -> None:
    row = sign * np.array([1.0, 0.0, 30.0, 4.0], dtype=np.float32)
    for params in (Params(temperature=temperature), Params(temperature=temperature, top_p=0.5, min_p=0.1)):
        assert ours(Case(row, params, [0], 1)).token == int(row.argmax())


def _bits(s: Sampled) -> tuple[object, ...]:
    return s.token, s.finite, s.logprob.logprob.hex(), [(i, v.hex()) for i, v in s.logprob.top]


@pytest.mark.parametrize(("vocab", "rows"), [(7, 33), (49152, 5)])
def test_rows_are_independent(vocab: int, rows: int) -> None:
    """A step's rows have the bits of each row alone: in any order, beside NaN, in memory of any stride."""
    cases = list(random_cases(vocab + 2, rows, vocab))
    logits = torch.from_numpy(np.stack([c.logits for c in cases]))
    draws = [Draw(to_protocol(c.params), c.history, c.prompt_len, 3) for c in cases]
    pairs = zip(logits, draws, strict=True)
    alone = [_bits(sample_row(x, d.params, d.history, d.prompt_len, 3)) for x, d in pairs]
    before = logits.clone()
    assert [_bits(s) for s in sample_step(logits, draws)] == alone
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))  # the input is not changed
    flipped = sample_step(logits.flip(0), draws[::-1])
    assert [_bits(s) for s in flipped[::-1]] == alone
    wide = torch.full((rows, vocab + 3), math.nan)
    wide[:, 1 : vocab + 1] = logits
    wide[::2] = math.nan
    mixed = sample_step(wide[:, 1 : vocab + 1], draws)
    assert [_bits(s) for s in mixed[1::2]] == alone[1::2]
    assert not any(s.finite for s in mixed[::2])


def test_control_a_sampler_that_sees_other_rows() -> None:
    """Negative control: the comparison of bits notices a softmax maximum taken over the whole step."""
    logits = torch.from_numpy(np.stack([c.logits for c in random_cases(9, 16, 1000)])).nan_to_num(neginf=-9)
    logits = logits.clamp(-9, 9)
    alone = [sampling.token_logprob(x, 3).logprob.hex() for x in logits]
    total = (logits - logits.max()).exp().double().sum(1).log() + logits.max().double()
    shared = [float(v).hex() for v in (logits[:, 3].double() - total).float()]
    assert alone != shared

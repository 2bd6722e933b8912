"""The stages of llm42/sampling.py one by one: penalties bit for bit, and exactly which ids may be drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import llm42.sampling as sampling
from tests.unit import sampling_oracle as oracle
from tests.unit.sampling_cases import Case, random_cases, to_protocol
from tests.unit.sampling_oracle import F32, Params


def kept_ids(
    monkeypatch: pytest.MonkeyPatch, logits: F32, params: Params, tried: Sequence[int] | None = None
) -> list[int]:
    """Which of the ids `tried` can be drawn: an overwhelming noise at an id draws it if, and only if, it was
    kept."""
    row, kept = torch.from_numpy(logits.copy()), []
    for target in range(len(logits)) if tried is None else tried:
        noise = torch.zeros(len(logits), dtype=torch.float64)
        noise[target] = 1e40
        monkeypatch.setattr(sampling, "gumbel_row", lambda *_, noise=noise: noise)
        if sampling.draw(row, to_protocol(params), [0], 1) == target:
            kept.append(target)
    return kept


def _restricting_cases(count: int) -> list[Case]:
    """Cases of stages 3 to 7 alone."""
    cases = []
    for case in random_cases(21, 3 * count, 7):
        p = replace(case.params, temperature=max(case.params.temperature, 1e-5))
        p = replace(p, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, min_tokens=0)
        if p.top_k or p.top_p < 1 or p.min_p:
            cases.append(Case(case.logits, replace(p, logit_bias=()), [0], 1))
    return cases[:count]


def _wrong_sets(monkeypatch: pytest.MonkeyPatch, cases: list[Case]) -> tuple[int, int]:
    """(cases whose kept ids differ, cases left out because float32 may move the top-p border)"""
    wrong = blurred = 0
    for case in cases:
        want = oracle.draw(case.logits, case.params, case.history, case.prompt_len)
        if want.sharp:
            wrong += kept_ids(monkeypatch, case.logits, case.params) != list(want.kept)
        else:
            blurred += 1
    return wrong, blurred


def test_kept_ids_equal_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [replace(c, logits=c.logits + np.float32(0)) for c in _restricting_cases(1500)]
    wrong, blurred = _wrong_sets(monkeypatch, cases)
    # equal weights reach p = 0.1, 0.5, 0.9 exactly: those are the hand-made cases below
    assert wrong == 0
    assert blurred < 0.01 * len(cases)


@pytest.mark.parametrize("stage", ["top_k", "top_p", "min_p"])
def test_control_kept_ids(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Negative control: a border moved by one id, or by a few percent, is noticed."""
    restrict = sampling._restrict

    def moved(values: torch.Tensor, params: sampling.SamplingParams) -> torch.Tensor | None:
        other = {"top_k": params.top_k + 1, "top_p": params.top_p * 0.97, "min_p": params.min_p * 1.03}
        return restrict(values, replace(params, **{stage: other[stage]}))

    monkeypatch.setattr(sampling, "_restrict", moved)
    assert _wrong_sets(monkeypatch, _restricting_cases(300))[0] > 0


LN4 = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
BY_HAND = {
    "top-k border tie": ([0, 1, 1, 1, 0], {"top_k": 2}, [1, 2]),
    "top-k all equal": ([3, 3, 3, 3], {"top_k": 3}, [0, 1, 2]),
    "top-k signed zeros tie": ([-0.0, 0.0, -1, 0.0], {"top_k": 2}, [0, 1]),
    "top-k beyond the vocabulary": ([0, 1, 2], {"top_k": 9}, [0, 1, 2]),
    "top-k more than is finite": ([0, -math.inf, 2, -math.inf], {"top_k": 3}, [0, 2]),
    "top-p reached exactly": ([1, 1, 1, 1], {"top_p": 0.5}, [0, 1]),
    "top-p just past": ([1, 1, 1, 1], {"top_p": 0.5 + 1e-9}, [0, 1, 2]),
    "top-p first id reaches": ([0, 0, 0, 0], {"top_p": 0.25}, [0]),
    "top-p tiny keeps one": ([0, 5, 5, 0], {"top_p": 5e-324}, [1]),
    "top-p tie across ids": ([0, 0, math.log(2), 0], {"top_p": 0.6}, [0, 2]),
    "top-p crossing id stays": (LN4, {"top_p": 0.41}, [0, 1]),
    "top-p after top-k, renormalised": (LN4, {"top_k": 2, "top_p": 0.5}, [0]),
    "top-p after top-k, crossing": (LN4, {"top_k": 2, "top_p": 0.6}, [0, 1]),
    "top-p after temperature": (LN4, {"temperature": 100.0, "top_p": 0.51}, [0, 1, 2]),
    "min-p one keeps the ties of the best": ([2, 1, 2, 2], {"min_p": 1.0}, [0, 2, 3]),
    "min-p bound in float64": ([0, -0.6931471, -0.69314718246], {"min_p": 0.5}, [0, 1]),
    "min-p bound met exactly": ([1, math.log(0.25) + 1, -9], {"min_p": 0.2499}, [0, 1]),
    "min-p after top-k": ([0, 0.1, 0.2, -9], {"top_k": 2, "min_p": 0.01}, [1, 2]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_kept_ids_by_hand(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    row, given, want = BY_HAND[name]
    params = Params(**{"temperature": 1.0, **given})
    logits = np.array(row, dtype=np.float32)
    assert kept_ids(monkeypatch, logits, params) == want
    assert list(oracle.draw(logits, params, [0], 1).kept) == want


@pytest.mark.parametrize(("vocab", "p", "count"), [(2048, 0.25, 512), (4096, 0.5, 2048), (1024, 0.25, 256)])
def test_top_p_tie_beyond_the_sorted_head(
    monkeypatch: pytest.MonkeyPatch, vocab: int, p: float, count: int
) -> None:
    """Equal logits across the border of the head that is sorted first: still the lowest ids, exactly."""
    flat = np.zeros(vocab, dtype=np.float32)
    params = Params(temperature=1.0, top_p=p)
    border = range(count - 3, count + 3)
    assert kept_ids(monkeypatch, flat, params, border) == [count - 3, count - 2, count - 1]
    flat[vocab // 2 :] += np.float32(1e-3)  # the upper half is likelier: the border falls there
    ids = oracle.kept_ids(flat, params)
    last = ids[-1]
    assert kept_ids(monkeypatch, flat, params, [ids[0], last, last + 1, 0]) == [ids[0], last]


@pytest.mark.parametrize("vocab", [4, 7, 300])
def test_penalties_bit_for_bit(vocab: int) -> None:
    def differing(border: int) -> int:
        count = 0
        for case in random_cases(31 + vocab, 400, vocab):
            want = oracle.adjusted(case.logits, case.params, case.history, case.prompt_len)
            row = torch.from_numpy(case.logits.copy())
            prompt_len = min(case.prompt_len + border, len(case.history))
            got = sampling.adjust(row, to_protocol(case.params), case.history, prompt_len).numpy()
            # + 0: the sign of a zero, which no later stage can see, may differ
            count += not np.array_equal((got + 0).view(np.int32), (want + 0).view(np.int32))
            assert np.array_equal(row.numpy().view(np.int32), case.logits.view(np.int32))
        return count

    assert differing(0) == 0
    assert differing(1) > 20  # negative control: the prompt's border one token further


def _adjust(row: list[float], history: list[int], prompt_len: int, params: Params) -> list[float]:
    return sampling.adjust(torch.tensor(row), to_protocol(params), history, prompt_len).tolist()


def test_penalties_by_hand() -> None:
    row = [4.0, -4.0, 1.0, 8.0]
    history = [0, 1, 3, 3, 3]
    # repetition: prompt and output alike, once per id, towards less likely on both sides of zero
    assert _adjust(row, history, 2, Params(repetition_penalty=2.0)) == [2.0, -8.0, 1.0, 4.0]
    # frequency and presence: output only; id 3 stands three times there
    assert _adjust(row, history, 2, Params(frequency_penalty=0.5)) == [4.0, -4.0, 1.0, 6.5]
    assert _adjust(row, history, 2, Params(presence_penalty=0.5)) == [4.0, -4.0, 1.0, 7.5]
    assert _adjust(row, history, 3, Params(frequency_penalty=0.5)) == [4.0, -4.0, 1.0, 7.0]
    assert _adjust(row, history, 5, Params(frequency_penalty=0.5, presence_penalty=1.0)) == row
    # repetition first, then frequency and presence, then the bias
    p = Params(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=1.0, logit_bias=((3, 0.25),))
    assert _adjust(row, history, 2, p) == [2.0, -8.0, 1.0, 8 / 2 - 1.5 - 1 + 0.25]


def test_min_tokens_ends_at_its_border() -> None:
    row = [1.0, 9.0, 2.0]
    params = Params(min_tokens=2, min_tokens_banned=(1,), logit_bias=((1, 100.0),))
    for output, token in ((0, 2), (1, 2), (2, 1), (3, 1)):
        history = [0, 0, 0] + [2] * output
        drawn = sampling.draw(torch.tensor(row), to_protocol(params), history, 3)
        assert drawn == token, output

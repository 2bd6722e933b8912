"""Sampling kernels against llm42/sampling.py, row by row."""

from __future__ import annotations

import torch

from llm42.protocol import SamplingParams
from llm42.sampling import draw, sample_row, token_logprob
from llm42_kernels.sampling import (
    gumbel_argmax,
    integer_cumsum,
    logprobs_of,
    noise_keys,
    restrict,
    restrict_few,
    row_stats,
    top_tokens,
)

VOCAB = 5003  # two chunks, the last one ragged


def _logits(rows: int) -> torch.Tensor:
    return (torch.randn(rows, VOCAB) * 4).round(decimals=1)  # rounding makes ties


def test_stats_equal_the_row_sampler() -> None:
    x = _logits(4)
    x[1, 4500] = x[1, 17] = x[1].max() + 1
    stats = row_stats(x)
    for row in range(4):
        want = sample_row(x[row], SamplingParams(), [1], 1)
        assert int(stats.token[row]) == want.token
        assert abs(float(stats.logprob[row]) - want.logprob.logprob) < 1e-5
    assert int(stats.token[1]) == 17 and not stats.bad.any()


def test_nan_and_all_masked_rows_are_flagged_alone() -> None:
    x = _logits(4)
    x[0, 3], x[2], x[3, 4999] = float("nan"), float("-inf"), float("inf")
    clean = row_stats(_logits(4)[1:2])
    stats = row_stats(x)
    assert stats.bad.tolist() == [1, 0, 1, 1]
    torch.manual_seed(0)
    alone = row_stats(_logits(4)[1:2].contiguous())
    assert torch.equal(alone.log_sum, stats.log_sum[1:2]) and not clean.bad.any()


def test_gumbel_argmax_equals_the_row_sampler() -> None:
    x = _logits(6)
    seeds, positions = [0, 1, 2**40 + 7, -5, 2**63 - 1, 9], [1, 70000, 3, 2**33, 5, 6]
    got = gumbel_argmax(
        x, torch.tensor(noise_keys(seeds, positions, [True] * 5 + [False]), dtype=torch.int32)
    )
    from llm42.noise import gumbel_row

    for row in range(5):
        want = int((x[row].double() + gumbel_row(seeds[row], positions[row], VOCAB)).argmax())
        assert int(got[row]) == want
    assert int(got[5]) == int(x[5].argmax())


def test_restrict_equals_the_row_sampler() -> None:
    cases = [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.05), (40, 0.5, 0.1), (1, 0.01, 0.0)]
    x = _logits(len(cases))
    k = torch.tensor([c[0] or VOCAB for c in cases])
    p, m = (torch.tensor([c[i] for c in cases], dtype=torch.float64) for i in (1, 2))
    kept = restrict(x, k, p, m)
    for row, (top_k, top_p, min_p) in enumerate(cases):
        params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=3)
        keys = torch.tensor(noise_keys([3], [2], [True]), dtype=torch.int32)
        assert int(gumbel_argmax(kept[row : row + 1], keys)[0]) == draw(x[row], params, [1, 2], 1)


def test_few_are_restricted_as_all_are() -> None:
    """Whatever the largest top_k of the rows beside is."""
    cases = [(5, 1.0, 0.0), (40, 0.5, 0.1), (1, 0.01, 0.0), (50, 0.95, 0.0), (7, 1.0, 0.3), (50, 0.3, 0.05)]
    x = _logits(len(cases))
    x[4, 100:120] = x[4].max() + 1.0  # more ties than may stay
    x[5, 9], x[5, 3], x[5, 4:] = 0.0, -0.0, -5.0
    k = torch.tensor([c[0] for c in cases])
    p, m = (torch.tensor([c[i] for c in cases], dtype=torch.float64) for i in (1, 2))
    want = restrict(x, k, p, m)
    for most in (50, 51, 200, VOCAB):
        assert torch.equal(restrict_few(x, k, p, m, most), want)
    assert not torch.equal(restrict_few(x, k, p, m, 20), want), "control: too few are looked at"
    assert want[4].isfinite().sum() == 7


def test_a_float_scan_may_move_the_top_p_border() -> None:
    """Negative control: with float32 running sums the border depends on the order of the additions."""

    def float_scan(weight: torch.Tensor) -> torch.Tensor:
        return (
            weight.float()
            .flip(-1)
            .cumsum(-1)
            .flip(-1)
            .sub(weight.float())
            .neg()
            .add(weight.float().sum())
            .long()
        )

    x = torch.randn(8, VOCAB) * 0.01
    args = (
        torch.full((8,), VOCAB),
        torch.full((8,), 0.5, dtype=torch.float64),
        torch.zeros(8, dtype=torch.float64),
    )
    assert not torch.equal(restrict(x, *args), restrict(x, *args, cumsum=float_scan))
    assert torch.equal(restrict(x, *args), restrict(x, *args, cumsum=integer_cumsum))


def test_top_tokens_and_logprobs() -> None:
    x = _logits(3)
    x[0, 7], x[0, 3] = 0.0, -0.0
    ids, _ = top_tokens(x, 5)
    values = logprobs_of(x, row_stats(x).log_sum, ids)
    for row in range(3):
        want = token_logprob(x[row], 0, 5)
        assert ids[row].tolist() == [i for i, _ in want.top]
        torch.testing.assert_close(values[row], torch.tensor([v for _, v in want.top]), atol=1e-5, rtol=0)
